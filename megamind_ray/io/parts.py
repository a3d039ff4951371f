"""Files that say of themselves how many they are: ``model-00002-of-00007.safetensors``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from megamind_ray.errors import RequestError, listed
from megamind_ray.io.storage import Listing

__all__ = ["require_all_parts", "what_to_fetch"]

_PART: Final = re.compile(r"(.*?)(\d+)([-_]of[-_])(\d+)(\D.*)")
_MAX_PARTS: Final = 100_000  # a number in a name is nobody's word for how many files there are
# What tools for downloads leave while they run: huggingface_hub, browsers, aria2, wget, curl and rsync scripts.
_UNFINISHED: Final = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".aria2", ".tmp", ".lock")


def require_all_parts(folder: str, names: Sequence[str], listing: Listing) -> None:
    """Refuses a folder where files are missing that the names of others speak of, which an index would have named.

    Args:
        folder: For the message.
        names: The data files.
        listing: What is in the folder.

    Raises:
        RequestError: Parts are missing; it names them.
    """
    families: dict[tuple[str, str, str, str], set[str]] = {}
    for name in names:
        found = _PART.fullmatch(name)
        if found is not None:
            stem, number, of, count, suffix = found.groups()
            families.setdefault((stem, of, count, suffix), set()).add(number)
    for (stem, of, count, suffix), numbers in families.items():
        if int(count) > _MAX_PARTS:
            continue
        # Counted from 1, or from 0 where such a file is there.
        first = 0 if any(int(number) == 0 for number in numbers) else 1
        width = len(min(numbers))
        there = {int(number) for number in numbers}
        missing = [number for number in range(first, first + int(count)) if number not in there]
        if missing:
            lost = [f"{stem}{number:0{width}}{of}{count}{suffix}" for number in missing]
            raise RequestError(
                f"{folder}: has {len(there)} of the {int(count)} parts {stem}*{of}{count}{suffix}; not there: "
                f"{listed(lost)}; {what_to_fetch(listing)}"
            )


def what_to_fetch(listing: Listing) -> str:
    """What to do about files that are missing; a download that goes on, or was broken off, is told."""
    left = [name for name in listing.files if name.lower().endswith(_UNFINISHED)]
    if not left:
        return "fetch the checkpoint again"
    return f"a download seems to be under way or broken off ({listed(left, 3)} beside them): let it end, or fetch again"
