"""One data file, read by ranges: what all kinds of storage have in common."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from megamind_ray.errors import IntegrityError, MegamindError, RequestError
from megamind_ray.io.checksum import crc32
from megamind_ray.io.failures import OfflineError, RefusedError, library_errors, status_of
from megamind_ray.io.hub_cache import offline_remedy

__all__ = ["FileVersion", "OpenSource", "ShortReadError", "Source", "changed_error", "storage_errors"]


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


def changed_error(uri: str, change: str) -> IntegrityError:
    """The error about a file that did not stay as it was opened; ``change`` says how it differs."""
    return IntegrityError(
        f"{uri}: changed while it was read ({change}); wait until nothing writes to it, then try again", file=uri
    )


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

    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
        """Fills the whole buffer with the bytes from ``offset`` on.

        Args:
            offset: First byte in the file.
            buffer: Where to; its contents are undefined when an error is raised.
            past_cache: Ask the storage itself where this machine keeps copies of what it read before: reading again
                after a checksum did not match, a copy that is wrong would be wrong again.

        Raises:
            OSError: It did not work this time (``ShortReadError`` where bytes are missing).
            IntegrityError: The range runs past the end, or the file shrank.
        """

    def read_summed(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> int:
        """As ``read_into``, and gives the CRC-32 of what was read, computed while the bytes are in the CPU's cache."""

    def prefers_long_reads(self, offset: int, num_bytes: int) -> bool:
        """Whether one read of this range is faster than one for each chunk of it, each summed as it comes."""

    def is_in_memory(self, offset: int, num_bytes: int) -> bool:
        """Whether this machine has the range in memory, as far as that can be told: reading it takes a core's time."""

    def check_unchanged(self) -> None:
        """Makes sure that what was read is of the file as it was opened: asks the storage, unless all answers told.

        Raises:
            IntegrityError: It changed, so what was read of it must not be used.
        """

    def close(self) -> None:
        """Gives the file back; no read may be running. A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class OpenSource(ABC):
    """What all sources share: the state at opening, and the checks against it."""

    def __init__(self, uri: str, version: FileVersion) -> None:
        self.uri = uri
        self.version = version

    @property
    def size_bytes(self) -> int:
        return self.version.size_bytes

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
        """As ``Source.read_into``."""

    def read_summed(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> int:
        """As ``Source.read_summed``."""
        self.read_into(offset, buffer, past_cache=past_cache)
        return crc32(buffer)

    def prefers_long_reads(self, offset: int, num_bytes: int) -> bool:  # noqa: ARG002
        """As ``Source.prefers_long_reads``: a request to storage behind a network has its length chosen already."""
        return False

    def is_in_memory(self, offset: int, num_bytes: int) -> bool:  # noqa: ARG002
        """As ``Source.is_in_memory``."""
        return False

    @abstractmethod
    def current_version(self) -> FileVersion:
        """State of the file now."""

    @abstractmethod
    def close(self) -> None:
        """As ``Source.close``."""

    def check_unchanged(self) -> None:
        change = self.version.difference(self.current_version())
        if change is not None:
            raise changed_error(self.uri, change)

    def require_inside(self, offset: int, num_bytes: int) -> None:
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


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Says what storage libraries raise in our words.

    What the user can fix becomes a ``RequestError``; every other error leaves as an ``OSError``, which is retried.
    """
    try:
        with library_errors():
            yield
    except MegamindError:
        raise
    except OfflineError as error:
        elsewhere = offline_remedy(uri) or "give the folder of a copy"
        raise RequestError(f"{uri}: nobody is asked, since HF_HUB_OFFLINE is set; unset it, or {elsewhere}") from error
    except RefusedError as error:
        raise RequestError(f"{uri}: {error}") from error
    except FileNotFoundError as error:
        reason = error.__cause__
        if isinstance(reason, OSError) and not isinstance(reason, FileNotFoundError) and status_of(reason) is None:
            raise reason from error  # some libraries say so of a server that cannot be reached, too
        cause = f" ({str(reason).strip().partition(chr(10))[0]})" if reason else ""
        raise RequestError(f"{uri}: no such file or folder{cause}; check the path") from error
    except PermissionError as error:
        said = "" if error.errno is not None else f" ({error})"  # a storage library's words, not the system's
        raise RequestError(
            f"{uri}: no permission to read it{said}; make it and its folders readable for this user, or give "
            "credentials"
        ) from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise RequestError(f"{uri}: {error.strerror or error}; check the path") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise RequestError(f"{uri}: {error.strerror}; check the path") from error
        raise
    except ImportError as error:
        raise RequestError(f"{uri}: a package is missing ({error}); install it") from error
