"""A file of this machine, read by ranges: from the page cache, or past it with ``O_DIRECT`` (docs/design/0010)."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from contextlib import suppress
from typing import Final

import numpy as np

from megamind_ray.config import DirectMode
from megamind_ray.errors import RequestError
from megamind_ray.io.checksum import crc32
from megamind_ray.io.page_cache import PageCacheProbe, is_network_file_system
from megamind_ray.io.source import FileVersion, OpenSource, ShortReadError
from megamind_ray.units import KIB, MIB

__all__ = ["DIRECT_ALIGNMENT_BYTES", "LocalSource"]

# Offsets, lengths and addresses of direct reads; disks ask for 512 or 4096. Destinations that are as far from such a
# border in memory as their bytes are in the file are read into place.
DIRECT_ALIGNMENT_BYTES: Final = 4096
# Below this a direct read is all latency, and the page cache reads ahead.
_MIN_DIRECT_BYTES: Final = 256 * KIB
# Summed while they are in a cache, where a sum runs twice as fast as from memory. With less, taking the GIL twice a
# piece costs more than that gains (docs/design/0010).
_SUMMED_PIECE_BYTES: Final = 2 * MIB
_BOUNCE_BYTES: Final = 4 * MIB
_HUGE_PAGE_BYTES: Final = 2 * MIB


class LocalSource(OpenSource):
    """A file of this machine, read at offsets.

    Args:
        path: The file.
        direct: ``auto``, ``always`` or ``never``: whether to read past the page cache. ``auto`` does where the bytes
            are not in it; ``always`` still falls back where the file system does not allow it.

    Raises:
        OSError: It cannot be opened.
        RequestError: It is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str], *, direct: DirectMode = "auto") -> None:
        name = os.fspath(path)
        # Non-blocking, since opening a named pipe would wait for a writer for ever.
        self._fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._direct_fd: int | None = None
        self._probe: PageCacheProbe | None = None
        self._direct = direct
        self._no_direct = False
        self._lock = threading.Lock()
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise RequestError(f"{name}: is not a regular file; give a safetensors file or a folder with some")
            super().__init__(name, _version(status))
            self._prepare(status)
        except BaseException:
            self.close()
            raise

    def _prepare(self, status: os.stat_result) -> None:
        if self._direct != "auto":
            return
        self._no_direct = is_network_file_system(status.st_dev)
        if not self._no_direct:
            self._probe = PageCacheProbe(self._fd, status.st_size)
            # What is read through the cache is in it, or short, like a header: nothing to read ahead for.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
        view = buffer.cast("B")
        self.require_inside(offset, view.nbytes)
        if not self._read_past_cache(offset, view, wanted=past_cache):
            self._read_buffered(offset, view)

    def read_summed(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> int:
        view = buffer.cast("B")
        self.require_inside(offset, view.nbytes)
        if self._read_past_cache(offset, view, wanted=past_cache):
            return crc32(view)
        value = 0
        for begin in range(0, view.nbytes, _SUMMED_PIECE_BYTES):
            piece = view[begin : begin + _SUMMED_PIECE_BYTES]
            if os.preadv(self._fd, [piece], offset + begin) != piece.nbytes:
                self._read_buffered(offset + begin, piece)
            value = crc32(piece, value)
        return value

    def prefers_long_reads(self, offset: int, num_bytes: int) -> bool:
        return self._direct_fd_for(offset, num_bytes, past_cache=False) is not None

    def is_in_memory(self, offset: int, num_bytes: int) -> bool:
        return self._probe is not None and self._probe.is_cached(offset, num_bytes, unknown=False)

    def current_version(self) -> FileVersion:
        return _version(os.fstat(self._fd))

    def close(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()
        fds, self._fd, self._direct_fd = (self._fd, self._direct_fd), -1, None
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)

    def _read_past_cache(self, offset: int, view: memoryview, *, wanted: bool) -> bool:
        """Reads with ``O_DIRECT`` where that is wanted, or better; False where it has to be an ordinary read."""
        fd = self._direct_fd_for(offset, view.nbytes, past_cache=wanted)
        if fd is not None and self._read_direct(fd, offset, view):
            return True
        if wanted:  # the next best: the kernel forgets whole pages only
            begin, end = _floor(offset), _ceil(offset + view.nbytes)
            os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
        return False

    def _read_buffered(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:  # Linux gives at most 2 GiB a call, network file systems less
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise self._end_of_file(offset + done)
            done += count

    def _read_direct(self, fd: int, offset: int, view: memoryview) -> bool:
        """Reads past the page cache; False where the file system refuses after all."""
        try:
            done = 0
            while done < view.nbytes:
                done += self._read_direct_once(fd, offset + done, view[done:])
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._give_direct_up()
            return False
        return True

    def _read_direct_once(self, fd: int, offset: int, view: memoryview) -> int:
        """One direct read, of whole blocks; gives the number of bytes of ``view`` that it filled.

        What shares its block with bytes that are not wanted (at both ends), and all of a destination that is off the
        grid of blocks, passes a bounce buffer: a neighbour's bytes may have been verified already.
        """
        begin, end = _floor(offset), offset + view.nbytes
        first, last = _ceil(offset), _floor(end)
        bounce = _bounce()
        if first >= last or (_address(view) - offset) % DIRECT_ALIGNMENT_BYTES:
            count = os.preadv(fd, [bounce[: _ceil(end) - begin]], begin)
            filled = self._filled(begin, count, offset, end)
            # By numpy: it gives the GIL away for the copy.
            np.copyto(np.frombuffer(view, np.uint8, filled), np.frombuffer(bounce, np.uint8, filled, offset - begin))
            return filled
        head, tail = bounce[: first - begin], bounce[DIRECT_ALIGNMENT_BYTES:][: _ceil(end) - last]
        count = os.preadv(fd, [part for part in (head, view[first - offset : last - offset], tail) if part], begin)
        filled = self._filled(begin, count, offset, end)
        view[: first - offset] = head[offset - begin :]
        view[last - offset :] = tail[: end - last]
        return filled

    def _filled(self, begin: int, count: int, offset: int, end: int) -> int:
        """How many bytes of ``[offset, end)`` a read from ``begin`` on brought."""
        if begin + count <= offset:
            raise self._end_of_file(offset)
        return min(begin + count, end) - offset

    def _end_of_file(self, offset: int) -> ShortReadError:
        self.check_unchanged()
        return ShortReadError(f"end of file at byte {offset} of {self.size_bytes}")

    def _direct_fd_for(self, offset: int, num_bytes: int, *, past_cache: bool) -> int | None:
        if self._no_direct or self._direct == "never" or num_bytes < DIRECT_ALIGNMENT_BYTES:
            return None
        wanted = past_cache or self._direct == "always" or self._is_cold(offset, num_bytes)
        return self._open_direct() if wanted else None

    def _is_cold(self, offset: int, num_bytes: int) -> bool:
        return (
            self._probe is not None and num_bytes >= _MIN_DIRECT_BYTES and not self._probe.is_cached(offset, num_bytes)
        )

    def _open_direct(self) -> int | None:
        with self._lock:
            if self._direct_fd is None:
                try:
                    # By its descriptor: the path may lead to another file by now.
                    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
                    self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", flags)
                except OSError:  # the file system knows no direct reads
                    self._give_direct_up()
        return self._direct_fd

    def _give_direct_up(self) -> None:
        self._no_direct = True
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_NORMAL)  # from now on everything is read through the cache


_of_thread = threading.local()


def _bounce() -> memoryview:
    """The aligned buffer of this thread, for all files: a model may have hundreds."""
    found: memoryview | None = getattr(_of_thread, "bounce", None)
    if found is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, _BOUNCE_BYTES + _HUGE_PAGE_BYTES, flags=flags)
        # With pages of 4 KiB a disk is asked in small pieces, and gives half as much (docs/design/0010).
        with suppress(AttributeError, OSError):  # systems and kernels without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(mapping)
        skipped = -_address(whole) % _HUGE_PAGE_BYTES
        found = _of_thread.bounce = whole[skipped : skipped + _BOUNCE_BYTES]
    return found


def _floor(offset: int) -> int:
    return offset // DIRECT_ALIGNMENT_BYTES * DIRECT_ALIGNMENT_BYTES


def _ceil(offset: int) -> int:
    return -(-offset // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def _version(status: os.stat_result) -> FileVersion:
    return FileVersion(status.st_size, status.st_mtime_ns)
