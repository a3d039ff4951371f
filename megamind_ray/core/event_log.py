"""The event log of a load: what its machine was told and what it said. Written as JSON lines, replayed, compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, Self, TypeVar, get_args

import numpy as np

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.field_types import type_hints
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadFacts, LoadMachine
from megamind_ray.core.node_loss import Lacking, Move, Spare
from megamind_ray.core.report import Fault
from megamind_ray.core.stragglers import ReaderPace
from megamind_ray.errors import (
    CapacityError,
    ClusterError,
    IntegrityError,
    MegamindError,
    RequestError,
    SourceError,
)

__all__ = ["SCHEMA", "Difference", "EventLog", "LogEntry", "as_document", "check", "replay"]

SCHEMA: Final = "megamind.events/1"
# A damaged number must not ask for all memory, nor be too long to print.
_MAX_RANKS: Final = 1 << 20
_MAX_INTEGER: Final = (1 << 63) - 1

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """An event that a load machine took.

    Attributes:
        at_s: Seconds after the start of the load.
        event: What happened.
        instructions: What the machine said to it, in order.
    """

    at_s: float
    event: ev.Event
    instructions: tuple[ins.Instruction, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLog:
    """All events of a load, in the order in which its machine took them.

    Attributes:
        facts: What the machine knew of the plan.
        entries: The events.
        load: Id of the load.
        release: Of this package, which wrote the log.
    """

    facts: LoadFacts
    entries: tuple[LogEntry, ...] = ()
    load: str = ""
    release: str = ""

    def to_jsonl(self) -> str:
        """As JSON lines: a header with the facts, then a line for each event."""
        header = {
            "schema": SCHEMA,
            "release": self.release,
            "load": self.load,
            "num_events": len(self.entries),
            "facts": _facts_document(self.facts),
        }
        lines = [header, *(as_document(entry) for entry in self.entries)]
        return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)

    @classmethod
    def from_jsonl(cls, text: str) -> Self:
        """Reads ``to_jsonl``'s output. Errors of this package come back with their class, text and fields.

        Raises:
            RequestError: It is damaged or no log of this schema; the message names the line.
        """
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        if not lines:
            raise RequestError(f"event log: it is empty; a log of schema {SCHEMA!r} begins with a line of facts")
        header = _line(1, lines[0], _header)
        facts: LoadFacts = header["facts"]
        entries = tuple(
            _line(number, line, lambda document: _entry(document, facts)) for number, line in enumerate(lines[1:], 2)
        )
        if len(entries) != header["num_events"]:
            raise RequestError(
                f"event log, line {len(lines)}: it ends after {len(entries)} of {header['num_events']} events; take a "
                "whole copy"
            )
        return cls(facts=facts, entries=entries, load=header["load"], release=header["release"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a replay first says something else than the log.

    Attributes:
        line: Of the log, counted from 1.
        entry: What was recorded there.
        replayed: What the machine of this release says to the same event.
    """

    line: int
    entry: LogEntry
    replayed: tuple[ins.Instruction, ...]


def replay(log: EventLog) -> list[ins.Instruction]:
    """What a fresh machine says to the events of a log, all in order."""
    machine = LoadMachine(log.facts)
    return [instruction for entry in log.entries for instruction in machine.handle(entry.event)]


def check(log: EventLog) -> Difference | None:
    """Replays a log; where that first gives other instructions than were recorded, or None."""
    machine = LoadMachine(log.facts)
    for line, entry in enumerate(log.entries, 2):
        replayed = tuple(machine.handle(entry.event))
        # As documents: errors are equal only to themselves.
        if as_document(replayed) != as_document(entry.instructions):
            return Difference(line=line, entry=entry, replayed=replayed)
    return None


def _line(number: int, line: str, read: Callable[[Any], Value]) -> Value:
    try:
        return read(json.loads(line, parse_constant=_no_constant))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise RequestError(f"event log, line {number}: {what}; this release reads {SCHEMA!r}") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


# Writing.


def as_document(value: object) -> Any:
    """An entry, an event, an instruction or several of them as plain JSON values."""
    if isinstance(value, MegamindError):
        cls = next(cls for cls in type(value).__mro__ if cls in _ERROR_FIELDS)
        known = {name: as_document(getattr(value, name)) for name in _ERROR_FIELDS[cls]}
        return {"type": cls.__name__, "message": value.message, **known}
    if isinstance(value, LogEntry):
        said = as_document(value.instructions)
        return {"at_s": value.at_s, "event": as_document(value.event), "instructions": said}
    if is_dataclass(value):
        content = {item.name: as_document(getattr(value, item.name)) for item in fields(value)}
        return content if isinstance(value, _PARTS) else {"type": type(value).__name__, **content}
    if isinstance(value, tuple):
        return [as_document(item) for item in value]
    if isinstance(value, np.integer):
        return int(value)  # a size that was computed with numpy
    return value


def _facts_document(facts: LoadFacts) -> dict[str, Any]:
    # Pairs: keys of JSON objects are text, and the order of extents is the order in which they are read again.
    return {
        "nodes": list(facts.nodes),
        "num_ranks": facts.num_ranks,
        "max_worker_restarts": facts.max_worker_restarts,
        "reader": [list(pair) for pair in facts.reader.items()],
        "consumers": [[extent, list(ranks)] for extent, ranks in facts.consumers.items()],
        "extent_bytes": [list(pair) for pair in facts.extent_bytes.items()],
        "home": list(facts.home),
        "arena_bytes": list(facts.arena_bytes),
        "line": list(facts.line),
        "readers": list(facts.readers),
        "spares": as_document(facts.spares),
    }


# Reading: nothing is believed, since a log comes from anywhere.


def _header(document: Any) -> dict[str, Any]:
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"schema is {schema!r:.80}")
    return {
        "release": _text(document["release"]),
        "load": _text(document["load"]),
        "num_events": _count(document["num_events"]),
        "facts": _facts(document["facts"]),
    }


def _facts(document: Any) -> LoadFacts:
    facts = LoadFacts(
        nodes=_nodes(document["nodes"]),
        num_ranks=_count(document["num_ranks"]),
        reader=_pairs(document["reader"], _extent, lambda node: NodeId(_text(node))),
        consumers=_pairs(document["consumers"], _extent, _ranks),
        extent_bytes=_pairs(document["extent_bytes"], _extent, _count),
        max_worker_restarts=_count(document["max_worker_restarts"]),
        # Logs of earlier releases lack these: there, a lost node ended the load.
        home=_nodes(document.get("home", [])),
        arena_bytes=tuple(_count(nbytes) for nbytes in _list(document.get("arena_bytes", []))),
        line=_nodes(document.get("line", [])),
        readers=_nodes(document.get("readers", [])),
        spares=tuple(_fields_of(Spare, spare) for spare in _list(document.get("spares", []))),
    )
    if facts.num_ranks > _MAX_RANKS:
        raise ValueError(f"{facts.num_ranks} ranks are too many")
    for extent in facts.reader:
        if extent not in facts.consumers:
            raise ValueError(f"nobody consumes extent {extent}")
    for extent, ranks in facts.consumers.items():
        if extent not in facts.extent_bytes:
            raise ValueError(f"the size of extent {extent} is missing")
        for rank in ranks:
            _require_rank(rank, facts)
    if facts.home and not len(facts.home) == len(facts.arena_bytes) == facts.num_ranks:
        raise ValueError(f"{len(facts.home)} nodes and {len(facts.arena_bytes)} arenas for {facts.num_ranks} ranks")
    return facts


def _entry(document: Any, facts: LoadFacts) -> LogEntry:
    event = _of(_EVENTS, document["event"])
    if hasattr(event, "rank"):
        _require_rank(event.rank, facts)
    if hasattr(event, "extent") and event.extent not in facts.consumers:
        raise ValueError(f"extent {event.extent} is not in the facts")
    for extent in getattr(event, "extents", ()):
        if extent not in facts.reader:
            raise ValueError(f"extent {extent} is none that a node reads by the facts")
    for one in getattr(event, "lacking", ()):
        _require_rank(one.rank, facts)
    return LogEntry(
        at_s=_number(document["at_s"]),
        event=event,
        instructions=tuple(_of(_INSTRUCTIONS, said) for said in _list(document["instructions"])),
    )


def _require_rank(rank: int, facts: LoadFacts) -> None:
    if rank >= facts.num_ranks:
        raise ValueError(f"rank {rank} is not among the {facts.num_ranks} ranks of the facts")


def _of(kinds: Mapping[str, type], document: Any) -> Any:
    """An event or an instruction by its type."""
    if not isinstance(document, dict):
        raise _wrong(document, "an object")
    name = _text(document["type"])
    if name not in kinds:
        raise ValueError(f"type {name!r:.80} is not known")
    return _fields_of(kinds[name], document)


def _fields_of(cls: Any, document: Mapping[str, Any]) -> Any:
    return cls(**{name: _READERS[hint](document[name]) for name, hint in type_hints(cls).items()})


def _error(document: Any) -> MegamindError:
    if not isinstance(document, dict):
        raise _wrong(document, "an error")
    cls = next((cls for cls in _ERROR_FIELDS if cls.__name__ == document["type"]), None)
    if cls is None:
        raise ValueError(f"error {document['type']!r:.80} is not known")
    # Not by its constructor: the message is what it was, masked already.
    error = cls.__new__(cls)
    message = _text(document["message"])
    Exception.__init__(error, message)
    known = {name: read(document[name]) for name, read in _ERROR_FIELDS[cls].items()}
    error.__dict__.update(known, message=message)
    return error


def _wrong(value: object, what: str) -> ValueError:
    return ValueError(f"{value!r:.80} stands where {what} should")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(value, "text")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _MAX_INTEGER:
        raise _wrong(value, "a whole number")
    return value


def _count(value: Any) -> int:
    if _integer(value) < 0:
        raise _wrong(value, "a number of something")
    return int(value)


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _MAX_INTEGER:
        raise _wrong(value, "a number")
    return float(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, "true or false")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(value, "a list")
    return value


def _extent(value: Any) -> ExtentId:
    return ExtentId(_count(value))


def _ranks(value: Any) -> tuple[Rank, ...]:
    return tuple(Rank(_count(rank)) for rank in _list(value))


def _nodes(value: Any) -> tuple[NodeId, ...]:
    return tuple(NodeId(_text(node)) for node in _list(value))


def _parts_of(kind: type) -> Callable[[Any], Any]:
    """Reads several of what events and instructions consist of."""
    return lambda value: tuple(_fields_of(kind, part) for part in _list(value))


def _pairs(value: Any, key: Callable[[Any], Key], item: Callable[[Any], Value]) -> dict[Key, Value]:
    pairs = [(key(first), item(second)) for first, second in _list(value)]
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an extent stands there twice")
    return found


def _optional(read: Callable[[Any], Value]) -> Callable[[Any], Value | None]:
    return lambda value: None if value is None else read(value)


# What stands in others, where its type is known.
_PARTS: Final = (Fault, Move, Lacking, ReaderPace, Spare)
_EVENTS: Final[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(ev.Event)}
_INSTRUCTIONS: Final[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(ins.Instruction)}
_ERROR_FIELDS: Final[Mapping[type[MegamindError], Mapping[str, Callable[[Any], Any]]]] = {
    CapacityError: {"where": _text, "needed_bytes": _integer, "free_bytes": _integer},
    IntegrityError: {
        "file": _text,
        "tensor": _optional(_text),
        "begin": _optional(_integer),
        "end": _optional(_integer),
    },
    SourceError: {"file": _text, "attempts": _integer},
    RequestError: {},
    ClusterError: {},
    MegamindError: {},
}
# By the type of a field of an event, an instruction or a fault.
_READERS: Final[Mapping[Any, Callable[[Any], Any]]] = {
    str: _text,
    bool: _truth,
    int: _count,
    float: _number,
    float | None: _optional(_number),
    NodeId: _text,
    Rank: _count,
    Generation: _count,
    ExtentId: _count,
    tuple[Rank, ...]: _ranks,
    tuple[ExtentId, ...]: lambda value: tuple(_extent(extent) for extent in _list(value)),
    tuple[NodeId, ...]: _nodes,
    tuple[Move, ...]: _parts_of(Move),
    tuple[Lacking, ...]: _parts_of(Lacking),
    tuple[ReaderPace, ...]: _parts_of(ReaderPace),
    MegamindError: _error,
    Fault: lambda value: _fields_of(Fault, value),
}
