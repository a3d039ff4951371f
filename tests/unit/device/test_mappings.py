"""Which shared mapping an address lies in."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from megamind_ray.device.arena import host_buffer
from megamind_ray.device.mappings import SharedMapping, shared_mapping

LISTING = """\
00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/python
7f0000000000-7f0000001000 rw-p 00000000 00:00 0
7f0000001000-7f0000003000 rw-s 00002000 00:1a 77  /dev/shm/plasma (deleted)
7f0000003000-7f0000004000 rw-s 00004000 00:1a 77  /dev/shm/plasma (deleted)
7f0000004000-7f0000005000 rw-s 00005000 00:1a 78  /dev/shm/other one
7f0000005000-7f0000006000 r--s 00006000 00:1a 78  /dev/shm/other one
"""


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    path = tmp_path / "maps"
    path.write_text(LISTING)
    return path


def test_parts_of_one_file_in_a_row_are_one_mapping(listing: Path) -> None:
    found = shared_mapping(0x7F0000001800, 0x7F0000003800, listing)

    assert found == SharedMapping(
        begin=0x7F0000001000, end=0x7F0000004000, writable=True, file=("00:1a", 77), shift=0x7EFFFFFFF000
    )


def test_another_file_or_other_rights_end_a_mapping(listing: Path) -> None:
    assert shared_mapping(0x7F0000003800, 0x7F0000004800, listing) is None
    assert shared_mapping(0x7F0000004800, 0x7F0000005800, listing) is None

    last = shared_mapping(0x7F0000005000, 0x7F0000006000, listing)
    assert last is not None
    assert not last.writable


@pytest.mark.parametrize("begin", [0x400000, 0x7F0000000000, 0x7F0000006000], ids=["private file", "heap", "nothing"])
def test_what_is_not_shared_is_not_found(listing: Path, begin: int) -> None:
    assert shared_mapping(begin, begin + 16, listing) is None


def test_without_procfs_nothing_is_found(tmp_path: Path) -> None:
    assert shared_mapping(0x1000, 0x2000, tmp_path / "missing") is None


def test_this_process_s_own_mappings_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    with path.open("r+b") as file:
        shared = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    private = host_buffer(mmap.PAGESIZE)

    found = shared_mapping(shared.ctypes.data + 5, shared.ctypes.data + shared.nbytes)

    assert found is not None
    assert (found.begin, found.end) == (shared.ctypes.data, shared.ctypes.data + shared.nbytes)
    assert found.file[1] == path.stat().st_ino
    assert shared_mapping(private.ctypes.data, private.ctypes.data + private.nbytes) is None
