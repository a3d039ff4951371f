"""Looking around in storage: what is at a path, what is in a folder, and small files read whole."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from megamind_ray.config import RetryConfig
from megamind_ray.core.location import Location
from megamind_ray.errors import RequestError
from megamind_ray.io.counters import ReadCounters, ReadKind
from megamind_ray.io.failures import RefusedError
from megamind_ray.io.filesystems import call_filesystem, fsspec_filesystem
from megamind_ray.io.opening import open_location
from megamind_ray.io.retry import call_with_retry, read_with_retry, request_bound_s
from megamind_ray.io.source import Source, storage_errors
from megamind_ray.io.stop import Stop
from megamind_ray.units import MIB, format_bytes

__all__ = ["Browser", "Listing", "PathKind"]

# An index of a million tensors takes 100 MB; what is longer is some other file.
_MAX_WHOLE_BYTES = 256 * MIB
_SUFFIX = re.compile(r"\.[A-Za-z]\w*$")

Result = TypeVar("Result")


class PathKind(Enum):
    """What is at a path; a link counts as what it leads to."""

    FILE = "file"
    FOLDER = "folder"
    OTHER = "other"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Listing:
    """Names directly in a folder, sorted."""

    files: tuple[str, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Browser:
    """Looks around, with retries, and counts what it reads as header bytes.

    Attributes:
        retry: Bounds of the attempts.
        counters: Where reads are counted.
        stop: Once set, nothing that fails is tried again.
    """

    retry: RetryConfig
    counters: ReadCounters = field(default_factory=ReadCounters)
    stop: Stop = field(default_factory=Stop)

    def kind(self, location: Location) -> PathKind:
        """What is there.

        Raises:
            RequestError: No permission to look, or a package is missing.
            SourceError: The storage does not answer.
        """

        def look(_attempt: int) -> PathKind:
            return _local_kind(location) if location.is_local else _remote_kind(location, self.retry)

        return self._call(look, location, "looking it up")

    def has_file(self, location: Location) -> bool:
        """Whether there is a file that need not be there.

        Storage where one may read but not list refuses to say that something is missing: there it is missing.

        Raises:
            RequestError: A package is missing, or a local folder may not be looked into.
            SourceError: The storage does not answer.
        """
        try:
            return self.kind(location) is PathKind.FILE
        except RequestError as error:
            if location.is_local or not isinstance(error.__cause__, PermissionError):
                raise
            return False

    def listing(self, location: Location) -> Listing | None:
        """What is in a folder; None where the storage has no listings (HTTP).

        Raises:
            RequestError: No permission to list, no such folder, or a package is missing.
            SourceError: The storage does not answer.
        """
        if location.is_web:
            return None

        def look(_attempt: int) -> Listing:
            return _local_listing(location) if location.is_local else _remote_listing(location, self.retry)

        return self._call(look, location, "listing it")

    def open(self, location: Location) -> Source:
        """Opens a file.

        Raises:
            RequestError: No such file, no permission, or a package is missing.
            SourceError: The storage does not answer.
        """
        try:
            return self._call(lambda _: open_location(location, retry=self.retry), location, "opening it")
        except RequestError as error:
            target = _lost_target(location)
            if target is None:
                raise
            # With another cause than a missing file: there is something, and what it lacks is elsewhere.
            raise RequestError(
                f"{location.uri}: is a link to {target}, which is not there (a cache that was cleaned up?); fetch the "
                "checkpoint again"
            ) from error

    def read(self, source: Source, begin: int, end: int) -> bytes:
        """Reads bytes ``[begin, end)`` of something that describes weights.

        Raises:
            SourceError: The storage does not answer.
            IntegrityError: The range is not in the file.
        """
        buffer = bytearray(end - begin)
        read_with_retry(
            source,
            begin,
            memoryview(buffer),
            self.retry,
            self.counters,
            kind=ReadKind.HEADER,
            sleep=self.stop.wait,
            stopped=self.stop.is_set,
        )
        return bytes(buffer)

    def read_whole(self, location: Location) -> bytes:
        """Reads a small file: an index, a configuration, a sidecar.

        Raises:
            RequestError: No such file, no permission, or absurdly long for its purpose.
            IntegrityError: It changed while it was read.
            SourceError: The storage does not answer.
        """
        with self.open(location) as source:
            if source.size_bytes > _MAX_WHOLE_BYTES:
                raise RequestError(
                    f"{location.uri}: {format_bytes(source.size_bytes)} are too much for this kind of file "
                    f"(at most {format_bytes(_MAX_WHOLE_BYTES)}); is it the right one?"
                )
            raw = self.read(source, 0, source.size_bytes)
            source.check_unchanged()
            return raw

    def read_if_any(self, location: Location) -> bytes | None:
        """Reads a small JSON file that need not be there; None where it is not.

        On this machine whatever has the name counts as there: a folder, a pipe, or a link that leads nowhere in its
        place is an error, not an absence. On a web server only what may be a JSON object does: many answer an address
        that they do not know with a page.

        Raises:
            RequestError: It may not be read, or is no file.
            IntegrityError: It changed while it was read.
            SourceError: The storage does not answer.
        """
        if location.is_local:
            is_there = self._call(lambda _attempt: _has_entry(location), location, "looking it up")
            return self.read_whole(location) if is_there else None
        if not location.is_web:
            return self.read_whole(location) if self.has_file(location) else None
        try:
            raw = self.read_whole(location)
        except RequestError as error:
            # A recording that is there and cannot be read is no reason to load unchecked.
            if not isinstance(error.__cause__, FileNotFoundError | PermissionError | RefusedError):
                raise
            return None
        return raw if raw.lstrip().startswith(b"{") else None

    def _call(self, action: Callable[[int], Result], location: Location, what: str) -> Result:
        return call_with_retry(
            action,
            uri=location.uri,
            what=what,
            retry=self.retry,
            sleep=self.stop.wait,
            stopped=self.stop.is_set,
        )


def _local_kind(location: Location) -> PathKind:
    try:
        mode = os.stat(location.uri or "/").st_mode  # noqa: PTH116 - strings all through, 163 files at a time
    except (FileNotFoundError, NotADirectoryError):
        return PathKind.MISSING
    if stat.S_ISREG(mode):
        return PathKind.FILE
    return PathKind.FOLDER if stat.S_ISDIR(mode) else PathKind.OTHER


def _has_entry(location: Location) -> bool:
    try:
        os.lstat(location.uri)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _lost_target(location: Location) -> str | None:
    """Where a local link leads, if nothing is there."""
    if not location.is_local or os.path.exists(location.uri):  # noqa: PTH110 - strings all through
        return None
    try:
        return os.readlink(location.uri)  # noqa: PTH115
    except OSError:
        return None


def _local_listing(location: Location) -> Listing:
    with os.scandir(location.uri or "/") as entries:
        # What is no folder counts as a file, also a pipe, or a link that leads nowhere: left out in silence, the rest
        # would be taken for the whole checkpoint. Opening it says what is wrong.
        folders = {entry.name: _is_folder(entry) for entry in entries}
    return _sorted_listing([(name, not is_folder, is_folder) for name, is_folder in folders.items()])


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle, or into a folder that is closed
        return False


def _remote_kind(location: Location, retry: RetryConfig) -> PathKind:
    if location.is_bucket or (location.is_web and not _has_suffix(location)):
        # A web server need not answer for a folder, though it serves the files in it. What is missing, its files tell.
        return PathKind.FOLDER
    try:
        if location.is_web:
            open_location(location, retry=retry).close()
            return PathKind.FILE
        filesystem, path = fsspec_filesystem(location, retry)
        with storage_errors(location.uri):
            filesystem.invalidate_cache(path)
            kind = call_filesystem(filesystem, "info", path, bound_s=request_bound_s(retry)).get("type")
    except RequestError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        return PathKind.MISSING
    return PathKind.FOLDER if kind == "directory" else PathKind.FILE


def _has_suffix(location: Location) -> bool:
    """Whether an address is one of a file: ``model.safetensors`` is, ``Llama-3.1-8B`` and a host alone are not."""
    return location.uri.count("/") > 2 and _SUFFIX.search(location.name) is not None


def _remote_listing(location: Location, retry: RetryConfig) -> Listing:
    filesystem, path = fsspec_filesystem(location, retry)
    with storage_errors(location.uri):
        entries = call_filesystem(filesystem, "ls", path, bound_s=request_bound_s(retry), detail=True)
    kinds = [
        (
            str(entry["name"]).rstrip("/").rpartition("/")[2],
            entry.get("type") == "file",
            entry.get("type") == "directory",
        )
        for entry in entries
    ]
    return _sorted_listing(kinds)


def _sorted_listing(kinds: list[tuple[str, bool, bool]]) -> Listing:
    return Listing(
        tuple(sorted(name for name, is_file, _ in kinds if is_file)),
        tuple(sorted(name for name, _, is_folder in kinds if is_folder)),
    )
