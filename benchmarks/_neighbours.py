"""CPU time that other processes took meanwhile: figures of a busy machine need that beside them."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["Neighbours"]

# Fields of the first line of /proc/stat that are work: user, nice, system, irq, softirq.
_WORK_FIELDS = (1, 2, 3, 6, 7)


class Neighbours:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._others_s = _others_s()

    def cpu_share(self) -> float:
        """Share of the CPU time there was that others took, from 0 to 1; 0 if too little passed to tell."""
        there_was_s = (time.monotonic() - self._begin_s) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (_others_s() - self._others_s) / there_was_s))


def _others_s() -> float:
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    work_s = sum(int(fields[index]) for index in _WORK_FIELDS) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return work_s - own.user - own.system - own.children_user - own.children_system
