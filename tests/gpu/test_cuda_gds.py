"""Reads of files straight to a device, where kvikio is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megamind_ray.device.gds import available, read_to_device
from megamind_ray.device.word_sum import host_word_sum, word_sum
from megamind_ray.errors import SourceError

pytestmark = pytest.mark.gpu


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    pytest.importorskip("kvikio")
    assert available()
    values = np.random.default_rng(0).integers(0, 256, (32 << 20) + 13, dtype=np.uint8)
    path = tmp_path / "weights"
    values.tofile(path)
    return path, values


@pytest.mark.parametrize("offset", [0, 4096, 777])
def test_a_range_arrives_with_its_word_sum(
    data: tuple[Path, np.ndarray[tuple[int], np.dtype[np.uint8]]], offset: int
) -> None:
    path, values = data
    flat = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")

    read_to_device(path, offset, flat)

    wanted = values[offset : offset + flat.numel()]
    assert int(word_sum(flat)) == host_word_sum(wanted)
    assert np.array_equal(flat.cpu().numpy(), wanted)


def test_a_file_that_ends_too_early_is_a_source_error(
    data: tuple[Path, np.ndarray[tuple[int], np.dtype[np.uint8]]],
) -> None:
    path, values = data

    with pytest.raises(SourceError):
        read_to_device(path, values.nbytes - 100, torch.zeros(4096, dtype=torch.uint8, device="cuda"))
