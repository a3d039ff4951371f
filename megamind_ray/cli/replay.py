"""``megamind replay``: the events of a recorded load, and whether this release would decide the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megamind_ray.cli.exit_codes import FAILED
from megamind_ray.cli.options import AsJson, examples
from megamind_ray.cli.output import Output
from megamind_ray.errors import RequestError

if TYPE_CHECKING:
    from megamind_ray.core.event_log import Difference, EventLog, LogEntry
    from megamind_ray.core.events import Event
    from megamind_ray.core.instructions import Instruction

__all__ = ["EXAMPLES", "replay_command"]

EXAMPLES = examples("megamind replay ./recorded", "megamind replay ./recorded/events.jsonl --json")


def replay_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR_OR_FILE",
            show_default=False,
            help="What `megamind load --record` wrote: the folder, or the events.jsonl in it.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Shows what happened to a recorded load and what its planner decided, and decides it again.

    The exit code is 0 where this release gives the same instructions to the same events, and 1 where it does not.
    """
    with Output(as_json) as output:
        import megamind_ray
        from megamind_ray.core.event_log import check
        from megamind_ray.report.tables import plain_table

        log = _read(path)
        difference = check(log)
        table = plain_table((">at", "event", "instructions"), (row for entry in log.entries for row in _rows(entry)))
        release = megamind_ray.__version__
        output.emit(_document(log, difference, release), table, ["", _verdict(log, difference, release)])
    if difference is not None:
        raise typer.Exit(FAILED)


def _read(path: Path) -> EventLog:
    from megamind_ray.api.record import EVENTS_FILE
    from megamind_ray.config.files import read_regular
    from megamind_ray.core.event_log import EventLog

    file = path / EVENTS_FILE if path.is_dir() else path
    try:
        text = read_regular(file)
    except OSError as error:
        raise RequestError(
            f"{file}: cannot be read ({error.strerror or error}); name what `load --record` wrote"
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{file}: is no event log: it is not text") from error
    try:
        return EventLog.from_jsonl(text)
    except RequestError as error:
        raise RequestError(f"{file}: {error.message}") from error


def _rows(entry: LogEntry) -> Iterator[tuple[str, str, str]]:
    said = [_in_words(instruction) for instruction in entry.instructions] or ["-"]
    yield f"{entry.at_s:.3f} s", _in_words(entry.event), said[0]
    for text in said[1:]:
        yield "", "", text


def _in_words(what: Event | Instruction) -> str:
    """``ReadAgain: node n1, extents 0, 1, 2 and 9 more, ranks 1``."""
    from dataclasses import fields

    content = ", ".join(f"{item.name} {_value(item.name, getattr(what, item.name))}" for item in fields(what))
    return f"{type(what).__name__}: {content}" if content else type(what).__name__


def _value(name: str, value: object) -> str:
    from megamind_ray.core.report import Fault
    from megamind_ray.core.tracks import short_node
    from megamind_ray.errors import MegamindError, listed

    if isinstance(value, tuple):
        return listed([str(item) for item in value])
    if isinstance(value, Fault):
        return f"{value.kind}, {value.where}; {value.action}"
    if isinstance(value, MegamindError):
        return f"{type(value).__name__}: {value.message}"
    return short_node(str(value)) if name == "node" else str(value)


def _verdict(log: EventLog, difference: Difference | None, release: str) -> str:
    recorded = f"recorded with megamind-ray {log.release or 'of an unknown release'}"
    if difference is None:
        num = sum(len(entry.instructions) for entry in log.entries)
        answer = f"gives the same {num} instructions to {len(log.entries)} events"
        return f"the same: megamind-ray {release} {answer} ({recorded})"
    said = "; ".join(map(_in_words, difference.replayed)) or "nothing"
    was = "; ".join(map(_in_words, difference.entry.instructions)) or "nothing"
    return (
        f"different: at {difference.entry.at_s:.3f} s (line {difference.line}) to {_in_words(difference.entry.event)}\n"
        f"  recorded: {was}\n  megamind-ray {release}: {said} ({recorded})"
    )


def _document(log: EventLog, difference: Difference | None, release: str) -> dict[str, Any]:
    from megamind_ray.core.event_log import as_document

    return {
        "load": log.load,
        "recorded_with": log.release,
        "replayed_with": release,
        "same": difference is None,
        "events": [as_document(entry) for entry in log.entries],
        "difference": None
        if difference is None
        else {"line": difference.line, "replayed": as_document(difference.replayed)},
    }
