"""The folder of a bed, whose name says whose it is; what beds of dead processes left behind is removed."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from megamind_ray.testing.testbed.processes import started, wait_until_gone

__all__ = ["bed_folder", "record_process", "remove_leavings"]

# A short path whatever TMPDIR is: that of a socket in Ray's own folder below it ends after 107 characters.
_PARENT: Final = Path("/tmp")
_NAME: Final = re.compile(r"mmbed-(\d+)-(\d+)-\d+")
_PROCESSES: Final = "processes"
_GONE_S: Final = 20.0
_serials = itertools.count()


def bed_folder() -> Path:
    """Makes a folder whose name has this process's id and the time of its start, as ids are used again."""
    pid = os.getpid()
    while True:
        folder = _PARENT / f"mmbed-{pid}-{started(pid)}-{next(_serials)}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o755)
            return folder


def record_process(folder: Path, pid: int) -> None:
    """Notes the process that a host hangs on: all that is the host's ends with it."""
    with (folder / _PROCESSES).open("a") as file:
        file.write(f"{pid} {started(pid)}\n")


def remove_leavings() -> list[Path]:
    """Ends the hosts and removes the folders of beds whose process is no more.

    Namespaces, links and mounts go with the last process in them; nothing of them has a name outside.

    Returns:
        The folders.
    """
    found = [folder for folder in _PARENT.glob("mmbed-*") if _is_left(folder)]
    for folder in found:
        pids = list(_living(folder))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until_gone(pids, _GONE_S)
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _is_left(folder: Path) -> bool:
    match = _NAME.fullmatch(folder.name)
    return match is not None and started(int(match[1])) != int(match[2])


def _living(folder: Path) -> Iterator[int]:
    """Recorded processes that are still those that were recorded."""
    record = folder / _PROCESSES
    lines = record.read_text().splitlines() if record.exists() else []
    for line in lines:
        pid, _, start = line.partition(" ")
        if pid.isdigit() and start.isdigit() and started(int(pid)) == int(start):
            yield int(pid)
