"""Every error that megamind-ray raises on purpose.

A message says what is wrong, where, and what to do about it. All errors survive pickling with their
attributes, so an actor can raise them and the driver catches the same class.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Self

__all__ = [
    "AbsentError",
    "CapacityError",
    "ClusterError",
    "IntegrityError",
    "MegamindError",
    "RecordError",
    "RequestError",
    "SourceError",
    "listed",
    "masked",
]

# What stands between a scheme and the authority; also with one slash too few, as people mistype it.
_SLASHES: Final = re.compile(
    r"(?<=[\w+.-])://+|(?:(?<=http)|(?<=https)|(?<=s3)|(?<=gs)|(?<=az)|(?<=hf)):/"
    r"|(?:(?<=http)|(?<=https)):(?=[^\s/]*@)",
    re.IGNORECASE,
)
_SPACE: Final = re.compile(r"\s")
_BEHIND_AUTHORITY: Final = re.compile(r"[/?#]")
_IPV6: Final = re.compile(r"\[[0-9A-Fa-f:.%]*\]")
# What may follow the colon behind a host: a port, or, where the address ends there, what ends the sentence.
_PORT: Final = re.compile(r"\d{1,5}")
_PORT_AT_END: Final = re.compile(r"\d{0,5}[\"':;,.)\]}>]*")
# Also of a file's name alone, as an address was cut into a folder and names.
_QUERY: Final = re.compile(r"([^\s?'\"]\?)([^\s'\"]+)")
# Of a signed address every value may be a secret; what ends the sentence is not part of it.
_VALUE: Final = re.compile(r"=[^&]*?(?=[:;,.)]*(?:&|$))")
_FRAGMENT: Final = re.compile(
    r"((?:(?<=[\w+.-])://[^\s'\"#]*|\.(?:safetensors|json))#)[^\s'\"]*?(?=[:;,.)]*(?:[\s'\"]|$))"
)


def masked(text: str) -> str:
    """The text without what addresses in it may carry as secrets: user, password, values of the query, the fragment.

    Where it cannot be told what of an address is the password, too much is masked rather than too little: a password
    may have a slash or a space in it that should have been written ``%2F`` or ``%20``.
    """
    if ":" not in text and "?" not in text and "#" not in text:
        return text
    text = _without_users(text)
    text = _QUERY.sub(lambda match: match[1] + _VALUE.sub("=***", match[2]), text)
    return _FRAGMENT.sub(r"\1***", text)


def _without_users(text: str) -> str:
    parts, begin = [], 0
    found = list(_SLASHES.finditer(text))
    for number, match in enumerate(found):
        end = found[number + 1].start() if number + 1 < len(found) else len(text)
        is_web = text[max(0, match.start() - 5) : match.start()].lower().endswith(("http", "https"))
        parts += [text[begin : match.end()], _without_user(text[match.end() : end], is_web=is_web)]
        begin = end
    return "".join(parts) + text[begin:]


def _without_user(rest: str, *, is_web: bool) -> str:
    """An address from its authority on, and the text up to the next address."""
    address = _SPACE.split(rest, maxsplit=1)[0]
    authority = _BEHIND_AUTHORITY.split(address, maxsplit=1)[0]
    if _has_password(authority, is_whole=authority == address):
        # A space in the password cuts the address short: then up to the last "@" of the line.
        end = address.rfind("@") if "@" in address else rest.partition("\n")[0].rfind("@")
    else:
        # "hf://NAME@REVISION" has no user.
        end = authority.rfind("@") if is_web else -1
    return rest if end < 0 else "***" + rest[end:]


def _has_password(authority: str, *, is_whole: bool) -> bool:
    """Whether a colon in it is followed by something that is no port."""
    _, colon, behind = _IPV6.sub("", authority).partition(":")
    return bool(colon) and (_PORT_AT_END if is_whole else _PORT).fullmatch(behind) is None


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


class AbsentError(RequestError):
    """A copy of a checkpoint that has none of its files: most often a mistyped address."""


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


class RecordError(MegamindError):
    """A load was done, and what was recorded of it cannot be had or written. The model stays loaded.

    Attributes:
        reason: Why, without what became of the model.
        model: Its name.
    """

    def __init__(self, reason: str, *, model: str) -> None:
        super().__init__(f"{reason}; the load itself was done, model {model!r} stays loaded")
        self.reason = masked(reason)
        self.model = model


class ClusterError(MegamindError):
    """The cluster cannot do it: no Ray, no free GPU, a lost actor, a silent node."""


def listed(items: Sequence[str], limit: int = 5, separator: str = ", ") -> str:
    """The first few of many names, and how many more there are, as part of a message."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more
