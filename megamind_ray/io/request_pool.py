"""Requests to storage behind a network: at most so many in flight per process, whoever asks for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

__all__ = ["run_requests"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_requests(action: Callable[[Item], Result], items: Iterable[Item], *, num_in_flight: int) -> list[Result]:
    """Calls ``action`` for each item in the process's pool; returns the results in order when all are done.

    After an error nothing more is begun, and the error is raised when what had begun has ended: nobody writes to the
    caller's buffers any more.

    Args:
        action: One request, which has its own bound in time. Must not use the pool itself.
        items: What to ask for.
        num_in_flight: Size of the pool; callers with the same number share one.
    """
    futures = [_pool(num_in_flight).submit(action, item) for item in items]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    failed = next((future for future in futures if not future.cancelled() and future.exception() is not None), None)
    return [failed.result()] if failed is not None else [future.result() for future in futures]


@lru_cache(maxsize=8)
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="megamind-request")


# A child has the pool's memory but not its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
