"""What was done when, in columns: a simulation of a large load has hundreds of thousands of spans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.timeline import Mark, SpanKind, Timeline
from megamind_ray.sim.shares import FloatArray

__all__ = ["Recorder"]


class Recorder:
    """Spans, and the seconds of each kind by track."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        # One row each: number of the track, kind, begin, end, bytes, extent.
        self._rows: list[tuple[int, str, float, float, int, int]] = []
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.marks: list[Mark] = []

    def span(self, track: str, kind: SpanKind, begin_s: float, end_s: float, nbytes: int, extent: int = -1) -> None:
        """A piece of work.

        Args:
            track: Who did it.
            kind: What.
            begin_s: When it began.
            end_s: When it ended.
            nbytes: Bytes moved or looked at.
            extent: What it was about; -1 for nothing in particular.
        """
        end_s = max(begin_s, end_s)
        number = self._numbers.setdefault(track, len(self._numbers))
        self._rows.append((number, kind, begin_s, end_s, nbytes, extent))
        self.seconds[track, kind] += end_s - begin_s

    def timeline(
        self,
        samples: Mapping[str, Iterable[tuple[float, float]]],
        limits: Mapping[str, float],
        *,
        max_spans: int,
    ) -> Timeline:
        """All of it; of more spans than ``max_spans`` neighbours of a track and a kind are joined, bytes added up."""
        track, kind, begin_s, end_s, nbytes, extent = _columns(self._rows, 6)
        kinds = sorted(set(kind))
        kind_number = {name: number for number, name in enumerate(kinds)}
        spans = _Spans(
            track=np.array(track, np.int64),
            kind=np.array([kind_number[name] for name in kind], np.int64),
            begin_s=np.array(begin_s, np.float64),
            end_s=np.array(end_s, np.float64),
            nbytes=np.array(nbytes, np.int64),
            extent=np.array(extent, np.int64),
        ).joined(max_spans)
        labels = sorted(set(spans.extent.tolist()))
        empty = Timeline.of("predicted", ())
        table = pa.table(
            {
                "track": _words(spans.track, list(self._numbers)),
                "kind": _words(spans.kind, kinds),
                "begin_s": spans.begin_s,
                "end_s": spans.end_s,
                "nbytes": spans.nbytes,
                "label": _words(
                    np.searchsorted(labels, spans.extent), [f"extent {label}" if label >= 0 else "" for label in labels]
                ),
            },
            empty.spans.schema,
        )
        return Timeline(
            origin="predicted",
            spans=table,
            samples=_samples(samples, empty.samples.schema),
            marks=tuple(sorted(self.marks, key=lambda mark: mark.at_s)),
            limits=dict(limits),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """Columns, one row per span."""

    track: Int64Array
    kind: Int64Array
    begin_s: FloatArray
    end_s: FloatArray
    nbytes: Int64Array
    extent: Int64Array

    def joined(self, most: int) -> _Spans:
        """By begin; of more than ``most`` rows, as many consecutive ones of a track and a kind are one as it takes."""
        if len(self.track) > most:
            return self._joined(-(-len(self.track) // most))
        return self._rows(np.lexsort((self.end_s, self.begin_s)))

    def _joined(self, step: int) -> _Spans:
        ordered = self._rows(np.lexsort((self.begin_s, self.kind, self.track)))
        fresh = np.ones(len(ordered.track), np.bool_)
        fresh[1:] = (np.diff(ordered.track) != 0) | (np.diff(ordered.kind) != 0)
        start = np.flatnonzero(fresh)
        within = np.arange(len(fresh)) - np.repeat(start, np.diff(np.append(start, len(fresh))))
        first = np.flatnonzero(within % step == 0)
        return _Spans(
            track=ordered.track[first],
            kind=ordered.kind[first],
            begin_s=np.minimum.reduceat(ordered.begin_s, first),
            end_s=np.maximum.reduceat(ordered.end_s, first),
            nbytes=np.add.reduceat(ordered.nbytes, first),
            extent=ordered.extent[first],
        ).joined(len(first))

    def _rows(self, order: npt.NDArray[np.intp]) -> _Spans:
        return _Spans(**{item.name: getattr(self, item.name)[order] for item in fields(self)})


def _samples(samples: Mapping[str, Iterable[tuple[float, float]]], schema: pa.Schema) -> pa.Table:
    names = sorted(samples)
    rows = [(number, at_s, value) for number, name in enumerate(names) for at_s, value in samples[name]]
    numbers, times, values = _columns(rows, 3)
    return pa.table(
        {
            "series": _words(np.array(numbers, np.int64), names),
            "at_s": np.array(times, np.float64),
            "value": np.array(values, np.float64),
        },
        schema,
    )


def _words(numbers: npt.NDArray[np.integer[Any]], words: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32)), pa.array(words, pa.string()))


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]
