"""A team of threads that works through a list, and stops as a whole when one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from megamind_ray.errors import ClusterError

__all__ = ["run_team"]

Item = TypeVar("Item")


def run_team(
    items: Iterable[Item],
    action: Callable[[Item], None],
    *,
    num_threads: int,
    name: str,
    stop: threading.Event | None = None,
) -> None:
    """Calls ``action`` for each item, in their order, ``num_threads`` at a time, and returns when all are done.

    The first error ends the work: nobody takes a new item, and it is raised when the last thread has come back.

    Args:
        items: What to do; taken one by one.
        action: Must be safe to call from several threads.
        num_threads: At most so many at a time.
        name: Prefix of the threads' names.
        stop: Set from outside, it ends the work early.

    Raises:
        ClusterError: ``stop`` was set before all was done.
    """
    team = _Team(iter(items), action, stop or threading.Event())
    threads = [
        threading.Thread(target=team.work, name=f"{name}-{number}", daemon=True) for number in range(1, num_threads)
    ]
    for thread in threads:
        thread.start()
    # The caller works too: a team of one needs no thread, and an interrupt reaches it.
    try:
        team.work()
    finally:
        for thread in threads:
            thread.join()
    if team.error is not None:
        raise team.error
    if not team.exhausted:
        raise ClusterError(f"{name}: stopped before all was done")


class _Team:
    def __init__(self, items: Iterable[Item], action: Callable[[Item], None], stop: threading.Event) -> None:
        self._items = iter(items)
        self._action = action
        self._stop = stop
        self._lock = threading.Lock()
        self.exhausted = False
        self.error: BaseException | None = None

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
            with self._lock:
                self.error = self.error or error


_END = object()
