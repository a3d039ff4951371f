from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megamind_ray.core.demands import Demands
from megamind_ray.core.manifest import Manifest
from megamind_ray.io import open_manifest
from megamind_ray.testing.checkpoints import CHECKPOINTS


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Manifest]:
    """The manifest of a checkpoint of ``CHECKPOINTS``, written once."""
    root = tmp_path_factory.mktemp("checkpoints")
    written: dict[str, Manifest] = {}

    def get(name: str) -> Manifest:
        if name not in written:
            written[name] = open_manifest(CHECKPOINTS[name](root / name))
        return written[name]

    return get


@pytest.fixture(scope="session")
def execute() -> Callable[[Demands, Manifest], list[dict[str, tuple[tuple[int, ...], bytes]]]]:
    return _execute


def _runs(array: np.ndarray, shape: tuple[int, int], offset: int, stride: int) -> np.ndarray:
    """The runs of a row as a two-dimensional view; numpy refuses what lies outside the array."""
    return np.ndarray(shape, np.uint8, array.data, offset, (stride, 1))


def _execute(demands: Demands, manifest: Manifest) -> list[dict[str, tuple[tuple[int, ...], bytes]]]:
    """Does what demands say with numpy: per rank, the shape and the bytes of each name.

    Bytes that nothing was copied to would keep a pattern; each byte is counted to be written exactly once.
    """
    files = [np.fromfile(Path(manifest.root) / file.path, dtype=np.uint8) for file in manifest.files]
    views, rows = demands.views, demands.slices
    held = {
        (int(rank), int(tensor)): (np.full(nbytes, 0xA5, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8))
        for rank, tensor, nbytes, alias in zip(views.rank, views.tensor, views.nbytes, views.alias, strict=True)
        if not alias
    }
    for i in range(len(rows.file)):
        shape = int(rows.num_runs[i]), int(rows.run_bytes[i])
        source = _runs(files[rows.file[i]], shape, int(rows.src_offset[i]), int(rows.src_stride_bytes[i]))
        for rank in demands.consumer_sets[rows.consumers[i]]:
            for array, change in zip(held[rank, int(rows.tensor[i])], (source, None), strict=True):
                target = _runs(array, shape, int(rows.dst_offset[i]), int(rows.dst_stride_bytes[i]))
                target[:] = target + 1 if change is None else change
    assert all((writes == 1).all() for _, writes in held.values())
    result: list[dict[str, tuple[tuple[int, ...], bytes]]] = [{} for _ in demands.parallel.ranks]
    for rank, tensor, name, shape in zip(views.rank, views.tensor, views.name, views.shape, strict=True):
        result[rank][demands.names[name]] = (demands.shapes[shape], held[int(rank), int(tensor)][0].tobytes())
    return result
