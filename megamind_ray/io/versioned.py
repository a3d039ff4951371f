"""Remote files whose answers say of which version they are: each read is its own check for changes."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace
from typing import Final

from megamind_ray.errors import RequestError
from megamind_ray.io.source import FileVersion, OpenSource, changed_error

__all__ = ["ContentRange", "VersionedSource", "content_range", "no_ranges"]

_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(?:(\d+)|\*)")


@dataclass(frozen=True, slots=True)
class ContentRange:
    """What a ``Content-Range`` says; None where it does not.

    Attributes:
        begin: First byte.
        end: One past the last.
        total_bytes: Size of the file.
    """

    begin: int | None
    end: int | None
    total_bytes: int | None


def content_range(value: str | None) -> ContentRange | None:
    """Reads the header; None where there is none, or one that says nothing."""
    match = _CONTENT_RANGE.fullmatch(value or "")
    if match is None:
        return None
    begin, last, total = (int(part) if part else None for part in match.groups())
    return ContentRange(begin, None if last is None else last + 1, total)


def no_ranges(uri: str) -> RequestError:
    """The error about a server that gives whole files only."""
    return RequestError(
        f"{uri}: the server does not serve byte ranges; download the checkpoint, or serve it from a server that does"
    )


class VersionedSource(OpenSource):
    """A source that compares the version in each answer with the one at opening.

    ``check_unchanged`` then asks the storage only if nothing was read yet, or some answer did not say its version.
    """

    def __init__(self, uri: str, version: FileVersion) -> None:
        super().__init__(uri, version)
        self._lock = threading.Lock()
        self._all_told: bool | None = None

    def check_unchanged(self) -> None:
        """As ``Source.check_unchanged``: of what was read, as nothing else is used."""
        if not self._all_told:
            super().check_unchanged()

    def require_same(self, answer: FileVersion) -> None:
        """Compares what an answer says of the file's version with how it was opened.

        Raises:
            IntegrityError: It is another version.
        """
        change = self.version.difference(answer)
        if change is not None:
            raise changed_error(self.uri, change)
        told = self.version.etag is not None and answer.etag is not None
        told = told or (self.version.mtime_ns is not None and answer.mtime_ns is not None)
        with self._lock:
            self._all_told = told and self._all_told is not False

    def require_range(self, header: str | None, begin: int, end: int, told: FileVersion) -> None:
        """Makes sure that an answer has the range that was asked for, of the version that was opened.

        Args:
            header: Its ``Content-Range``; servers that leave it out are believed.
            begin: First byte asked for.
            end: One past the last.
            told: What else it says of the file's version.

        Raises:
            IntegrityError: It is another version.
            OSError: It is another range, or a part of it.
        """
        given = content_range(header)
        if given is not None and given.total_bytes is not None:
            told = replace(told, size_bytes=given.total_bytes)
        self.require_same(told)
        if given is not None and (given.begin, given.end) != (begin, end):
            raise OSError(f"the answer has {header!r} where bytes {begin}-{end - 1} were asked for")
