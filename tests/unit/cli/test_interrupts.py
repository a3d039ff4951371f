"""Which signals end a command as Ctrl-C does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from megamind_ray.cli.interrupts import terminated_as_interrupt


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As they are in a process that nobody started with nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_is_an_interrupt_and_the_handlers_come_back(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupt():
        os.kill(os.getpid(), number)

    assert signal.getsignal(number) is signal.SIG_DFL


def test_under_nohup_the_end_of_the_terminal_is_no_request() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with terminated_as_interrupt():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_the_terminal_ends_once() -> None:
    with terminated_as_interrupt():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)  # while it tidies up
