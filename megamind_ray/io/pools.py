"""Work for pools of threads that is done, once, also where the system gives no further thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

__all__ = ["begin", "submit"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def submit(
    pool: ThreadPoolExecutor,
    action: Callable[Arguments, Result],
    /,
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Future[Result]:
    """As ``pool.submit``; where no more threads are to be had (``ulimit -u``), the caller does the work.

    ``pool.submit`` raises then, and leaves the work in the queue for the threads that there are: it would be done when
    nobody waits for it any more.

    Raises:
        BaseException: An interrupt of the caller's own work; other errors are in the future.
    """
    future: Future[Result] = Future()
    begin(pool, future, partial(action, *args, **kwargs))
    return future


def begin(pool: ThreadPoolExecutor, future: Future[Result], action: Callable[[], Result]) -> None:
    """As ``submit``, with a future that the caller knows already when it is interrupted in here.

    Then the work may have been begun, or be yet: ``cancel`` sees to it that it never is, or gives False.

    Raises:
        BaseException: As ``submit``.
    """
    # Who takes it does it. What stays behind in the queue then holds nothing of the caller's.
    unclaimed = [(future, action)]
    work = partial(_do, unclaimed)
    try:
        pool.submit(work)
    except RuntimeError:
        work()


def _do(unclaimed: list[tuple[Future[Result], Callable[[], Result]]]) -> None:
    try:
        future, action = unclaimed.pop()
    except IndexError:
        return
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    finally:
        del future  # an error in it leads to this frame: a cycle that would keep what was worked on
