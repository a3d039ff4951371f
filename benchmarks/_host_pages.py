"""Has the machine's free memory backed by real memory, as it is on hardware of one's own.

A virtual machine may give its free pages back to its host, seconds after they were freed ("free page reporting"). The
next touch then costs about 1.5 s for each GB, whoever it is that touches, so that the order of contenders would decide
between 0.7 and 9 GB/s. Fresh memory here means: new to the process, and not new to the machine.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np

__all__ = ["HeldMemory", "back_free_memory", "reports_free_pages"]

_SPARE_BYTES = 1 << 30
_PAGE_BYTES = 4096
_HUGE_BYTES = 2 << 20


def reports_free_pages() -> bool:
    """Whether this system tells a host which of its pages are free."""
    return Path("/sys/module/page_reporting").exists()


class HeldMemory:
    """Memory that is held between measurements and free during them, so that the host never gets it back.

    Touching it before each measurement alone would leave the host at work on what the one before had freed.

    Args:
        nbytes: How much; less if that would leave other processes short.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._mapping: mmap.mmap | None = None
        self.hold()

    def hold(self) -> None:
        """Takes and touches it."""
        if self._mapping is None:
            self._mapping = _touched(self._nbytes)

    def let_go(self) -> None:
        """Gives it back to the system, whose next pages are these; within two seconds it has to be held again."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()


def back_free_memory(nbytes: int) -> None:
    """Touches fresh memory and gives it back at once; what is taken next is the same pages.

    Args:
        nbytes: How much; less if that would leave other processes short.
    """
    HeldMemory(nbytes).let_go()


def _touched(nbytes: int) -> mmap.mmap | None:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    free_bytes = int(fields["MemFree"].split()[0]) * 1024
    # Only free pages: more would push the checkpoint out of the page cache.
    nbytes = min(nbytes, free_bytes - _SPARE_BYTES) // _HUGE_BYTES * _HUGE_BYTES
    if nbytes <= 0:
        return None
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(mapping, np.uint8)
    parts = np.array_split(data, os.cpu_count() or 1)
    threads = [threading.Thread(target=_touch, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return mapping


def _touch(part: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    part[::_PAGE_BYTES] = 1
