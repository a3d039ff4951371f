"""Waiting for what a device or a library does in the background, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from megamind_ray.errors import ClusterError

__all__ = ["wait_until"]

# A copy of 8 MiB takes 0.2-0.6 ms: many waits end within a few looks, and a thread that sleeps lets others read.
_EAGER_LOOKS: Final = 16
_FIRST_SLEEP_S: Final = 20e-6
_LONGEST_SLEEP_S: Final = 1e-3


def wait_until(
    done: Callable[[], bool],
    *,
    deadline_s: float,
    what: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Looks until it is done, at ever longer intervals up to a millisecond.

    Blocking calls of CUDA have no deadline, and a device that fell off the bus never answers: hence polling.

    Args:
        done: Whether it is; cheap, as ``torch.cuda.Event.query``.
        deadline_s: How long to wait.
        what: Device and deed in words: ``device cuda:0: a copy of 8.0 MiB``.
        clock: Seconds, ascending.
        sleep: Sleeps so many seconds.

    Raises:
        ClusterError: It is not done after the deadline.
    """
    until_s = clock() + deadline_s
    num_looks, pause_s = 0, _FIRST_SLEEP_S
    while not done():
        if clock() >= until_s:
            raise ClusterError(
                f"{what} did not end within {deadline_s:g} s; see whether the device still answers (nvidia-smi, "
                "dmesg for Xid messages), then start the worker again"
            )
        num_looks += 1
        if num_looks > _EAGER_LOOKS:
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_SLEEP_S)
