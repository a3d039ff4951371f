"""The kernel's table of mounts: which file system a path or a device number is of."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Mount", "mount_of", "read_mounts"]

_TABLE: Final = Path("/proc/self/mountinfo")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of the table.

    Attributes:
        point: Where it is mounted.
        device: ``st_dev`` of the files on it.
        kind: Type of the file system, for example ``ext4``.
        source: What is mounted, for example ``/dev/vda`` or ``server:/models``.
    """

    point: str
    device: int
    kind: str
    source: str


def read_mounts(table: Path = _TABLE) -> tuple[Mount, ...]:
    """All mounts, the later ones last; none where the system has no such table.

    Args:
        table: A file in the form that proc_pid_mountinfo(5) tells.
    """
    try:
        # As bytes, cut at line feeds alone: a name may have what else text takes for the end of a line.
        lines = os.fsdecode(table.read_bytes()).split("\n")
    except OSError:  # no /proc: nothing is known
        return ()
    return tuple(_parsed(line) for line in lines if line)


def mount_of(path: Path, table: Path = _TABLE) -> Mount | None:
    """The mount that holds a path; None where it is not known."""
    target = path.resolve()
    holding = [mount for mount in read_mounts(table) if target.is_relative_to(mount.point)]
    # The innermost; of several at one point the latest, which hides the others.
    return max(reversed(holding), key=lambda mount: len(mount.point), default=None)


def _parsed(line: str) -> Mount:
    left, _, right = line.partition(" - ")  # how many fields are before the dash varies
    fields, (kind, source) = left.split(" "), right.split(" ")[:2]
    major, _, minor = fields[2].partition(":")
    return Mount(
        point=_unescaped(fields[4]), device=os.makedev(int(major), int(minor)), kind=kind, source=_unescaped(source)
    )


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
