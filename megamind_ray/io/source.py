"""One data file, read by ranges: a local file, or anything that fsspec reaches."""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Protocol, Self

from megamind_ray.core.manifest import FileInfo
from megamind_ray.errors import IntegrityError, MegamindError, RequestError
from megamind_ray.io.location import Location, fsspec_filesystem, parse_location

__all__ = [
    "FileVersion",
    "FsspecSource",
    "LocalSource",
    "ShortReadError",
    "Source",
    "open_location",
    "open_source",
    "storage_errors",
]


class ShortReadError(OSError):
    """Storage gave fewer bytes than asked for; worth another attempt."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """What tells one state of a file from another; None where the storage does not say.

    Attributes:
        size_bytes: Size.
        mtime_ns: Modification time.
        etag: Version tag of an object.
    """

    size_bytes: int
    mtime_ns: int | None = None
    etag: str | None = None

    def difference(self, now: FileVersion) -> str | None:
        """What is different in ``now``, in words, or None."""
        changes = []
        for name, was, is_now in (
            ("size in bytes", self.size_bytes, now.size_bytes),
            ("mtime in ns", self.mtime_ns, now.mtime_ns),
            ("etag", self.etag, now.etag),
        ):
            if was is not None and is_now is not None and was != is_now:
                changes.append(f"{name} was {was}, is {is_now}")
        return ", ".join(changes) or None


class Source(Protocol):
    """One open data file. Reads may come from several threads at once."""

    @property
    def uri(self) -> str:
        """Path or URI, for messages."""

    @property
    def version(self) -> FileVersion:
        """State of the file when it was opened."""

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was opened."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills the whole buffer with the bytes from ``offset`` on.

        Raises:
            OSError: It did not work this time (``ShortReadError`` where bytes are missing).
            IntegrityError: The range runs past the end, or the file shrank.
        """

    def check_unchanged(self) -> None:
        """Compares the file as it is now with when it was opened.

        Raises:
            IntegrityError: It changed, so what was read of it must not be used.
        """

    def close(self) -> None:
        """Gives the file back; no read may be running. A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _OpenSource(ABC):
    """What all sources share: the state at opening, and the checks against it."""

    def __init__(self, uri: str, version: FileVersion) -> None:
        self.uri = uri
        self.version = version

    @property
    def size_bytes(self) -> int:
        return self.version.size_bytes

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """As ``Source.read_into``."""

    @abstractmethod
    def current_version(self) -> FileVersion:
        """State of the file now."""

    @abstractmethod
    def close(self) -> None:
        """As ``Source.close``."""

    def check_unchanged(self) -> None:
        change = self.version.difference(self.current_version())
        if change is not None:
            raise IntegrityError(
                f"{self.uri}: changed while it was read ({change}); wait until nothing writes to it, then try again",
                file=self.uri,
            )

    def _require_inside(self, offset: int, num_bytes: int) -> None:
        if offset < 0 or offset + num_bytes > self.size_bytes:
            raise IntegrityError(
                f"{self.uri}: bytes [{offset}, {offset + num_bytes}) are not in the file, it has {self.size_bytes}; "
                "the plan was made for another state of it, plan again",
                file=self.uri,
                begin=offset,
                end=offset + num_bytes,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalSource(_OpenSource):
    """A file of this machine, read at offsets through one descriptor.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be opened.
        RequestError: It is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path)
        # Non-blocking, since opening a named pipe would wait for a writer for ever.
        self._fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise RequestError(f"{name}: is not a regular file; give a safetensors file or a folder with some")
        super().__init__(name, _local_version(status))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        self._require_inside(offset, view.nbytes)
        done = 0
        while done < view.nbytes:  # Linux gives at most 2 GiB a call, network file systems less
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                self.check_unchanged()
                raise ShortReadError(f"end of file at byte {offset + done} of {self.size_bytes}")
            done += count

    def current_version(self) -> FileVersion:
        return _local_version(os.fstat(self._fd))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class FsspecSource(_OpenSource):
    """A file of an fsspec file system, read by ranges.

    Args:
        filesystem: The file system.
        path: Path in it.
        uri: For messages.

    Raises:
        RequestError: No such file, no permission, or its size is not known.
        OSError: The storage did not answer.
    """

    def __init__(self, filesystem: Any, path: str, uri: str) -> None:
        self._filesystem = filesystem
        self._path = path
        with storage_errors(uri):
            version = _remote_version(filesystem.info(path), uri)
        super().__init__(uri, version)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        self._require_inside(offset, view.nbytes)
        if view.nbytes == 0:
            return
        with storage_errors(self.uri):
            data = self._filesystem.cat_file(self._path, start=offset, end=offset + view.nbytes)
        if len(data) > view.nbytes:
            raise RequestError(
                f"{self.uri}: gave {len(data)} bytes where {view.nbytes} were asked for, so it does not serve byte "
                "ranges; download the checkpoint, or serve it from a server that does"
            )
        if len(data) < view.nbytes:
            raise ShortReadError(f"{len(data)} bytes came of {view.nbytes} at offset {offset}")
        view[:] = data

    def current_version(self) -> FileVersion:
        with storage_errors(self.uri):
            self._filesystem.invalidate_cache(self._path)
            return _remote_version(self._filesystem.info(self._path), self.uri)

    def close(self) -> None:
        """Nothing is held between reads."""


def open_location(location: Location) -> Source:
    """Opens a file as it is now.

    Raises:
        RequestError: No such file, no permission, not a file, or a package is missing.
        OSError: The storage did not answer.
    """
    if location.is_local:
        with storage_errors(location.uri):
            return LocalSource(location.uri)
    filesystem, path = fsspec_filesystem(location)
    return FsspecSource(filesystem, path, location.uri)


def open_source(uri: str, expected: FileInfo) -> Source:
    """Opens a data file for a plan that was made from ``expected``.

    Args:
        uri: ``Manifest.file_uri`` of the file.
        expected: The file as it was when the manifest was read.

    Raises:
        IntegrityError: The file changed since (size, modification time or version tag).
        RequestError: No such file (any more), or no permission.
        OSError: The storage did not answer.
    """
    source = open_location(parse_location(uri))
    planned = FileVersion(expected.size_bytes, expected.mtime_ns, expected.etag)
    change = planned.difference(source.version)
    if change is not None:
        source.close()
        raise IntegrityError(f"{uri}: changed since it was planned ({change}); plan or load again", file=uri)
    return source


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Says what storage libraries raise in our words.

    What the user can fix becomes a ``RequestError``; every other error leaves as an ``OSError``, which is retried.
    """
    try:
        yield
    except MegamindError:
        raise
    except FileNotFoundError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from error  # fsspec says so of an HTTP server that cannot be reached, too
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise RequestError(f"{uri}: no such file or folder{cause}; check the path, also on the other nodes") from error
    except PermissionError as error:
        raise RequestError(
            f"{uri}: no permission to read it; make it and its folders readable for this user, or give credentials"
        ) from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise RequestError(f"{uri}: {error.strerror or error}; check the path") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise RequestError(f"{uri}: {error.strerror}; check the path") from error
        raise
    except ImportError as error:
        raise RequestError(f"{uri}: a package is missing ({error}); install it") from error
    except Exception as error:  # each storage library has classes of its own, mostly not OSError
        raise OSError(f"{type(error).__name__}: {error}") from error


def _local_version(status: os.stat_result) -> FileVersion:
    return FileVersion(status.st_size, status.st_mtime_ns)


def _remote_version(info: dict[str, Any], uri: str) -> FileVersion:
    if info.get("type") == "directory":
        raise RequestError(f"{uri}: is a folder, not a file")
    size = info.get("size")
    if not isinstance(size, int):
        raise RequestError(f"{uri}: the storage does not say its size; download the checkpoint and load the copy")
    etag = next((str(info[key]) for key in ("ETag", "etag", "generation", "blob_id") if info.get(key)), None)
    keys = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")
    changed = next((info[key] for key in keys if info.get(key)), None)
    return FileVersion(size, _nanoseconds(changed), etag)


def _nanoseconds(moment: object) -> int | None:
    """A moment as file systems give it: seconds, a datetime, or text as in HTTP or ISO 8601."""
    if isinstance(moment, str):
        for parse in (datetime.fromisoformat, parsedate_to_datetime):
            with suppress(ValueError):
                return round(parse(moment).timestamp() * 1e9)
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    if isinstance(moment, int | float):
        return round(moment * 1e9)
    return None
