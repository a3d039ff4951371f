"""Leases: who may still look at memory of an arena, so that nobody's weights change under their hands."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Self

from megamind_ray.errors import RequestError
from megamind_ray.units import format_bytes

__all__ = ["Lease", "LeaseBook"]


class Lease:
    """The right to look at one allocation; given back by ``close``, ``with`` or when it is forgotten.

    Attributes:
        epoch: Epoch of the allocation; the arena never uses it a second time.
    """

    __slots__ = ("_book", "epoch")

    def __init__(self, book: LeaseBook, epoch: int) -> None:
        self._book: LeaseBook | None = book
        self.epoch = epoch

    def close(self) -> None:
        """Gives the lease back; a second call does nothing."""
        book, self._book = self._book, None
        if book is not None:
            book._returned(self.epoch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class LeaseBook:
    """Leases of one arena, counted per epoch. Thread-safe.

    Leases may be returned by the garbage collector in the middle of any code, also of this class in the same
    thread: the lock is re-entrant, and each method leaves the counts right at every step.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._held: dict[int, int] = {}
        self._expiring: set[int] = set()
        self._expired: deque[int] = deque()

    def open(self, epoch: int) -> None:
        """Admits leases on a new allocation."""
        with self._changed:
            self._held[epoch] = 0

    def lease(self, epoch: int) -> Lease:
        """Hands out a lease.

        Raises:
            RequestError: The allocation was given back.
        """
        with self._changed:
            if epoch not in self._held:
                raise RequestError(
                    f"arena memory of epoch {epoch} was given back; take the tensors from the model that is loaded now"
                )
            self._held[epoch] += 1
        # Outside the lock: making an object may run the garbage collector, which may return leases of another book.
        return Lease(self, epoch)

    def num_held(self, epoch: int) -> int:
        """Leases that are out."""
        with self._changed:
            return self._held.get(epoch, 0)

    def close(self, epoch: int, deadline_s: float, nbytes: int) -> None:
        """Ends an epoch once nobody holds a lease of it; no new lease is admitted from the moment it ends.

        Args:
            epoch: Which one.
            deadline_s: How long to wait for the leases that are out; 0 refuses at once.
            nbytes: Size of the allocation, for the message.

        Raises:
            RequestError: Leases are still out after the deadline, and the epoch goes on; or it has ended before.
        """
        until_s = time.monotonic() + deadline_s
        with self._changed:
            while (num_held := self._held.get(epoch)) != 0:
                if num_held is None:
                    raise RequestError(f"arena memory of epoch {epoch} was given back before; give it back once")
                rest_s = until_s - time.monotonic()
                if rest_s <= 0:
                    raise RequestError(
                        f"arena memory of epoch {epoch} ({format_bytes(nbytes)}) is still in use by {num_held} "
                        f"tensors or leases after {deadline_s:g} s; drop the tensors and views of them, then try again"
                    )
                self._changed.wait(rest_s)
            del self._held[epoch]

    def expire(self, epoch: int) -> None:
        """Ends an epoch with the last lease of it, whenever that is returned; ``take_expired`` then tells.

        Raises:
            RequestError: It has ended before.
        """
        with self._changed:
            if epoch not in self._held:
                raise RequestError(f"arena memory of epoch {epoch} was given back before; give it back once")
            self._expiring.add(epoch)
            self._end_if_unused(epoch)

    def take_expired(self) -> list[int]:
        """Epochs that ended by themselves since the last call."""
        expired = []
        with suppress(IndexError):  # another thread may take the last one, or the collector add one, at any time
            while True:
                expired.append(self._expired.popleft())
        return expired

    def _returned(self, epoch: int) -> None:
        with self._changed:
            self._held[epoch] -= 1
            self._end_if_unused(epoch)
            self._changed.notify_all()

    def _end_if_unused(self, epoch: int) -> None:
        # Only noted: this may be the garbage collector, in the middle of the code that hands out memory.
        if epoch in self._expiring and not self._held[epoch]:
            del self._held[epoch]
            self._expiring.discard(epoch)
            self._expired.append(epoch)
