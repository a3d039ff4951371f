"""A word to threads that what they do is not wanted any more."""

from __future__ import annotations

import threading
import time
from typing import Final, Protocol

__all__ = ["Stop", "StopSignal"]

# Only between attempts at something that failed, and only where there is an outer signal.
_LOOK_S: Final = 0.1


class StopSignal(Protocol):
    """What a thread asks whether to go on: ``threading.Event``, or ``Stop``."""

    def is_set(self) -> bool:
        """Whether to end."""

    def wait(self, timeout: float) -> bool:
        """Waits that many seconds, or until it is set; whether it is."""


class Stop:
    """A signal of one's own that is set together with an outer one, and not the other way round.

    Who fails inside can end what was begun with it, without telling those outside that they were stopped.

    Args:
        outer: Whose signal counts too.
    """

    def __init__(self, outer: StopSignal | None = None) -> None:
        self._outer = outer
        self._own = threading.Event()

    def set(self) -> None:
        """Ends what asks this signal."""
        self._own.set()

    def is_set(self) -> bool:
        """As ``StopSignal.is_set``."""
        return self._own.is_set() or (self._outer is not None and self._outer.is_set())

    def wait(self, timeout: float) -> bool:
        """As ``StopSignal.wait``."""
        if self._outer is None:
            return self._own.wait(timeout)
        end_s = time.monotonic() + timeout
        while not self.is_set():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            self._own.wait(min(left_s, _LOOK_S))
        return True
