"""Temporary checkpoints that a run which was killed left behind: found, and removed where nobody can be using them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from megamind_ray.units import format_bytes, format_duration

__all__ = ["FILE_NAME", "FOLDER_PREFIX", "in_use", "remove_stale"]

FOLDER_PREFIX: Final = "megamind-tune-"
FILE_NAME: Final = "model.safetensors"
# As ``tempfile.mkdtemp`` makes them.
_NAME: Final = re.compile(FOLDER_PREFIX + r"[a-z0-9_]{8}")
# Where locks do not work, as on some network file systems, no run lasts longer.
_OLD_S: Final = 86400.0


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder, as far as its file system has any; the system drops it when the process ends."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def remove_stale(folder: Path) -> list[str]:
    """Removes temporary checkpoints of this user that are more than a day old and in use by nobody.

    Returns:
        What was removed, and what was left though nobody seems to use it, in words.
    """
    notes = []
    with contextlib.suppress(OSError):  # a folder that cannot be listed; whether it can be written to is told elsewhere
        for found in sorted(folder.iterdir()):
            if _NAME.fullmatch(found.name):
                notes += _dealt_with(found)
    return notes


def _dealt_with(found: Path) -> list[str]:
    try:
        fd = os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # a file, a link, another user's, or gone meanwhile
        return []
    try:
        if os.fstat(fd).st_uid != os.geteuid() or {path.name for path in found.iterdir()} - {FILE_NAME}:
            return []
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        num_bytes, age_s = _size_and_age(found)
        what = f"{found.absolute()} ({format_bytes(num_bytes)}) was left by a run that was killed"
        if age_s < _OLD_S:
            return [f"{what} {format_duration(age_s)} ago; remove it if no `megamind tune` runs on another machine"]
        shutil.rmtree(found)
    except OSError:  # somebody's lock, no locks there, or it went away meanwhile
        return []
    finally:
        os.close(fd)
    return [f"{what} and is removed"]


def _size_and_age(found: Path) -> tuple[int, float]:
    """Bytes in it, and seconds since anything there was written."""
    states = [found.stat(), *(path.stat() for path in found.iterdir())]
    return sum(state.st_size for state in states[1:]), max(0.0, time.time() - max(it.st_mtime for it in states))
