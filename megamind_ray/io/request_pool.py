"""Requests to storage behind a network: at most so many in flight per process, whoever asks for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import lru_cache, partial
from typing import TypeVar

from megamind_ray.io.pools import begin

__all__ = ["run_requests"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_requests(
    action: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    num_in_flight: int,
    on_failure: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Calls ``action`` for each item in the process's pool; returns the results in order when all are done.

    After an error nothing more is begun, and the first error is raised when what had begun has ended: nobody writes to
    the caller's buffers any more.

    Args:
        action: One request, which has its own bound in time. Must not use the pool itself.
        items: What to ask for.
        num_in_flight: Size of the pool; callers with the same number share one.
        on_failure: Called (from any thread, perhaps more than once) when one has failed, or the caller is interrupted:
            ends what the others wait for.
    """
    failures: list[BaseException] = []  # in the order of time: what ends because of the first one says less

    def call(item: Item) -> Result:
        try:
            return action(item)
        except BaseException as error:
            failures.append(error)
            on_failure()
            raise

    futures: list[Future[Result]] = []
    pool = _pool(num_in_flight)
    try:
        for item in items:
            if failures:
                break
            futures.append(Future())
            begin(pool, futures[-1], partial(call, item))
        wait(futures, return_when=FIRST_EXCEPTION)
    except BaseException:
        on_failure()
        # An interrupt while a thread is started leaves one that the pool does not know: nobody would end it, and the
        # process would wait for it at its own end. Whoever uses the pool meanwhile does his work himself.
        _pool.cache_clear()
        pool.shutdown(wait=False)
        raise
    finally:
        wait([future for future in futures if not future.cancel()])
    if failures:
        raise failures[0]
    return [future.result() for future in futures]


@lru_cache(maxsize=8)
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="megamind-request")


# A child has the pool's memory but not its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
