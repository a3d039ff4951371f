"""Whether bytes of a file are in the page cache, and whether its file system lets us read past it."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from functools import cache
from typing import Any, Final

from megamind_ray.io.mounts import read_mounts

__all__ = ["PageCacheProbe", "is_network_file_system"]

_NUM_SAMPLES: Final = 3
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
# Network file systems read ahead and cache by rules of their own, and some accept O_DIRECT only to emulate it.
_NETWORK_TYPES: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs"}
)


class PageCacheProbe:
    """Samples whether ranges of a file are in memory. Thread-safe.

    A sample costs a microsecond; asking for every page would cost a tenth of what reading them does. A wrong answer
    costs time only.

    ``mincore`` tells it without touching anything, but only to who may write to the file (Linux calls every page
    resident for others). For them one page is read with ``RWF_NOWAIT``; a full such read instead would start reading
    ahead what is then read a second time past the cache.

    Args:
        fd: The file, open for reading; the probe does not close it.
        size_bytes: Its size.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._address: int | None = None
        if size_bytes and _mincore_is_honest(fd):
            # Never read through: a mapping alone reads nothing, and a file that shrinks cannot kill the process. By the
            # C library, as Python's own mapping would keep a descriptor open.
            found = _libc().mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            self._address = None if found in (None, _MAP_FAILED) else found

    def close(self) -> None:
        """Gives the mapping back; nobody asks any more."""
        address, self._address = self._address, None
        if address is not None:
            _libc().munmap(address, self._size_bytes)

    def is_cached(self, offset: int, num_bytes: int, *, unknown: bool = True) -> bool:
        """Whether all sampled pages of ``[offset, offset + num_bytes)`` are in memory.

        Args:
            offset: Of the range.
            num_bytes: Of the range.
            unknown: The answer where the kernel refuses to tell. As if they were, bytes are read as everybody does.
        """
        if num_bytes <= 0:
            return True
        if self._address is None:
            return self._answers_at_once(offset + random.randrange(num_bytes), unknown)
        resident = ctypes.create_string_buffer(1)
        step = max(1, (num_bytes - 1) // (_NUM_SAMPLES - 1))
        for place in range(offset, offset + num_bytes, step):
            page = place // mmap.PAGESIZE * mmap.PAGESIZE
            if _libc().mincore(self._address + page, 1, resident):
                return unknown
            if not resident.raw[0] & 1:
                return False
        return True

    def _answers_at_once(self, offset: int, unknown: bool) -> bool:
        try:
            return os.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except OSError:  # the file system knows no such flag
            return unknown


@cache
def is_network_file_system(device: int) -> bool:
    """Whether files with this ``st_dev`` come over a network, as far as the kernel's mount table tells."""
    kind = next((mount.kind for mount in reversed(read_mounts()) if mount.device == device), "")
    return kind in _NETWORK_TYPES or kind.startswith("fuse")


def _mincore_is_honest(fd: int) -> bool:
    """The kernel's own rule: the owner of the file, or who may write to it."""
    return os.geteuid() in (0, os.fstat(fd).st_uid) or os.access(f"/proc/self/fd/{fd}", os.W_OK)


@cache
def _libc() -> Any:
    # With the GIL held: these calls take microseconds, and giving the GIL away may cost a hundred.
    library = ctypes.PyDLL(None)
    number, address, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    library.mincore.argtypes = (address, size, address)
    library.mmap.argtypes = (address, size, number, number, number, ctypes.c_int64)
    library.mmap.restype = address
    library.munmap.argtypes = (address, size)
    return library
