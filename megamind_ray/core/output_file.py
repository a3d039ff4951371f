"""Files that this package writes: whole or not at all, through links, and never in the place of something else.

A rename puts a regular file wherever it points: as root also over a device node, and over a link instead of what it
leads to. So all files that somebody names for us are written by this one function.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path

from megamind_ray.errors import RequestError

__all__ = ["require_output_place", "write_output"]


def require_output_place(path: str | os.PathLike[str], what: str = "") -> Path:
    """Where a file of that path would be written, links followed; nothing is touched.

    Args:
        path: As the user gave it.
        what: Begins the message, such as ``--out``.

    Raises:
        RequestError: Something else than a regular file is there: a folder, a device, a pipe, a socket, or links that
            lead around in a circle.
    """
    shown = f"{what} {os.fspath(path)}".strip()
    target = Path(os.path.realpath(path))
    try:
        mode = target.lstat().st_mode
    except OSError:  # nothing there; or it cannot be looked at, which writing will say
        return target
    if stat.S_ISREG(mode):
        return target
    if stat.S_ISDIR(mode):
        raise RequestError(f"{shown}: is a folder; give the name of a file")
    if stat.S_ISLNK(mode):  # realpath leaves a link only where links go in a circle
        raise RequestError(f"{shown}: is a link that leads back to itself; give the name of a file")
    raise RequestError(f"{shown}: is no regular file but {_kind(mode)}; give the name of a file")


def write_output(path: str | os.PathLike[str], data: bytes | str, *, what: str = "") -> None:
    """Writes a file beside its target and renames it: whoever reads meanwhile gets the old one or the new one.

    A link stays one, and its target is what is replaced; a file that was there keeps its permissions.

    Args:
        path: As the user gave it.
        data: All of it; text is written as UTF-8.
        what: As ``require_output_place`` has it.

    Raises:
        RequestError: Something else than a regular file is there.
        OSError: It cannot be written. What was there is as it was.
    """
    target = require_output_place(path, what)
    temporary = target.with_name(f".megamind-{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"), (stat.S_ISFIFO, "a pipe"))
    return next((name for holds, name in kinds if holds(mode)), "a socket")
