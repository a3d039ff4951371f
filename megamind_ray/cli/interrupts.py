"""A request to end, however it is sent, is one Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

__all__ = ["terminated_as_interrupt"]

_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM, which ``ray job stop`` and schedulers send, and SIGHUP unwind as Ctrl-C does.

    Without it the process would end on the spot, and temporary files, actors and blocks would outlive it. SIGHUP comes
    when the terminal is gone, as when an ssh connection breaks; where it is ignored (``nohup``), it stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, _interrupt)
        for number in _ENDINGS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: from a library, in C; it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        # The shell sends it, and the kernel, too: the second would break off the tidying up after the first.
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
