"""What a node has to read, in order; what it has not begun can be taken back (docs/design/0029). Threads, no I/O."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from megamind_ray.core.ids import ExtentId
from megamind_ray.core.stragglers import ReadProgress

__all__ = ["ReadQueue"]

Item = TypeVar("Item")


class ReadQueue(Generic[Item]):
    """Extents to read. Threads iterate over it for what to do next; any thread may call everything.

    An extent is *waiting* until somebody is about to ask storage for it (``begin``), also while a thread that has taken
    it waits for credit or a buffer. Only what is waiting can be taken back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: deque[tuple[ExtentId, Item]] = deque()
        # In the order in which they are read, those that a thread has taken included.
        self._waiting: dict[ExtentId, int] = {}
        self._begun: dict[ExtentId, int] = {}
        self._done_bytes = 0
        self._is_idle = True

    def add(self, items: Iterable[tuple[ExtentId, int, Item]]) -> bool:
        """Adds extents with their sizes behind all others.

        Returns:
            Whether nobody iterates over it any more: whoever added them has to see to it.
        """
        with self._lock:
            was_idle = self._is_idle
            for extent, nbytes, item in items:
                self._waiting[extent] = nbytes
                self._next.append((extent, item))
                self._is_idle = False
            return was_idle and not self._is_idle

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._lock:
            while self._next:
                extent, item = self._next.popleft()
                if extent in self._waiting:
                    return item
            self._is_idle = True
            raise StopIteration

    def begin(self, extent: ExtentId) -> bool:
        """Storage is asked for it now; False where it was taken back: then it must not be."""
        with self._lock:
            nbytes = self._waiting.pop(extent, None)
            if nbytes is None:
                return False
            self._begun[extent] = nbytes
            return True

    def end(self, extent: ExtentId) -> None:
        """It is done, or given up."""
        with self._lock:
            nbytes = self._begun.pop(extent, None)
            self._done_bytes += self._waiting.pop(extent, 0) if nbytes is None else nbytes

    def take_back(self, keep_bytes: int) -> tuple[ExtentId, ...]:
        """Takes what is waiting out of it, but for the first ``keep_bytes``; an extent is kept or taken as a whole."""
        with self._lock:
            taken: list[ExtentId] = []
            for extent, nbytes in self._waiting.items():
                if keep_bytes <= 0:
                    taken.append(extent)
                keep_bytes -= nbytes
            for extent in taken:
                del self._waiting[extent]
            return tuple(taken)

    def holds(self, extent: ExtentId) -> bool:
        """Whether it is still to be read, or being read."""
        with self._lock:
            return extent in self._waiting or extent in self._begun

    @property
    def progress(self) -> ReadProgress:
        """How far it is."""
        with self._lock:
            return ReadProgress(
                done_bytes=self._done_bytes,
                begun_bytes=sum(self._begun.values()),
                waiting_bytes=sum(self._waiting.values()),
            )
