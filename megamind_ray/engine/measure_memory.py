"""What moving bytes costs the processors and the memory of this machine, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

import numpy as np

from megamind_ray.device.arena import host_buffer
from megamind_ray.device.memory import host_memory
from megamind_ray.device.strided import Bytes, Runs, copy_runs
from megamind_ray.io.checksum import crc32
from megamind_ray.units import KIB, MIB

__all__ = ["MemoryMeter"]

# Several times what one core, and all of them, find in their caches.
_ONE_THREAD_BYTES: Final = 256 * MIB
_EACH_THREAD_BYTES: Final = 32 * MIB
_MIN_BYTES: Final = 16 * MIB
# Of the free memory; there are three buffers of that size at a time.
_MEMORY_SHARE: Final = 1 / 8
# As the rows of a column slice: short, and too far apart for the processor to read ahead over the gaps.
_RUN_BYTES: Final = KIB
_STRIDE_BYTES: Final = 8 * KIB
# Work of all threads takes at least so long: to start them takes some of it.
_PARALLEL_S: Final = 0.1
_MAX_PASSES: Final = 64
_PUT_BYTES: Final = MIB
_PUTS: Final = 8
_LEAST_S: Final = 1e-9


class MemoryMeter:
    """Copies, touches and sums bytes, and says how fast. As a context it ends its threads.

    Args:
        num_threads: How many work at a time where all do.
        num_bytes: Size of each of its buffers; None: what measures memory and not caches, and leaves others theirs.
    """

    def __init__(self, num_threads: int, num_bytes: int | None = None) -> None:
        if num_bytes is None:
            wanted = max(_ONE_THREAD_BYTES, num_threads * _EACH_THREAD_BYTES)
            num_bytes = max(_MIN_BYTES, min(wanted, int(host_memory().free_bytes * _MEMORY_SHARE)))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="measure-memory")
        share = -(-num_bytes // num_threads // MIB) * MIB
        self._shares = [slice(begin, min(begin + share, num_bytes)) for begin in range(0, num_bytes, share)]
        self._source, self._target = host_buffer(num_bytes), host_buffer(num_bytes)
        self._one = slice(0, min(num_bytes, _ONE_THREAD_BYTES))
        # By all threads, which is faster, and spreads the pages as their users are spread. Not zeros: pages that were
        # never written to are all the same one, and in the cache.
        self._all(lambda share: self._source[share].fill(1))
        self._all(lambda share: self._target[share].fill(2))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def copy(self) -> float:
        """Bytes per second that one thread copies between memory that is in use."""
        source, target = self._source[self._one], self._target[self._one]
        return source.nbytes / _timed(lambda: np.copyto(target, source))

    def touch(self) -> float:
        """Bytes per second that one thread copies to fresh memory."""
        source, fresh = self._source[self._one], host_buffer(self._one.stop)
        return source.nbytes / _timed(lambda: np.copyto(fresh, source))

    def checksum(self) -> float:
        """Bytes per second that one thread sums."""
        source = self._source[self._one]
        return source.nbytes / _timed(lambda: crc32(source))

    def run(self) -> float:
        """Seconds that each short run of a strided copy takes beside its bytes."""
        runs = Runs(0, _RUN_BYTES, self._one.stop // _STRIDE_BYTES, _STRIDE_BYTES)
        plain = Runs(0, runs.nbytes, 1, runs.nbytes)
        strided_s = _timed(lambda: copy_runs(self._source, runs, self._target, runs.packed()))
        plain_s = _timed(lambda: copy_runs(self._source, plain, self._target, plain))
        return max(_LEAST_S, (strided_s - plain_s) / runs.num_runs)

    def memory(self) -> float:
        """Bytes per second that all threads together read and write."""
        copied = self._parallel(lambda share: np.copyto(self._target[share], self._source[share]))
        return 2 * copied

    def fill(self) -> float:
        """Bytes per second that all threads together copy to fresh memory."""
        fresh = host_buffer(self._source.nbytes)
        return fresh.nbytes / self._all(lambda share: np.copyto(fresh[share], self._source[share]))

    def put(self, put: Callable[[Bytes], object]) -> float:
        """Seconds that a put of bytes into a store takes beside the copy.

        Args:
            put: Copies bytes into the store; what it returns keeps them there.
        """
        data = self._source[:_PUT_BYTES]
        copy_s = min(_timed(lambda: np.copyto(self._target[:_PUT_BYTES], data)) for _ in range(_PUTS))

        def all_puts() -> None:
            for _ in range(_PUTS):
                put(data)

        return max(_LEAST_S, _timed(all_puts) / _PUTS - copy_s)

    def _parallel(self, action: Callable[[slice], None]) -> float:
        """Bytes per second, in as many passes as it takes to see more than the start of the threads."""
        once_s = self._all(action)
        passes = max(1, min(_MAX_PASSES, math.ceil(_PARALLEL_S / once_s)))

        def repeated(share: slice) -> None:
            for _ in range(passes):
                action(share)

        return passes * self._source.nbytes / self._all(repeated)

    def _all(self, action: Callable[[slice], None]) -> float:
        """Seconds until each thread has done its share."""
        return _timed(lambda: list(self._threads.map(action, self._shares)))


def _timed(action: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    action()
    return max(_LEAST_S, time.perf_counter() - begin_s)
