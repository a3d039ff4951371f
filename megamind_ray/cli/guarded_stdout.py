"""Stdout that cannot be written: a full disk behind a redirection, or a pipe whose reader has gone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar, cast

__all__ = ["StdoutError", "give_up_stdout", "guarded_stdout"]


_T = TypeVar("_T")


class StdoutError(Exception):
    """What was printed could not be written. No ``OSError``: libraries in between have their own ways with those."""


class _Guarded:
    """A stream whose failures are told from all other failures of the operating system."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._or_lost(self._stream.write, text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._or_lost(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _or_lost(self, do: Callable[..., _T], *args: str) -> _T:
        try:
            return do(*args)
        except OSError as error:
            raise StdoutError(error.strerror or str(error)) from error


@contextlib.contextmanager
def guarded_stdout() -> Iterator[None]:
    """Makes what is printed meanwhile raise ``StdoutError`` where it cannot be written."""
    before = sys.stdout
    sys.stdout = cast(TextIO, _Guarded(before))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = before


def give_up_stdout(error: StdoutError) -> None:
    """Says in one line on stderr that stdout cannot be written, and drops what is still to be written there."""
    # By its descriptor: the interpreter flushes at its end, and would complain a second time.
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - not a path
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    with contextlib.suppress(OSError):
        sys.stderr.write(f"megamind: stdout cannot be written ({error}); what was to be printed is lost\n")
