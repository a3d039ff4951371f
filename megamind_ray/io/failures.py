"""What the libraries below us raise, told apart by what another attempt can do about it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Final

from megamind_ray.errors import MegamindError

__all__ = ["BusyError", "OfflineError", "RefusedError", "library_errors", "retry_after_s", "status_error", "status_of"]

_BUSY: Final = (408, 425, 429)
# Libraries with classes of their own for these cases, and no status on them.
_REFUSALS: Final = ("PermissionDeniedError", "UnauthenticatedError", "NoCredentialsError", "ClientAuthenticationError")
_GONE: Final = ("NotFoundError", "ResourceNotFoundError", "EntryNotFoundError", "RepositoryNotFoundError")
_OFFLINE: Final = "OfflineModeIsEnabled"

_SECONDS: Final = re.compile(r"-?[0-9]+")
# Nobody waits longer, whatever is asked for; `retry.max_wait_s` is less.
_MAX_RETRY_AFTER_S: Final = 86400.0


class RefusedError(OSError):
    """An answer that another attempt will not change; a ``RequestError`` once it is known of which file."""


class OfflineError(RefusedError):
    """The library was told to ask nobody, as by ``HF_HUB_OFFLINE``."""


class BusyError(OSError):
    """The storage says that it cannot now; worth another attempt, not before it is ready.

    Attributes:
        retry_after_s: Seconds that it asked to be left alone, None where it did not say.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def retry_after_s(value: str | None) -> float | None:
    """The ``Retry-After`` of an answer in seconds, at most a day; None where there is none, or nonsense."""
    text = (value or "").strip()
    seconds: float | None = None
    if _SECONDS.fullmatch(text):
        # Of ten thousand digits, which no number takes, the first few say enough.
        seconds = float(text[:10])
    else:
        with suppress(ValueError, TypeError, OverflowError, IndexError):  # what the parser has for odd dates
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
    return None if seconds is None else min(max(0.0, seconds), _MAX_RETRY_AFTER_S)


def status_error(status: int, what: str, headers: Mapping[str, str]) -> OSError:
    """An HTTP status that is not success, as an error.

    Args:
        status: Of the answer.
        what: Who answered, for the message.
        headers: Of the answer.
    """
    text = f"{what} answered {status}"
    if status in (401, 403, 407):
        return PermissionError(text)
    if status in (404, 410):
        return FileNotFoundError(text)
    if status in _BUSY or status >= 500:
        return BusyError(text, retry_after_s(headers.get("Retry-After")))
    return RefusedError(f"{text}, which another attempt will not change; check the address")


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of a library is about; None of any other error."""
    response = getattr(error, "response", None) or error
    for attribute in ("status", "status_code", "code"):
        status = getattr(response, attribute, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None


@contextmanager
def library_errors() -> Iterator[None]:
    """Turns the classes of storage libraries into ``OSError``s that tell what happened.

    A refusal becomes a ``PermissionError``, a missing file a ``FileNotFoundError``, an answer of a server that is busy
    or broken a ``BusyError``; everything else, which is mostly the network, a plain ``OSError``.
    """
    try:
        yield
    except (ImportError, MegamindError):
        raise
    except OSError as error:
        if type(error).__name__ == _OFFLINE:
            raise OfflineError(str(error)) from error
        if status_of(error) is None:
            raise
        raise _translated(error) from error
    except Exception as error:
        raise _translated(error) from error


def _translated(error: Exception) -> OSError:
    name = type(error).__name__
    # Some add pages of details below the first line.
    text = f"{name}: {str(error).strip().partition(chr(10))[0].strip()}"
    if name in _REFUSALS:
        return PermissionError(text)
    if name in _GONE:
        return FileNotFoundError(text)
    status = status_of(error)
    if status is None:
        return OSError(text)
    headers = getattr(getattr(error, "response", None) or error, "headers", None)
    return status_error(status, text, headers if isinstance(headers, Mapping) else {})
