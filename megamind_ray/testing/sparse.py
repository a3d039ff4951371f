"""Checkpoints of any size on any disk: real headers, a hole for the weights. They read as zeros."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from megamind_ray.core.tensor import DType

__all__ = ["sparse_checkpoint", "write_sparse_file"]


def write_sparse_file(path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> int:
    """Writes one safetensors file whose data is a hole.

    Args:
        path: Where.
        tensors: Name, dtype as in a header, and shape of each, in the order of the file.

    Returns:
        Bytes of the tensors.
    """
    header: dict[str, object] = {}
    offset = 0
    for name, dtype, shape in tensors:
        nbytes = DType[dtype].nbytes(math.prod(shape))
        assert nbytes is not None, f"{name}: {shape} of {dtype} does not fill whole bytes"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(8 + len(text) + offset)
    return offset


def sparse_checkpoint(
    folder: Path,
    tensors: Mapping[str, tuple[int, ...]],
    *,
    dtype: str = "BF16",
    config: Mapping[str, object] | None = None,
) -> Path:
    """Writes a folder with one sparse file and, where given, a ``config.json``; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sparse_file(folder / "model.safetensors", ((name, dtype, shape) for name, shape in tensors.items()))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
