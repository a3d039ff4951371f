"""A team of threads that works through a list, and stops as a whole when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeVar

from megamind_ray.errors import ClusterError
from megamind_ray.io.stop import StopSignal

__all__ = ["run_team"]

Item = TypeVar("Item")
_LOOK_S: Final = 0.2


def run_team(
    items: Iterable[Item],
    action: Callable[[Item], None],
    *,
    num_threads: int,
    name: str,
    stop: StopSignal | None = None,
    on_failure: Callable[[], None] = lambda: None,
) -> None:
    """Calls ``action`` for each item, in their order, ``num_threads`` at a time, and returns when all are done.

    The first error ends the work: nobody takes a new item, and it is raised when the last thread has come back. So does
    an interrupt; a second one is raised at once.

    Args:
        items: What to do; taken one by one.
        action: Must be safe to call from several threads.
        num_threads: At most so many at a time.
        name: Prefix of the threads' names.
        stop: Set from outside, it ends the work early. An error here does not set it: its owner was not stopped.
        on_failure: Called (from any thread) at each error, before anybody is waited for: ends what the others are at,
            which may be a server that says nothing.

    Raises:
        ClusterError: ``stop`` was set before all was done.
    """
    team = _Team(items, action, stop or threading.Event(), on_failure)
    # The caller works too: a team of one needs no thread, and an interrupt reaches it.
    try:
        with suppress(RuntimeError):  # no more threads are to be had: those that are there do the work
            for number in range(1, num_threads):
                team.start(f"{name}-{number}")
        team.work()
        team.wait()
    except BaseException as error:
        if isinstance(team.error, KeyboardInterrupt):
            raise  # the second one
        team.fail(error)
        team.wait()
    if team.error is not None:
        raise team.error
    if not team.exhausted:
        raise ClusterError(f"{name}: stopped before all was done")


class _Team:
    def __init__(
        self,
        items: Iterable[Item],
        action: Callable[[Item], None],
        stop: StopSignal,
        on_failure: Callable[[], None],
    ) -> None:
        self._items = iter(items)
        self._action = action
        self._stop = stop
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._ended = threading.Condition()
        self._num_threads = 0
        self._closed = False  # once somebody waits, nobody joins
        self.exhausted = False
        self.error: BaseException | None = None

    def start(self, name: str) -> None:
        """One more thread for the work."""
        threading.Thread(target=self._work_aside, name=name, daemon=True).start()

    def wait(self) -> None:
        """Until all other threads have come back; ``Thread.join`` takes one for ended once it was interrupted."""
        with self._ended:
            self._closed = True
            while self._num_threads:
                self._ended.wait(_LOOK_S)  # an interrupt just before a wait does not end it

    def work(self) -> None:
        try:
            while not self._stop.is_set() and self.error is None:
                with self._lock:
                    item = next(self._items, _END)
                if item is _END:
                    self.exhausted = True
                    return
                self._action(item)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - kept, and raised by run_team in the caller's thread
            self.fail(error)

    def _work_aside(self) -> None:
        # Counted here: who starts a thread and is interrupted cannot tell whether there is one.
        with self._ended:
            if self._closed:
                return
            self._num_threads += 1
        try:
            self.work()
        finally:
            with self._ended:
                self._num_threads -= 1
                self._ended.notify()

    def fail(self, error: BaseException) -> None:
        """Ends everybody's work; the first error is kept."""
        with self._lock:
            # An interrupt goes first: who asked for it is told that it was obeyed.
            if self.error is None or not isinstance(error, Exception):
                self.error = error
        self._on_failure()


_END = object()
