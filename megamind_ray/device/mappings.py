"""What lies at an address of this process, as Linux tells it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

__all__ = ["SharedMapping", "shared_mapping"]

_OWN_MAPS: Final = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class SharedMapping:
    """Shared memory or a shared file, mapped without gaps.

    Attributes:
        begin: First address.
        end: One past the last.
        writable: Whether this process may write to it.
        file: Device and inode.
        shift: Address less offset in the file. Where file and shift are the same, an address has the same page.
    """

    begin: int
    end: int
    writable: bool
    file: tuple[str, int]
    shift: int


def shared_mapping(begin: int, end: int, maps: Path = _OWN_MAPS) -> SharedMapping | None:
    """The shared mapping that holds addresses ``[begin, end)``; None where there is none, or no procfs.

    The kernel lists a mapping in parts where advice or rights differ; parts of the same file in a row are one here.
    """
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return None
    merged: SharedMapping | None = None
    for line in lines:
        part = _parse(line)
        if part is None:
            continue
        if merged is not None and part == replace(merged, begin=merged.end, end=part.end):
            merged = replace(merged, end=part.end)
        elif merged is not None and merged.begin <= begin < merged.end:
            break
        else:
            merged = part
    return merged if merged is not None and merged.begin <= begin and end <= merged.end else None


def _parse(line: str) -> SharedMapping | None:
    rights = line.find(" ") + 1
    if line[rights + 3 : rights + 4] != "s":  # nearly all of some hundred lines end here
        return None
    fields = line.split(maxsplit=5)
    if len(fields) < 5 or fields[4] == "0":
        return None
    first, last = (int(address, 16) for address in fields[0].split("-"))
    return SharedMapping(first, last, fields[1][1] == "w", (fields[3], int(fields[4])), first - int(fields[2], 16))
