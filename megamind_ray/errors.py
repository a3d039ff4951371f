"""Every error that megamind-ray raises on purpose.

A message says what is wrong, where, and what to do about it. All errors survive pickling with their
attributes, so an actor can raise them and the driver catches the same class.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Self

__all__ = [
    "CapacityError",
    "ClusterError",
    "IntegrityError",
    "MegamindError",
    "RequestError",
    "SourceError",
    "listed",
    "masked",
]

# Before the host, up to the last "@" in front of it: user and password. "hf://NAME@REVISION" has none.
_USER: Final = re.compile(r"(https?://)[^/\s]+@|([A-Za-z][\w+.-]*://)[^/\s@:]*:[^/\s]+@", re.IGNORECASE)
# Also of a file's name alone, as an address was cut into a folder and names.
_QUERY: Final = re.compile(r"([^\s?'\"]\?)([^\s'\"]+)")
# Of a signed address every value may be a secret; what ends the sentence is not part of it.
_VALUE: Final = re.compile(r"=[^&]*?(?=[:;,.)]*(?:&|$))")


def masked(text: str) -> str:
    """The text without what addresses in it may carry as secrets: user, password, values of the query."""
    if "://" not in text and "?" not in text:
        return text
    text = _USER.sub(lambda match: f"{match[1] or match[2]}***@", text)
    return _QUERY.sub(lambda match: match[1] + _VALUE.sub("=***", match[2]), text)


class MegamindError(Exception):
    """Root of all errors of this package. Secrets in addresses are masked in messages."""

    def __init__(self, message: str) -> None:
        self.message = masked(message)
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[MegamindError], message: str, state: dict[str, Any]) -> MegamindError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class RequestError(MegamindError):
    """The request cannot be fulfilled as it was made; the user can fix it."""


class CapacityError(MegamindError):
    """Something does not fit.

    Attributes:
        where: The place that is too small, for example ``GPU n0:3``.
        needed_bytes: What would have to fit there.
        free_bytes: What is free there.
    """

    def __init__(self, message: str, *, where: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.where = where
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    @property
    def missing_bytes(self) -> int:
        """By how many bytes it does not fit."""
        return max(0, self.needed_bytes - self.free_bytes)


class IntegrityError(MegamindError):
    """Bytes are not what they should be: a checksum, a header or a file that changed.

    Attributes:
        file: Path or URI of the file, secrets masked.
        tensor: Name of the tensor on disk, where one is concerned.
        begin: First byte of the range in the file, or None for the whole file.
        end: One past the last byte.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str,
        tensor: str | None = None,
        begin: int | None = None,
        end: int | None = None,
    ) -> None:
        super().__init__(message)
        self.file = masked(file)
        self.tensor = tensor
        self.begin = begin
        self.end = end


class SourceError(MegamindError):
    """Storage still fails after all retries.

    Attributes:
        file: Path or URI of the file that could not be read, secrets masked.
        attempts: How often it was tried.
    """

    def __init__(self, message: str, *, file: str, attempts: int = 1) -> None:
        super().__init__(message)
        self.file = masked(file)
        self.attempts = attempts

    def on(self, node: str) -> Self:
        """The same error, saying on which node it happened."""
        error = type(self)(f"{self.message} (on node {node})", file=self.file, attempts=self.attempts)
        error.__cause__ = self
        return error


class ClusterError(MegamindError):
    """The cluster cannot do it: no Ray, no free GPU, a lost actor, a silent node."""


def listed(items: Sequence[str], limit: int = 5, separator: str = ", ") -> str:
    """The first few of many names, and how many more there are, as part of a message."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more
