"""Another attempt where storage fails: bounded, with exponential back-off and jitter."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import tenacity

from megamind_ray.config import RetryConfig
from megamind_ray.errors import SourceError
from megamind_ray.io.counters import ReadCounters, ReadKind
from megamind_ray.io.failures import BusyError
from megamind_ray.io.hub_cache import offline_remedy
from megamind_ray.io.source import Source, storage_errors
from megamind_ray.units import KIB

__all__ = ["MIN_BYTES_PER_S", "call_with_retry", "read_bound_s", "read_with_retry", "request_bound_s"]

# A body that comes more slowly than this will not end in time to be of use; without a least rate, one byte now and
# then would keep a request alive for ever.
MIN_BYTES_PER_S: Final = 64 * KIB

Result = TypeVar("Result")


def request_bound_s(retry: RetryConfig, num_bytes: int = 0) -> float:
    """Longest time one request to storage behind a network may take.

    ``request_s`` each for the connection, the first byte and silence in the body, and the body at the least rate.
    """
    return 3 * retry.request_s + num_bytes / MIN_BYTES_PER_S


def read_bound_s(retry: RetryConfig, num_bytes: int = 0) -> float:
    """Longest time until a read, an opening or a check has worked or is a ``SourceError``, all attempts together."""
    return retry.attempts * (request_bound_s(retry, num_bytes) + retry.max_wait_s)


def call_with_retry(
    action: Callable[[int], Result],
    *,
    uri: str,
    what: str,
    retry: RetryConfig,
    sleep: Callable[[float], object] = time.sleep,
    uniform: Callable[[], float] = random.random,
    stopped: Callable[[], bool] = lambda: False,
) -> Result:
    """Calls until it works, at most ``retry.attempts`` times.

    Args:
        action: Takes the number of the attempt, from 1. An ``OSError`` (timeouts and short reads are some) is
            worth another attempt; a missing file, a missing permission and errors of this package are not. What a
            ``BusyError`` asks to wait is waited, up to ``retry.max_wait_s``.
        uri: File that it is about.
        what: What is attempted, for the message, as in ``reading bytes [0, 8)``.
        retry: Bounds.
        sleep: Waits that many seconds.
        uniform: Random number from 0 to 1, for the jitter.
        stopped: Asked before each further attempt; once it says so there is none.

    Raises:
        SourceError: It still fails after the last attempt; it says how many there were.
        RequestError: No such file, or no permission.
    """
    attempts = _Attempts(action, uri, stopped)

    def pause(seconds: float) -> None:
        sleep(seconds)

    try:
        if attempts.works_at_once():
            return attempts.result
        return tenacity.Retrying(
            stop=lambda state: state.attempt_number >= retry.attempts or stopped(),
            wait=lambda state: _wait_s(state, retry, uniform),
            retry=tenacity.retry_if_exception_type(OSError),
            sleep=pause,
            reraise=True,
        )(attempts)
    except OSError as error:
        times = "once" if attempts.number == 1 else f"{attempts.number} times"
        raise SourceError(
            f"{uri}: {what} failed {times}, last with: {str(error) or type(error).__name__}; " + _remedy(uri, error),
            file=uri,
            attempts=attempts.number,
        ) from error
    finally:
        attempts.failure = None  # it leads to the buffers of the reader, which would live until a collection


def _remedy(uri: str, error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "close files, or raise the limit of open files (ulimit -n): a load has up to two for each file"
    elsewhere = offline_remedy(uri)
    return "check the storage, then try again" if elsewhere is None else f"check the network, or {elsewhere}"


class _Attempts(Generic[Result]):
    """Calls of one action, and how many there were."""

    result: Result

    def __init__(self, action: Callable[[int], Result], uri: str, stopped: Callable[[], bool]) -> None:
        self.number = 0
        self._action, self._uri, self._stopped = action, uri, stopped
        self.failure: OSError | None = None
        self._is_told = True

    def works_at_once(self) -> bool:
        """The first attempt. Its failure is told to tenacity by the next call.

        The bookkeeping of tenacity takes as long as reading half a chunk from memory.
        """
        try:
            self.result = self()
        except OSError:
            self._is_told = False
            return False
        return True

    def __call__(self) -> Result:
        if self.failure is not None and (not self._is_told or self._stopped()):
            self._is_told = True
            raise self.failure
        self.number += 1
        try:
            with storage_errors(self._uri):
                return self._action(self.number)
        except OSError as error:
            self.failure = error
            raise


def _wait_s(state: tenacity.RetryCallState, retry: RetryConfig, uniform: Callable[[], float]) -> float:
    ceiling = min(retry.max_wait_s, retry.first_wait_s * 2.0 ** (state.attempt_number - 1))
    own_s = ceiling * (0.5 + 0.5 * uniform())  # at least half: readers that failed together come back apart
    failure = state.outcome.exception() if state.outcome is not None else None
    asked_s = failure.retry_after_s if isinstance(failure, BusyError) else None
    return own_s if asked_s is None else min(retry.max_wait_s, asked_s + own_s)


def read_with_retry(
    source: Source,
    offset: int,
    buffer: memoryview,
    retry: RetryConfig,
    counters: ReadCounters,
    *,
    kind: ReadKind = ReadKind.PAYLOAD,
    summed: bool = False,
    past_cache: bool = False,
    sleep: Callable[[float], object] = time.sleep,
    uniform: Callable[[], float] = random.random,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Fills the buffer from a source, with further attempts where storage fails.

    Args:
        source: The file.
        offset: First byte in the file.
        buffer: Filled wholly, or its contents are undefined and an error is raised.
        retry: Bounds.
        counters: The first attempt counts as ``kind``, all others as ``RETRIED``.
        kind: ``RETRIED`` where the caller itself reads again, as after a checksum mismatch.
        summed: Compute the CRC-32 on the way.
        past_cache: As ``Source.read_into``.
        sleep: Waits that many seconds.
        uniform: Random number from 0 to 1.
        stopped: As in ``call_with_retry``.

    Returns:
        The CRC-32 where ``summed``, else 0.

    Raises:
        SourceError: Still failing after ``retry.attempts``, or when it was stopped.
        IntegrityError: The file shrank, or the range is not in it.
        RequestError: The file is gone, or its permission.
    """
    end = offset + buffer.nbytes

    def attempt(number: int) -> int:
        # Before the read, whether or not it then succeeds: these bytes were asked of the storage.
        counters.add(kind if number == 1 else ReadKind.RETRIED, buffer.nbytes)
        if summed:
            return source.read_summed(offset, buffer, past_cache=past_cache)
        source.read_into(offset, buffer, past_cache=past_cache)
        return 0

    return call_with_retry(
        attempt,
        uri=source.uri,
        what=f"reading bytes [{offset}, {end})",
        retry=retry,
        sleep=sleep,
        uniform=uniform,
        stopped=stopped,
    )
