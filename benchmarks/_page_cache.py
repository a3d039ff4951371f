"""Putting files out of the page cache or into it, and checking that they are: a hint to the system may be ignored."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megamind_ray.io.mounts import mount_of

__all__ = ["PageCacheError", "evict", "file_system", "fill", "resident_share"]

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
# The system keeps a few pages that it is about to put on its lists, and drops a few behind a read.
_TOLERATED_SHARE = 0.005
_ATTEMPTS = 5
_PIECE_BYTES = 8 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class PageCacheError(Exception):
    """The page cache is not as a setting needs it, and the setting cannot be measured here."""


def file_system(folder: Path) -> str:
    """Type of the file system that a folder is on: ``ext4``, ``tmpfs``, ..."""
    mount = mount_of(folder)
    return "unknown" if mount is None else mount.kind


def evict(files: Sequence[Path]) -> None:
    """Writes files out and drops them from the page cache.

    Raises:
        PageCacheError: Pages stay, or the files live in memory.
    """
    kind = file_system(files[0].parent)
    if kind in _MEMORY_FILE_SYSTEMS:
        raise PageCacheError(f"{files[0].parent}: {kind} has no page cache to leave; give --dir a folder on a disk")
    share = 1.0
    for _ in range(_ATTEMPTS):
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        share = resident_share(files)
        if share <= _TOLERATED_SHARE:
            return
    raise PageCacheError(f"{share:.1%} of {files[0].parent} stays in the page cache; is it mapped by another process?")


def fill(files: Sequence[Path]) -> None:
    """Reads files, so that the page cache has them.

    Raises:
        PageCacheError: It does not keep them.
    """
    scratch = bytearray(_PIECE_BYTES)
    share = resident_share(files)
    for _ in range(_ATTEMPTS):
        if share >= 1 - _TOLERATED_SHARE:
            return
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(scratch):
                    pass
        share = resident_share(files)
    if share < 1 - _TOLERATED_SHARE:
        raise PageCacheError(f"only {share:.1%} of {files[0].parent} stays in the page cache; memory is short")


def resident_share(files: Sequence[Path]) -> float:
    """Share of the files' pages that are in the page cache, from 0 to 1."""
    resident = pages = 0
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
            flags = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            length, out = ctypes.c_size_t(len(mapping)), flags.ctypes.data_as(ctypes.c_void_p)
            if _libc.mincore(ctypes.c_void_p(address), length, out) != 0:
                raise PageCacheError(f"{path}: mincore: {os.strerror(ctypes.get_errno())}")
            resident += int((flags & 1).sum())
            pages += len(flags)
    return resident / max(pages, 1)
