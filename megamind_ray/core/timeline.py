"""What happened when, in a load or a simulation: spans of work, values over time, faults. Pure data; see ``report``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import numpy as np
import pyarrow as pa

from megamind_ray.core.field_types import require_field_types
from megamind_ray.errors import RequestError

__all__ = ["SCHEMA", "Mark", "Sample", "Span", "SpanKind", "Timeline"]

SCHEMA = "megamind.timeline/1"
SpanKind = Literal["manifest", "plan", "read", "verify", "cut", "put", "wire", "copy", "wait", "other"]
_MAX_NUMBER = 1e18  # seconds, bytes or bytes/s; a file with more of them was not written by a recorder

_WORD = pa.dictionary(pa.int32(), pa.string())
_SPANS = pa.schema(
    [
        ("track", _WORD),
        ("kind", _WORD),
        ("begin_s", pa.float64()),
        ("end_s", pa.float64()),
        ("nbytes", pa.int64()),
        ("label", _WORD),
    ]
)
_SAMPLES = pa.schema([("series", _WORD), ("at_s", pa.float64()), ("value", pa.float64())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of work.

    Attributes:
        track: Who or what was busy: ``n0/storage``, ``n0/wire``, ``n0/pool``, ``rank 3``. One line of a Gantt chart;
            spans of a track may overlap, since several threads work at a time.
        kind: What was done.
        begin_s: Seconds after the start of the load.
        end_s: As ``begin_s``.
        nbytes: Bytes moved or looked at.
        label: For people: a file, an extent, a block.
    """

    track: str
    kind: SpanKind
    begin_s: float
    end_s: float
    nbytes: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A value from ``at_s`` on, until the next sample of its series.

    Attributes:
        series: ``bytes/s n0/storage``, ``bytes n0/host``, ``bytes rank 3/device``: unit, then place.
        at_s: Seconds after the start of the load.
        value: In the unit that the series names.
    """

    series: str
    at_s: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at one moment: a fault, a rank that is done."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What happened when.

    Attributes:
        origin: ``measured`` or ``predicted``.
        spans: Table with the columns of ``Span``.
        samples: Table with the columns of ``Sample``, ascending in ``at_s`` within a series.
        marks: Ascending in ``at_s``.
        limits: By series, what it can be at most (the rate of a disk, the size of a pool).
        dropped_spans: Spans that were not kept, since a recorder's room was full.
    """

    origin: Literal["measured", "predicted"]
    spans: pa.Table
    samples: pa.Table
    marks: tuple[Mark, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    dropped_spans: int = 0

    @classmethod
    def of(
        cls,
        origin: Literal["measured", "predicted"],
        spans: Iterable[Span],
        samples: Iterable[Sample] = (),
        *,
        marks: Sequence[Mark] = (),
        limits: Mapping[str, float] | None = None,
        dropped_spans: int = 0,
    ) -> Self:
        """From rows; they are sorted by time."""
        ordered = sorted(spans, key=lambda span: (span.begin_s, span.end_s))
        values = sorted(samples, key=lambda sample: (sample.series, sample.at_s))
        return cls(
            origin=origin,
            spans=_table(ordered, _SPANS),
            samples=_table(values, _SAMPLES),
            marks=tuple(sorted(marks, key=lambda mark: mark.at_s)),
            limits=dict(limits or {}),
            dropped_spans=dropped_spans,
        )

    @property
    def end_s(self) -> float:
        """When the last span ends; 0 where there is none."""
        ends: list[float] = self.spans["end_s"].to_pylist()
        return max(ends, default=0.0)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, column by column."""
        return {
            "schema": SCHEMA,
            "origin": self.origin,
            "spans": self.spans.to_pydict(),
            "samples": self.samples.to_pydict(),
            "marks": [{"at_s": mark.at_s, "kind": mark.kind, "text": mark.text} for mark in self.marks],
            "limits": dict(self.limits),
            "dropped_spans": self.dropped_spans,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Reads ``to_json``'s output.

        Raises:
            RequestError: The document is not a timeline of this schema.
        """
        schema = document.get("schema") if isinstance(document, Mapping) else None
        if schema != SCHEMA:
            raise RequestError(f"timeline schema {schema!r:.80}; this release reads {SCHEMA!r}")
        try:
            spans = pa.table(document["spans"], _SPANS)
            if unknown := set(spans["kind"].to_pylist()) - set(get_args(SpanKind)):
                raise ValueError(f"kinds of spans {sorted(unknown)}")
            samples = pa.table(document["samples"], _SAMPLES)
            _require_numbers(spans, samples)
            timeline = cls(
                origin=document["origin"],
                spans=spans,
                samples=samples,
                marks=tuple(Mark(**mark) for mark in document["marks"]),
                limits=dict(document["limits"]),
                dropped_spans=document["dropped_spans"],
            )
            require_field_types(timeline, ignored=frozenset({"spans", "samples"}))
            return timeline
        except (KeyError, TypeError, ValueError, OverflowError, pa.ArrowException) as error:
            raise RequestError(f"timeline of schema {SCHEMA!r} is incomplete or malformed: {error}") from error


def _require_numbers(*tables: pa.Table) -> None:
    """Every cell is there, and every number is finite and not beyond any load."""
    for table in tables:
        for name, column in zip(table.column_names, table.columns, strict=True):
            if column.null_count:
                raise ValueError(f"{name} has empty places")
            # NaN is not below it either.
            if pa.types.is_floating(column.type) and not (np.abs(column.to_numpy()) < _MAX_NUMBER).all():
                raise ValueError(f"{name} has a number that no load has")


def _table(rows: Sequence[Span] | Sequence[Sample], schema: pa.Schema) -> pa.Table:
    return pa.table({name: [getattr(row, name) for row in rows] for name in schema.names}, schema)
