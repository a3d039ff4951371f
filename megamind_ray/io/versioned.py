"""Remote files whose answers say of which version they are: each read is its own check for changes."""

from __future__ import annotations

import re
import threading
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from megamind_ray.errors import RequestError
from megamind_ray.io.checksum import crc32
from megamind_ray.io.source import FileVersion, OpenSource, ShortReadError, changed_error, storage_errors

__all__ = [
    "ContentRange",
    "VersionedSource",
    "content_range",
    "fill",
    "no_ranges",
    "unclear_range",
    "whole_number",
]

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


def fill(view: memoryview, pieces: Iterable[bytes | memoryview], offset: int, *, summed: bool) -> int:
    """Copies the pieces of a body into place, each while it is in the CPU's cache.

    Args:
        view: Bytes; filled wholly.
        pieces: In their order.
        offset: Of the body in its file, for messages.
        summed: Compute the CRC-32 on the way.

    Returns:
        The CRC-32 where ``summed``, else 0.

    Raises:
        OSError: There are more bytes, or fewer (``ShortReadError``).
    """
    done, value = 0, 0
    for piece in pieces:
        end = done + len(piece)
        if end > view.nbytes:
            raise OSError(f"the answer goes on after the {view.nbytes} bytes at offset {offset} that were asked for")
        view[done:end] = piece
        if summed:
            value = crc32(piece, value)
        done = end
    if done < view.nbytes:
        raise ShortReadError(f"the answer ended after {done} of {view.nbytes} bytes at offset {offset}")
    return value


class VersionedSource(OpenSource):
    """A source that compares the version in each answer with the one at opening. One read is one request.

    ``check_unchanged`` then asks the storage only if nothing was read yet, or some answer did not say its version. Of
    storage that had nothing but a size to say at opening, an answer with the size has said all that another question
    would bring.
    """

    def __init__(self, uri: str, version: FileVersion) -> None:
        super().__init__(uri, version)
        self._lock = threading.Lock()
        self._all_told: bool | None = None

    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:  # noqa: ARG002
        """As ``Source.read_into``; nothing is kept in a cache here."""
        self._read(offset, buffer, summed=False)

    def read_summed(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> int:  # noqa: ARG002
        """As ``Source.read_summed``."""
        return self._read(offset, buffer, summed=True)

    def close(self) -> None:
        """Nothing is held between reads: connections are the process's, or its client's."""

    def _read(self, offset: int, buffer: memoryview, *, summed: bool) -> int:
        view = buffer.cast("B")
        self.require_inside(offset, view.nbytes)
        if view.nbytes == 0:
            return 0
        with storage_errors(self.uri):
            return self.fetch(offset, view, summed=summed)

    @abstractmethod
    def fetch(self, offset: int, view: memoryview, *, summed: bool) -> int:
        """Asks for the bytes from ``offset`` on, which are in the file, once, and fills a view that is not empty.

        Returns:
            The CRC-32 where ``summed``, else 0.
        """

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
