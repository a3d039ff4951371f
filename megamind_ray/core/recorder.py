"""What one process records of a load: spans, samples, marks. Bounded, thread-safe, cheap; the clock is passed in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

from megamind_ray.core.timeline import SpanKind

__all__ = [
    "MAX_SPANS",
    "NO_RECORD",
    "MarkRow",
    "RecordSettings",
    "Recorded",
    "Recorder",
    "SampleRow",
    "SpanRow",
]

MAX_SPANS: Final = 20_000
_MAX_TOTAL_SPANS: Final = 200_000
_MIN_SPANS: Final = 64
_MAX_MARKS: Final = 1_000
_PAGE_ROWS: Final = 5_000
_SEVERAL: Final = "several"

# In the order of the fields of ``Span``, ``Sample`` and ``Mark``; making an object takes several times as long.
SpanRow: TypeAlias = tuple[str, SpanKind, float, float, int, str]
SampleRow: TypeAlias = tuple[str, float, float]
MarkRow: TypeAlias = tuple[float, str, str]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a recorder has, or a page of it.

    Attributes:
        spans, samples, marks: Rows.
        dropped_spans: Spans that were joined with a neighbour or dropped for want of room.
        next: Where the next page begins; None for the last one.
    """

    spans: tuple[SpanRow, ...] = ()
    samples: tuple[SampleRow, ...] = ()
    marks: tuple[MarkRow, ...] = ()
    dropped_spans: int = 0
    next: int | None = None


class Recorder:
    """Collects rows. Any thread may call it.

    At most ``max_spans`` spans are kept. When that many are there, neighbours of one track and kind are joined into one
    span from the first one's begin to the last one's end, with their bytes added up: in steps that double, until half
    of the room is free. So no byte is lost, and the resolution is the same from the beginning of the load to its end.
    Samples are thinned in the same way, to the largest value of each step.

    Args:
        clock: Seconds after the start of the load.
        max_spans: Most spans, and most samples, to keep.
    """

    def __init__(self, clock: Callable[[], float], *, max_spans: int = MAX_SPANS) -> None:
        assert max_spans >= 2, max_spans
        self.now = clock
        self._max_rows = max_spans
        self._lock = threading.Lock()
        self._spans: list[SpanRow] = []
        self._samples: list[SampleRow] = []
        self._marks: list[MarkRow] = []
        self._step_s = {"spans": 0.0, "samples": 0.0}
        self._num_dropped = 0
        self._closed = False

    def span(
        self,
        track: str,
        kind: SpanKind,
        begin_s: float,
        *,
        nbytes: int = 0,
        label: str = "",
        end_s: float | None = None,
    ) -> None:
        """Records a piece of work, see ``Span``.

        Args:
            track: Who or what was busy.
            kind: What was done.
            begin_s: What ``now`` said when it began.
            nbytes: Bytes moved or looked at.
            label: For people.
            end_s: When it ended; None for now.
        """
        row = (track, kind, begin_s, self.now() if end_s is None else end_s, nbytes, label)
        with self._lock:
            if self._closed:
                return
            self._spans.append(row)
            if len(self._spans) >= self._max_rows:
                self._thin_spans()

    def sample(self, series: str, value: float) -> None:
        """Records what a value is from now on, see ``Sample``."""
        row = (series, self.now(), value)
        with self._lock:
            if self._closed:
                return
            self._samples.append(row)
            if len(self._samples) >= self._max_rows:
                self._thin_samples()

    def mark(self, kind: str, text: str) -> None:
        """Records that something happened now. Marks beyond the first thousand are dropped."""
        row = (self.now(), kind, text)
        with self._lock:
            if not self._closed and len(self._marks) < _MAX_MARKS:
                self._marks.append(row)

    def page(self, first: int = 0, limit: int = _PAGE_ROWS) -> Recorded:
        """Ends the recording and gives up to ``limit`` rows of each sort from row ``first`` on."""
        with self._lock:
            self._closed = True
            end = first + limit
            longest = max(len(self._spans), len(self._samples), len(self._marks))
            return Recorded(
                spans=tuple(self._spans[first:end]),
                samples=tuple(self._samples[first:end]),
                marks=tuple(self._marks[first:end]),
                dropped_spans=self._num_dropped if first == 0 else 0,
                next=end if end < longest else None,
            )

    def _thin_spans(self) -> None:
        num_rows = len(self._spans)
        begin_s, end_s = min(row[2] for row in self._spans), max(row[3] for row in self._spans)
        self._spans, self._step_s["spans"] = _thinned(
            self._spans, _joined_spans, self._step_s["spans"], end_s - begin_s, self._max_rows
        )
        self._num_dropped += num_rows - len(self._spans)

    def _thin_samples(self) -> None:
        begin_s, end_s = min(row[1] for row in self._samples), max(row[1] for row in self._samples)
        self._samples, self._step_s["samples"] = _thinned(
            self._samples, _joined_samples, self._step_s["samples"], end_s - begin_s, self._max_rows
        )


class _NoRecorder(Recorder):
    """Takes everything and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)

    def span(
        self,
        track: str,
        kind: SpanKind,
        begin_s: float,
        *,
        nbytes: int = 0,
        label: str = "",
        end_s: float | None = None,
    ) -> None:
        pass

    def sample(self, series: str, value: float) -> None:
        pass

    def mark(self, kind: str, text: str) -> None:
        pass


NO_RECORD: Final[Recorder] = _NoRecorder()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """What the planner hands out to all that record a load.

    Attributes:
        started_at_s: When it began, in seconds of the planner's wall clock (``time.time``).
        max_spans: Room of each recorder.
    """

    started_at_s: float
    max_spans: int = MAX_SPANS

    def shared_by(self, num_processes: int) -> RecordSettings:
        """The same for many processes, so that all they record together stays small enough to send and to look at."""
        room = max(_MIN_SPANS, min(self.max_spans, _MAX_TOTAL_SPANS // max(1, num_processes)))
        return replace(self, max_spans=room)

    def recorder(self, *, wall: Callable[[], float], steps: Callable[[], float]) -> Recorder:
        """A recorder of this process.

        Args:
            wall: Wall clock in seconds (``time.time``). Looked at once: when it is set meanwhile, no span turns back.
            steps: Monotonic clock of fine steps (``time.perf_counter``).
        """
        origin_s = wall() - self.started_at_s - steps()
        return Recorder(lambda: origin_s + steps(), max_spans=self.max_spans)


def _thinned(
    rows: list[Row],
    join: Callable[[Iterable[Row], float], list[Row]],
    last_step_s: float,
    total_s: float,
    max_rows: int,
) -> tuple[list[Row], float]:
    """Joined until half of the room is free, and the step at which that was so."""
    step_s = max(last_step_s, total_s / max_rows)
    joined = join(rows, step_s)
    while len(joined) > max_rows // 2 and step_s < total_s:
        step_s *= 2
        joined = join(joined, step_s)
    # More tracks than room: what is left over goes.
    return joined[: max_rows // 2], step_s


def _joined_spans(rows: Iterable[SpanRow], step_s: float) -> list[SpanRow]:
    """Neighbours of one track and kind that together last no longer than a step, as one."""
    by_kind: dict[tuple[str, SpanKind], list[SpanRow]] = {}
    for row in rows:
        by_kind.setdefault((row[0], row[1]), []).append(row)
    joined: list[SpanRow] = []
    for (track, kind), group in by_kind.items():
        group.sort(key=lambda row: row[2])
        _, _, begin_s, end_s, nbytes, label = group[0]
        for row in group[1:]:
            if max(end_s, row[3]) - begin_s <= step_s:
                end_s, nbytes = max(end_s, row[3]), nbytes + row[4]
                label = label if label == row[5] else _SEVERAL
            else:
                joined.append((track, kind, begin_s, end_s, nbytes, label))
                _, _, begin_s, end_s, nbytes, label = row
        joined.append((track, kind, begin_s, end_s, nbytes, label))
    return joined


def _joined_samples(rows: Iterable[SampleRow], step_s: float) -> list[SampleRow]:
    """Of each step the largest value; the last one of a series stays, since it holds from then on."""
    by_series: dict[str, list[SampleRow]] = {}
    for row in rows:
        by_series.setdefault(row[0], []).append(row)
    joined: list[SampleRow] = []
    for series, group in by_series.items():
        group.sort(key=lambda row: row[1])
        kept: list[SampleRow] = []
        for row in group[:-1]:
            if kept and row[1] - kept[-1][1] <= step_s:
                kept[-1] = (series, kept[-1][1], max(kept[-1][2], row[2]))
            else:
                kept.append(row)
        joined += [*kept, group[-1]]
    return joined
