"""Hand-written stand-ins for what needs a cluster; they count what a leak would leave behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from megamind_ray.errors import ClusterError

__all__ = ["MemoryPlane"]

_UInt8Array = npt.NDArray[np.uint8]


class _Handle:
    """Keeps a block alive, as an object ref does."""

    def __init__(self, data: _UInt8Array) -> None:
        self.data = data


class MemoryPlane:
    """A data plane in this process's memory.

    Attributes:
        peak_bytes: Most that was alive at a time.
        lost: Handles whose next ``get`` fails, as if their node had died; add the ones you want to lose.
        corrupt_next_gets: So many of the next blocks got come with a flipped bit in every byte, so in every segment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self.peak_bytes = 0
        self.lost: set[object] = set()
        self.corrupt_next_gets = 0

    @property
    def live_bytes(self) -> int:
        """Bytes of the blocks that some handle keeps alive."""
        with self._lock:
            return sum(handle.data.nbytes for handle in self._live)

    def put(self, data: _UInt8Array) -> object:
        handle = _Handle(self._copied(data))
        with self._lock:
            self._live.add(handle)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return handle

    def get(self, handles: Sequence[object], *, timeout_s: float) -> list[_UInt8Array]:
        return [self._one(handle, timeout_s) for handle in handles]

    def offer(self, handle: object) -> object:
        return handle

    def settle(self, handle: object) -> object:
        return handle

    @contextmanager
    def fetch(self, handle: object, *, timeout_s: float) -> Iterator[_UInt8Array]:
        yield self._one(handle, timeout_s)

    def _copied(self, data: _UInt8Array) -> _UInt8Array:
        return data.copy()

    def _one(self, handle: object, timeout_s: float) -> _UInt8Array:
        if not isinstance(handle, _Handle) or handle in self.lost:
            raise ClusterError(f"block is lost, waited {timeout_s:g} s")
        data = handle.data.view()
        with self._lock:
            corrupt = self.corrupt_next_gets > 0
            self.corrupt_next_gets -= corrupt
        if corrupt:
            data = data ^ np.uint8(1)
        data.flags.writeable = False
        return data
