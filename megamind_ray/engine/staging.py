"""Host buffers that are used again: fresh memory costs more at first touch than a read from the page cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megamind_ray.device.arena import host_buffer
from megamind_ray.device.strided import Bytes
from megamind_ray.io.local_source import DIRECT_ALIGNMENT_BYTES

__all__ = ["StagingRing"]


class StagingRing:
    """At most ``num_buffers`` buffers, made when first needed. Thread-safe.

    Args:
        num_buffers: How many may be out at a time; who comes later waits for one.
        make: Makes a page-aligned buffer of so many bytes; ``Arena.staging`` gives pinned ones for a GPU.
    """

    def __init__(self, num_buffers: int, make: Callable[[int], Bytes] = host_buffer) -> None:
        self._make = make
        self._free: list[Bytes] = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(num_buffers)

    @contextmanager
    def lend(self, nbytes: int, offset: int = 0) -> Iterator[Bytes]:
        """A buffer of exactly ``nbytes``, with whatever its last user left in it.

        Args:
            nbytes: Size.
            offset: Of the bytes in their file. They get the same place relative to a page as they have there, so that
                they can be read into the buffer past the page cache.
        """
        phase = offset % DIRECT_ALIGNMENT_BYTES
        with self._slots:
            with self._lock:
                # The last one back is the one that caches know best.
                buffer = self._free.pop() if self._free else None
            if buffer is None or buffer.nbytes < phase + nbytes:
                buffer = self._make(DIRECT_ALIGNMENT_BYTES + nbytes)
            try:
                yield buffer[phase : phase + nbytes]
            finally:
                with self._lock:
                    self._free.append(buffer)

    def clear(self) -> None:
        """Gives back the memory of the buffers that are not out; a model may stay loaded for days."""
        with self._lock:
            self._free.clear()
