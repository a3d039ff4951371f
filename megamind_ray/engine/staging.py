"""Host buffers that are used again: fresh memory costs more at first touch than a read from the page cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from megamind_ray.config import IoConfig
from megamind_ray.core.program import FileTable
from megamind_ray.device.arena import host_buffer
from megamind_ray.device.strided import Bytes
from megamind_ray.io.local_source import DIRECT_ALIGNMENT_BYTES

__all__ = ["StagingRing", "staging_ring"]

# Of remote files, beside as many as have all requests in flight: one that is being taken out, and one for chunks that
# are there and wait for the others of their extent. Where the times of requests vary by a third, 15.8 of 16 are under
# way then; with one spare extent 14.5.
_SPARE_EXTENTS: Final = 2


class StagingRing:
    """Buffers of at most ``max_bytes`` together, those that wait for their next use included. Thread-safe.

    Who comes when as much is out waits; one that needs more than that by itself gets it when nothing else is out.
    Sizes are counted in granules, and a buffer is used again for what takes as many: lent for less, it would leave no
    room for others.

    Args:
        max_bytes: Bound of the memory, without the page that each buffer has for its place in one.
        granule_bytes: Sizes are rounded up to multiples of it when they are counted.
        make: Makes a page-aligned buffer of so many bytes; ``Arena.staging`` gives pinned ones for a GPU.
    """

    def __init__(self, max_bytes: int, granule_bytes: int = 1, make: Callable[[int], Bytes] = host_buffer) -> None:
        self._max_bytes = max_bytes
        self._granule_bytes = granule_bytes
        self._make = make
        self._returned = threading.Condition()
        self._bytes_out = 0
        self._free: list[tuple[int, Bytes]] = []  # with what each counts; the one that was out last is at the end

    @contextmanager
    def lend(self, nbytes: int, offset: int = 0) -> Iterator[Bytes]:
        """A buffer of exactly ``nbytes``, with whatever its last user left in it.

        Args:
            nbytes: Size.
            offset: Of the bytes in their file. They get the same place relative to a page as they have there, so that
                they can be read into the buffer past the page cache.
        """
        phase = offset % DIRECT_ALIGNMENT_BYTES
        counted = max(1, -(-nbytes // self._granule_bytes)) * self._granule_bytes
        buffer = self._take(counted)
        try:
            if buffer is None or buffer.nbytes < phase + nbytes:
                buffer = self._make(DIRECT_ALIGNMENT_BYTES + nbytes)
            yield buffer[phase : phase + nbytes]
        finally:
            self._give_back(counted, buffer)

    def clear(self) -> None:
        """Gives back the memory of the buffers that are not out; a model may stay loaded for days."""
        with self._returned:
            self._free.clear()

    def _take(self, counted: int) -> Bytes | None:
        """Waits until there is room, and makes it; gives a buffer that counts as much, if one is free."""
        with self._returned:
            self._returned.wait_for(lambda: not self._bytes_out or self._bytes_out + counted <= self._max_bytes)
            self._bytes_out += counted
            # The last one back is the one that caches know best.
            fitting = (place for place in reversed(range(len(self._free))) if self._free[place][0] == counted)
            place = next(fitting, None)
            buffer = None if place is None else self._free.pop(place)[1]
            while self._free and self._bytes_out + sum(size for size, _ in self._free) > self._max_bytes:
                del self._free[0]
            return buffer

    def _give_back(self, counted: int, buffer: Bytes | None) -> None:
        with self._returned:
            self._bytes_out -= counted
            if buffer is not None:
                self._free.append((counted, buffer))
            self._returned.notify_all()


def staging_ring(files: FileTable, io: IoConfig, make: Callable[[int], Bytes] = host_buffer) -> StagingRing:
    """The ring for reading a program's files with ``io.reads_in_flight`` threads.

    Extents of local files are one read each, so each thread may have the longest one. In storage behind a network the
    chunks of an extent are requests of their own: whoever waits for room leaves those of
    ``io.remote_threads``, all that the process has in flight, and of two more extents.

    Args:
        files: What is read.
        io: Sizes and threads.
        make: As of ``StagingRing``.
    """
    extent_bytes = -(-io.extent_bytes // files.chunk_bytes) * files.chunk_bytes
    if not io.is_remote(files.root):
        return StagingRing(io.read_threads * extent_bytes, files.chunk_bytes, make)
    num_extents = -(-io.remote_threads * files.chunk_bytes // extent_bytes) + _SPARE_EXTENTS
    return StagingRing(num_extents * extent_bytes, files.chunk_bytes, make)
