"""Reading files of settings."""

from __future__ import annotations

import stat
from pathlib import Path

__all__ = ["read_regular"]


def read_regular(path: Path) -> str:
    """The text of a regular file: a pipe that nobody writes to would be waited for, and a device has no end.

    Raises:
        OSError: It is none, or cannot be read.
        ValueError: It is not UTF-8.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a regular file")
    return path.read_text(encoding="utf-8")
