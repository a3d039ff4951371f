"""Reads of files to device memory, with files that stand for kvikio's."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megamind_ray.device.gds import DeviceFile, available, read_to_device
from megamind_ray.errors import ClusterError, RequestError, SourceError


class _Read:
    def __init__(self, num_bytes: int, looks: int) -> None:
        self._num_bytes = num_bytes
        self._looks = looks

    def done(self) -> bool:
        self._looks -= 1
        return self._looks <= 0

    def get(self) -> int:
        return self._num_bytes


class _File:
    """Reads on the host; ``looks`` is how often one must look until a read is done."""

    def __init__(self, path: Path, looks: float = 3) -> None:
        self._data = path.read_bytes()
        self._looks = looks
        self.closed = False

    def pread(self, buf: Any, size: int, file_offset: int) -> _Read:
        data = self._data[file_offset : file_offset + size]
        buf[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        return _Read(len(data), self._looks)  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(100)))
    return path


def _opener(opened: list[_File], looks: float = 3) -> Callable[[Path], DeviceFile]:
    def open_file(path: Path) -> DeviceFile:
        opened.append(_File(path, looks))
        return opened[-1]

    return open_file


def test_a_range_of_the_file_fills_the_memory(path: Path) -> None:
    opened: list[_File] = []
    flat = torch.zeros(20, dtype=torch.uint8)

    read_to_device(path, 30, flat, open_file=_opener(opened))

    assert flat.tolist() == list(range(30, 50))
    assert opened[0].closed


def test_a_file_that_ends_too_early_is_a_source_error(path: Path) -> None:
    opened: list[_File] = []

    with pytest.raises(SourceError, match="10 of 20 bytes at 90"):
        read_to_device(path, 90, torch.zeros(20, dtype=torch.uint8), open_file=_opener(opened))

    assert opened[0].closed


def test_a_read_that_never_ends_is_given_up_and_its_file_stays_open(path: Path) -> None:
    opened: list[_File] = []

    with pytest.raises(ClusterError, match=r"device cpu: reading .*weights at 0 did not end within 0.01 s"):
        read_to_device(
            path, 0, torch.zeros(20, dtype=torch.uint8), deadline_s=0.01, open_file=_opener(opened, float("inf"))
        )

    assert not opened[0].closed


def test_a_missing_file_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be opened"):
        read_to_device(tmp_path / "no", 0, torch.zeros(1, dtype=torch.uint8), open_file=_opener([]))


@pytest.mark.skipif(find_spec("kvikio") is not None, reason="kvikio is installed")
def test_without_kvikio_the_error_names_the_extra(path: Path) -> None:
    assert not available()
    with pytest.raises(RequestError, match=r"megamind-ray\[gds\]"):
        read_to_device(path, 0, torch.zeros(1, dtype=torch.uint8))


def test_nothing_is_read_without_opening_the_file(tmp_path: Path) -> None:
    read_to_device(tmp_path / "no", 0, torch.empty(0, dtype=torch.uint8))
