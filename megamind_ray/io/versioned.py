"""Remote files whose answers say of which version they are: each read is its own check for changes."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace
from typing import Final

from megamind_ray.errors import RequestError
from megamind_ray.io.source import FileVersion, OpenSource, changed_error

__all__ = ["ContentRange", "VersionedSource", "content_range", "no_ranges", "unclear_range", "whole_number"]

# No file has more bytes than 18 digits tell, and Python reads other digits than these, too.
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_CONTENT_RANGE: Final = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/(?:([0-9]{1,18})|\*)")


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


def whole_number(value: str | None) -> int | None:
    """The number of bytes in a header; None where there is none, or nonsense."""
    return int(value) if value is not None and _NUMBER.fullmatch(value) else None


def content_range(value: str | None) -> ContentRange | None:
    """Reads the header; None where there is none, several of them, or one in another unit."""
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


def unclear_range(uri: str, header: str | None) -> RequestError:
    """The error about an answer of which nobody can tell which bytes of the file it has."""
    said = "no Content-Range" if header is None else f"the Content-Range {header!r:.200}"
    return RequestError(
        f"{uri}: the server answers with a part of the file and {said}, which does not say what part; download the "
        "checkpoint, or serve it from a server that does"
    )


class VersionedSource(OpenSource):
    """A source that compares the version in each answer with the one at opening.

    ``check_unchanged`` then asks the storage only if nothing was read yet, or some answer did not say its version. Of
    storage that had nothing but a size to say at opening, an answer with the size has said all that another question
    would bring.
    """

    def __init__(self, uri: str, version: FileVersion) -> None:
        super().__init__(uri, version)
        self._lock = threading.Lock()
        self._all_told: bool | None = None

    def check_unchanged(self) -> None:
        """As ``Source.check_unchanged``: of what was read, as nothing else is used."""
        if not self._all_told:
            super().check_unchanged()

    def require_same(self, answer: FileVersion, *, is_size_told: bool = True) -> None:
        """Compares what an answer says of the file's version with how it was opened.

        Args:
            answer: The version.
            is_size_told: Whether its size is what the answer says, and not the one at opening.

        Raises:
            IntegrityError: It is another version.
        """
        change = self.version.difference(answer)
        if change is not None:
            raise changed_error(self.uri, change)
        told = self.version.etag is not None and answer.etag is not None
        told = told or (self.version.mtime_ns is not None and answer.mtime_ns is not None)
        told = told or (is_size_told and self.version.etag is None and self.version.mtime_ns is None)
        with self._lock:
            self._all_told = told and self._all_told is not False

    def require_range(self, header: str | None, begin: int, end: int, told: FileVersion) -> None:
        """Makes sure that an answer has the range that was asked for, of the version that was opened.

        Args:
            header: Its ``Content-Range``; may be missing only where the whole file was asked for.
            begin: First byte asked for.
            end: One past the last.
            told: What else it says of the file's version.

        Raises:
            IntegrityError: It is another version.
            RequestError: It does not say which range it has.
            OSError: It is another range, or a part of it.
        """
        given = content_range(header)
        if given is None and (header is not None or (begin, end) != (0, self.size_bytes)):
            raise unclear_range(self.uri, header)
        total_bytes = given.total_bytes if given is not None else None
        if total_bytes is not None:
            told = replace(told, size_bytes=total_bytes)
        self.require_same(told, is_size_told=total_bytes is not None)
        if given is not None and (given.begin, given.end) != (begin, end):
            raise OSError(f"the answer has {header!r} where bytes {begin}-{end - 1} were asked for")
