"""What was recorded of a load, put together: one timeline with rates, bytes on devices and marks, and the event log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import EventLog
from megamind_ray.core.recorder import Recorded, SpanRow
from megamind_ray.core.timeline import Mark, Sample, Span, Timeline
from megamind_ray.core.tracks import NodeTracks, device_series, rank_track, short_node

__all__ = ["LoadRecord", "RawRecord", "measured_timeline"]

_NUM_WINDOWS: Final = 200
_MIN_WINDOW_S: Final = 0.01

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """What is left of a recorded load beside its report.

    Attributes:
        timeline: What happened when.
        events: What its machine decided; None if it ended before it had one (its request was wrong).
    """

    timeline: Timeline
    events: EventLog | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """The parts of a record, as they were collected.

    Attributes:
        parts: What each process recorded.
        events: Of the load's machine.
        node_of_rank: Where each rank ran.
        limits: By series.
    """

    parts: tuple[Recorded, ...] = ()
    events: EventLog | None = None
    node_of_rank: Mapping[int, str] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    def assembled(self) -> LoadRecord:
        """Puts the parts together."""
        timeline = measured_timeline(self.parts, events=self.events, node_of_rank=self.node_of_rank, limits=self.limits)
        return LoadRecord(timeline=timeline, events=self.events)


def measured_timeline(
    parts: Iterable[Recorded],
    *,
    events: EventLog | None = None,
    node_of_rank: Mapping[int, str],
    limits: Mapping[str, float] | None = None,
) -> Timeline:
    """One timeline of what several processes recorded.

    Beside what they recorded it has, for each node, the rate at which its agent and its ranks read, for each rank the
    bytes that are on its device, and marks for what the load machine was told and did.

    Args:
        parts: What each process recorded.
        events: Of the load's machine.
        node_of_rank: Where each rank ran.
        limits: By series, see ``Timeline``.
    """
    pages = list(parts)
    spans = [row for page in pages for row in page.spans]
    samples = [Sample(series=row[0], at_s=row[1], value=row[2]) for page in pages for row in page.samples]
    marks = [Mark(at_s=row[0], kind=row[1], text=row[2]) for page in pages for row in page.marks]
    by_track: dict[str, list[SpanRow]] = {}
    for row in spans:
        by_track.setdefault(row[0], []).append(row)
    return Timeline.of(
        "measured",
        (
            Span(track=track, kind=kind, begin_s=begin_s, end_s=end_s, nbytes=nbytes, label=label)
            for track, kind, begin_s, end_s, nbytes, label in spans
        ),
        [*samples, *_device_bytes(by_track, node_of_rank), *_read_rates(by_track, node_of_rank)],
        marks=[*marks, *(_marks_of(events) if events is not None else ())],
        limits=limits,
        dropped_spans=sum(page.dropped_spans for page in pages),
    )


def _device_bytes(by_track: Mapping[str, Sequence[SpanRow]], ranks: Iterable[int]) -> Iterable[Sample]:
    for rank in ranks:
        copies = sorted(
            ((end_s, nbytes) for _, kind, _, end_s, nbytes, _ in by_track.get(rank_track(rank), ()) if kind == "copy")
        )
        arrived = 0
        for end_s, nbytes in copies:
            arrived += nbytes
            yield Sample(series=device_series(rank), at_s=end_s, value=arrived)


def _read_rates(by_track: Mapping[str, Sequence[SpanRow]], node_of_rank: Mapping[int, str]) -> Iterable[Sample]:
    """By node, how fast storage was read: by its agent, and by its ranks themselves."""
    homes = {rank_track(rank): short_node(node) for rank, node in node_of_rank.items()}
    readers = {track.removesuffix("/storage") for track in by_track if track.endswith("/storage")}
    for node in sorted({*homes.values(), *readers}):
        tracks = NodeTracks.of(node)
        names = [tracks.storage, *(track for track, home in homes.items() if home == node)]
        reads = [row for name in names for row in by_track.get(name, ()) if row[1] == "read"]
        if reads:
            yield from _rates(tracks.storage_rate, reads)


def _rates(series: str, reads: Sequence[SpanRow]) -> Iterable[Sample]:
    """Bytes of spans, spread evenly over their time, per second of each of some windows of equal length."""
    begin_s = np.array([row[2] for row in reads])
    end_s = np.maximum(begin_s, [row[3] for row in reads])
    nbytes = np.array([row[4] for row in reads], np.float64)
    first, last = float(begin_s.min()), float(end_s.max())
    num_windows = int(np.clip((last - first) / _MIN_WINDOW_S, 1, _NUM_WINDOWS))
    # Not shorter than the least window, also where all was read in one moment.
    edges = np.linspace(first, max(last, first + _MIN_WINDOW_S), num_windows + 1)
    lasts = end_s - begin_s
    arrived = [_arrived(edge, begin_s, lasts, nbytes) for edge in edges.tolist()]
    # What came in one moment at the very end belongs to the last window.
    arrived[-1] = float(nbytes.sum())
    rates = np.diff([0.0, *arrived[1:]]) / np.diff(edges)
    for at_s, rate in zip(edges.tolist(), [*rates.tolist(), 0.0], strict=True):
        yield Sample(series=series, at_s=at_s, value=rate)


def _arrived(at_s: float, begin_s: Floats, lasts_s: Floats, nbytes: Floats) -> float:
    """Bytes that had come by then."""
    with np.errstate(over="ignore"):  # of a span that lasts next to nothing: it is over, or has not begun
        part = np.divide(at_s - begin_s, lasts_s, out=(at_s > begin_s).astype(np.float64), where=lasts_s > 0)
    return float((np.clip(part, 0.0, 1.0) * nbytes).sum())


def _marks_of(log: EventLog) -> Iterable[Mark]:
    for entry in log.entries:
        if isinstance(entry.event, ev.RankDone):
            yield Mark(at_s=entry.at_s, kind="rank_done", text=rank_track(entry.event.rank))
        for instruction in entry.instructions:
            if isinstance(instruction, ins.RecordFault):
                fault = instruction.fault
                yield Mark(at_s=entry.at_s, kind=fault.kind, text=f"{fault.where}; {fault.action}")
            elif isinstance(instruction, ins.AbortLoad):
                yield Mark(at_s=entry.at_s, kind="load_failed", text=instruction.error.message)
