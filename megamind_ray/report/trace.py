"""Timelines as trace events in JSON, which ui.perfetto.dev and chrome://tracing open (docs/design/0019).

The format is Chrome's "Trace Event Format": complete events (``X``), counters (``C``), instants (``i``), metadata
(``M``); times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from megamind_ray.core.timeline import Timeline
from megamind_ray.report.terminal import printable
from megamind_ray.report.timeline_layout import KINDS, Curve, Track, curves_of, lanes_of, tracks_of
from megamind_ray.units import format_bytes, format_rate

__all__ = ["perfetto"]

Event = dict[str, Any]
_MARKS_THREAD: Final = 1


def perfetto(*timelines: Timeline, name: str) -> dict[str, Any]:
    """A trace of one timeline, or of several one below the other.

    A node or a rank is a process and a track a thread. A thread can only show spans that do not overlap, so a track
    whose spans do is laid out on several of them, as few as possible. Times are kept to the nanosecond.

    Args:
        timelines: Measured and predicted ones; each gets processes of its own.
        name: Of the model or the load.

    Returns:
        A document for ``json.dump``.
    """
    events: list[Event] = []
    for position, timeline in enumerate(timelines):
        title = f"{timeline.origin}: " if len(timelines) > 1 else ""
        events.extend(_Group(title, printable(name), first_pid=len(events) + 1, order=position).events(timeline))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "name": printable(name),
            "origins": [timeline.origin for timeline in timelines],
            "dropped_spans": sum(timeline.dropped_spans for timeline in timelines),
        },
    }


class _Group:
    """The processes of one timeline.

    Args:
        title: Put before the name of each process.
        name: Of the load.
        first_pid: Ids count from there; larger than any before, since each process has an event that names it.
        order: Which timeline it is.
    """

    def __init__(self, title: str, name: str, *, first_pid: int, order: int) -> None:
        self._title = title
        self._name = name
        self._first_pid = first_pid
        self._order = order
        self._pids: dict[str, int] = {}

    def events(self, timeline: Timeline) -> Iterator[Event]:
        yield from self._process(self._name)
        if timeline.marks:
            yield from self._marks(timeline)
        next_tid: dict[int, int] = {}
        for track in tracks_of(timeline):
            process, thread = _place(track.name)
            yield from self._process(process)
            pid = self._pids[process]
            tid = next_tid.get(pid, _MARKS_THREAD) + 1
            lanes = lanes_of(_ns(track.begin_s), _ns(track.end_s))
            next_tid[pid] = tid + int(lanes.max())
            yield from _threads(pid, tid, int(lanes.max()) + 1, thread)
            yield from _spans(track, lanes.tolist(), pid, tid)
        end_s = timeline.end_s
        for curve in curves_of(timeline):
            process, counter = _place(curve.place)
            yield from self._process(process)
            yield from _counters(curve, self._pids[process], counter, end_s)

    def _process(self, process: str) -> Iterator[Event]:
        """What names a process, the first time it is asked for."""
        if process in self._pids:
            return
        pid = self._pids[process] = self._first_pid + len(self._pids)
        yield _meta("process_name", pid, {"name": self._title + printable(process)})
        yield _meta("process_sort_index", pid, {"sort_index": (self._order << 20) + len(self._pids)})

    def _marks(self, timeline: Timeline) -> Iterator[Event]:
        pid = self._pids[self._name]
        yield _meta("thread_name", pid, {"name": "faults and events"}, _MARKS_THREAD)
        for mark in timeline.marks:
            yield {
                "ph": "i",
                "s": "t",
                "name": printable(mark.kind),
                "cat": "mark",
                "ts": round(mark.at_s * 1e9) / 1e3,
                "pid": pid,
                "tid": _MARKS_THREAD,
                "args": {"text": printable(mark.text)},
            }


def _place(name: str) -> tuple[str, str]:
    """Process and thread, or counter, of a track: ``n0/wire`` -> ``n0``, ``wire``; ``rank 3`` is both."""
    process, _, thread = name.partition("/")
    return process, thread or process


def _threads(pid: int, first_tid: int, num_lanes: int, name: str) -> Iterator[Event]:
    for lane in range(num_lanes):
        text = printable(name) + (f" ({lane + 1})" if num_lanes > 1 else "")
        yield _meta("thread_name", pid, {"name": text}, first_tid + lane)
        yield _meta("thread_sort_index", pid, {"sort_index": first_tid + lane}, first_tid + lane)


def _spans(track: Track, lanes: Sequence[int], pid: int, first_tid: int) -> Iterator[Event]:
    rows = zip(track.kind, _ns(track.begin_s), _ns(track.end_s), track.nbytes.tolist(), track.label, lanes, strict=True)
    for kind, begin_ns, end_ns, nbytes, label, lane in rows:
        args: Event = {"bytes": nbytes}
        if nbytes:
            args["size"] = format_bytes(nbytes)
        if nbytes and end_ns > begin_ns:
            args["rate"] = format_rate(nbytes * 1e9 / (end_ns - begin_ns))
        yield {
            "ph": "X",
            "name": f"{KINDS[kind]} {printable(label)}".strip(),
            "cat": KINDS[kind],
            "ts": begin_ns / 1e3,
            "dur": (end_ns - begin_ns) / 1e3,
            "pid": pid,
            "tid": first_tid + lane,
            "args": args,
        }


def _counters(curve: Curve, pid: int, name: str, end_s: float) -> Iterator[Event]:
    title = f"{printable(name)} {printable(curve.unit)}"
    if curve.limit is not None:
        # The limit is in the name: as a counter of its own it would be drawn to another scale.
        title += f" (at most {_amount(curve.unit, curve.limit)})"
    values = list(zip(curve.at_s.tolist(), curve.value.tolist(), strict=True))
    if values[-1][0] < end_s:
        # A viewer draws a counter up to its last event.
        values.append((end_s, values[-1][1]))
    for at_s, value in values:
        event: Event = {"ph": "C", "name": title, "ts": round(at_s * 1e9) / 1e3, "pid": pid, "args": {"value": value}}
        yield event


def _amount(unit: str, value: float) -> str:
    if unit == "bytes/s":
        return format_rate(value)
    return format_bytes(value) if unit == "bytes" else f"{value:,.6g}"


def _ns(seconds: Any) -> list[int]:
    # Whole numbers, since lanes must not overlap after rounding either.
    return [round(second * 1e9) for second in seconds.tolist()]


def _meta(kind: str, pid: int, args: Event, tid: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
