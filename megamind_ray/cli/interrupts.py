"""A request to end, however it is sent, is one Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["terminated_as_interrupt"]


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM, which ``ray job stop`` and schedulers send, unwind as Ctrl-C does.

    Without it the process would end on the spot, and actors and blocks would outlive it until Ray notices.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
