"""Results go to stdout, once; everything else goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megamind_ray.errors import CapacityError, MegamindError
from megamind_ray.report.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Output", "error_document", "print_error", "print_json", "stderr_console"]

# Tables that go to a file or a pipe are not wrapped to some terminal's width.
_PIPE_COLUMNS = 4096


class Output:
    """The result of one command.

    As a context it keeps stdout free: what anything else prints meanwhile (Ray shows the output of its workers) goes
    to stderr. ``emit`` is called once, and prints when the context ends well.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._result: tuple[object, RenderableType | str, Iterable[str]] | None = None
        self._redirect = redirect_stdout(sys.stderr)

    def __enter__(self) -> Self:
        self._redirect.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._redirect.__exit__(kind, error, trace)
        if error is None and self._result is not None:
            self._print(*self._result)

    def emit(self, document: object, text: RenderableType | str, lines: Iterable[str] = ()) -> None:
        """Sets the result.

        Args:
            document: For ``--json``.
            text: For people.
            lines: For people too, after the text, as they are: a listing too long for a table that is laid out.
        """
        self._result = (document, text, lines)

    def _print(self, document: object, text: RenderableType | str, lines: Iterable[str]) -> None:
        if self.as_json:
            print_json(document)
        else:
            _print_text(text)
            sys.stdout.writelines(f"{line}\n" for line in lines)
            sys.stdout.flush()


def _print_text(text: RenderableType | str) -> None:
    console = _console(stderr=False)
    if console.is_terminal:
        console.print(text, markup=False, highlight=False)
        return
    with console.capture() as capture:
        console.print(text, markup=False, highlight=False)
    # Rich pads lines to the width of the console; a file or a pipe does not need that.
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def print_json(document: object) -> None:
    """Writes one JSON document and a line end to stdout; in one line, unless a person is looking."""
    # Indenting is many times slower, which tells on a list of 92,000 tensors.
    indent = 2 if sys.stdout.isatty() else None
    sys.stdout.write(json.dumps(document, indent=indent, default=str) + "\n")
    sys.stdout.flush()


def error_document(error: BaseException, exit_code: int, *, message: str | None = None) -> dict[str, Any]:
    """An error as plain JSON values: its class, message, attributes and the exit code it leads to."""
    known = isinstance(error, MegamindError)
    fields = {name: value for name, value in vars(error).items() if name != "message" and not name.startswith("_")}
    if isinstance(error, CapacityError):
        fields["missing_bytes"] = error.missing_bytes
    return {
        "error": {
            "class": _class_name(error),
            "message": message if message is not None else str(error),
            "fields": fields if known else {},
            "exit_code": exit_code,
        }
    }


def print_error(document: dict[str, Any]) -> None:
    """Writes an error as one block to stderr."""
    error = document["error"]
    lines = [f"megamind: {error['class']}: {error['message']}"]
    lines += [f"  {name}: {value}" for name, value in error["fields"].items() if value is not None]
    sys.stderr.write(printable("\n".join(lines), keep="\n\t") + "\n")


def stderr_console() -> Console:
    """Where progress is shown, if it is a terminal."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PIPE_COLUMNS)


def _class_name(error: BaseException) -> str:
    # An error that crossed from an actor is of a class that Ray made from ours.
    for cls in type(error).__mro__:
        if cls.__module__ == MegamindError.__module__:
            return cls.__name__
    return type(error).__name__
