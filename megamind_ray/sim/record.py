"""What was done when, in columns: a simulation of a large load has hundreds of thousands of spans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megamind_ray.core.timeline import Mark, SpanKind, Timeline

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
        """All of it; of more spans than ``max_spans`` the longest."""
        track, kind, begin_s, end_s, nbytes, extent = _columns(self._rows, 6)
        begins, ends = np.array(begin_s, np.float64), np.array(end_s, np.float64)
        kept = np.arange(len(begins))
        if len(kept) > max_spans:
            kept = np.argsort(begins - ends, kind="stable")[:max_spans]
        kept = kept[np.lexsort((ends[kept], begins[kept]))]
        kinds = sorted(set(kind))
        kind_number = {name: number for number, name in enumerate(kinds)}
        extents = np.array(extent, np.int64)[kept]
        labels = sorted(set(extents.tolist()))
        empty = Timeline.of("predicted", ())
        spans = pa.table(
            {
                "track": _words(np.array(track, np.int64)[kept], list(self._numbers)),
                "kind": _words(np.array([kind_number[name] for name in kind], np.int64)[kept], kinds),
                "begin_s": begins[kept],
                "end_s": ends[kept],
                "nbytes": np.array(nbytes, np.int64)[kept],
                "label": _words(
                    np.searchsorted(labels, extents), [f"extent {label}" if label >= 0 else "" for label in labels]
                ),
            },
            empty.spans.schema,
        )
        return Timeline(
            origin="predicted",
            spans=spans,
            samples=_samples(samples, empty.samples.schema),
            marks=tuple(sorted(self.marks, key=lambda mark: mark.at_s)),
            limits=dict(limits),
            dropped_spans=len(begins) - len(kept),
        )


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
