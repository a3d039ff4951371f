"""Parts of a record put together: what is derived from spans and events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import EventLog, LogEntry
from megamind_ray.core.ids import Generation, Rank
from megamind_ray.core.load_machine import LoadFacts
from megamind_ray.core.recorder import Recorded, SpanRow
from megamind_ray.core.recording import RawRecord, measured_timeline
from megamind_ray.core.report import Fault
from megamind_ray.core.timeline import Mark, Timeline
from megamind_ray.errors import ClusterError

RAY_ID = "ab12cd34" * 7


def series(timeline: Timeline, name: str) -> list[tuple[float, float]]:
    rows = timeline.samples.to_pylist()
    return [(row["at_s"], row["value"]) for row in rows if row["series"] == name]


def integral(points: list[tuple[float, float]]) -> float:
    return sum(value * (after - at) for (at, value), (after, _) in pairwise(points))


def read(track: str, begin_s: float, end_s: float, nbytes: int) -> SpanRow:
    return (track, "read", begin_s, end_s, nbytes, "a")


def test_pages_of_all_processes_are_one_timeline() -> None:
    pages = [
        Recorded(spans=(read("n0/storage", 1.0, 2.0, 8),), samples=(("bytes n0/host", 1.0, 8.0),), dropped_spans=2),
        Recorded(spans=(("rank 0", "copy", 0.0, 3.0, 8, "block 0"),), marks=((2.5, "chunk_retried", "a"),)),
    ]

    timeline = measured_timeline(pages, node_of_rank={0: "n0"}, limits={"bytes n0/host": 64.0})

    assert timeline.origin == "measured"
    assert timeline.spans["track"].to_pylist() == ["rank 0", "n0/storage"]
    assert timeline.marks == (Mark(at_s=2.5, kind="chunk_retried", text="a"),)
    assert series(timeline, "bytes n0/host") == [(1.0, 8.0)]
    assert (timeline.limits, timeline.dropped_spans) == ({"bytes n0/host": 64.0}, 2)
    assert Timeline.from_json(timeline.to_json()).to_json() == timeline.to_json()


def test_bytes_on_a_device_grow_with_each_copy_that_ends() -> None:
    spans: tuple[SpanRow, ...] = (
        ("rank 1", "copy", 0.0, 3.0, 5, ""),
        ("rank 1", "copy", 1.0, 2.0, 7, ""),
        ("rank 1", "wait", 0.0, 9.0, 0, ""),
    )

    timeline = measured_timeline([Recorded(spans=spans)], node_of_rank={0: "n0", 1: "n0"})

    assert series(timeline, "bytes rank 1/device") == [(2.0, 7.0), (3.0, 12.0)]
    assert series(timeline, "bytes rank 0/device") == []


def test_reads_of_a_nodes_agent_and_ranks_are_one_rate() -> None:
    spans = (read("ab12cd34/storage", 0.0, 1.0, 100), read("rank 0", 0.0, 1.0, 100), read("rank 1", 0.0, 1.0, 7))

    timeline = measured_timeline([Recorded(spans=spans)], node_of_rank={0: RAY_ID, 1: "other"})

    points = series(timeline, "bytes/s ab12cd34/storage")
    assert points[0][1] == pytest.approx(200.0)
    assert points[-1] == (1.0, 0.0)
    assert integral(points) == pytest.approx(200.0)
    assert integral(series(timeline, "bytes/s other/storage")) == pytest.approx(7.0)


def test_a_node_that_reads_for_others_has_a_rate_too() -> None:
    timeline = measured_timeline([Recorded(spans=(read("n9/storage", 0.0, 1.0, 5),))], node_of_rank={0: "n0"})

    assert integral(series(timeline, "bytes/s n9/storage")) == pytest.approx(5.0)


SPANS = st.lists(st.tuples(st.floats(-5, 100), st.floats(0, 20), st.integers(0, 1 << 40)), min_size=1, max_size=30)


@given(SPANS)
def test_the_rate_of_a_storage_adds_up_to_all_that_was_read(reads: list[tuple[float, float, int]]) -> None:
    """Also reads of one moment, and clocks that begin before the load."""
    spans = tuple(read("n0/storage", begin_s, begin_s + lasts_s, nbytes) for begin_s, lasts_s, nbytes in reads)

    points = series(measured_timeline([Recorded(spans=spans)], node_of_rank={}), "bytes/s n0/storage")

    assert integral(points) == pytest.approx(sum(nbytes for _, _, nbytes in reads), rel=1e-6, abs=1e-3)
    assert all(value >= 0 for _, value in points)
    assert len(points) <= 201


def test_events_leave_marks_of_ranks_that_are_done_faults_and_the_end() -> None:
    facts = LoadFacts(nodes=(), num_ranks=1, reader={}, consumers={}, extent_bytes={})
    fault = Fault(kind="worker_lost", where="rank 0", action="replaced")
    entries = (
        LogEntry(at_s=0.1, event=ev.LoadStarted()),
        LogEntry(
            at_s=1.0,
            event=ev.WorkerLost(rank=Rank(0), generation=Generation(0), reason="ended"),
            instructions=(ins.RecordFault(fault=fault),),
        ),
        LogEntry(at_s=2.0, event=ev.RankDone(rank=Rank(0), generation=Generation(1))),
        LogEntry(
            at_s=3.0,
            event=ev.CancelRequested(reason="no"),
            instructions=(ins.AbortLoad(error=ClusterError("cancelled")),),
        ),
    )
    record = RawRecord(events=EventLog(facts=facts, entries=entries)).assembled()

    assert record.timeline.marks == (
        Mark(at_s=1.0, kind="worker_lost", text="rank 0; replaced"),
        Mark(at_s=2.0, kind="rank_done", text="rank 0"),
        Mark(at_s=3.0, kind="load_failed", text="cancelled"),
    )


def test_a_load_that_never_came_to_a_plan_has_its_phases_and_no_events() -> None:
    phase: SpanRow = ("planner", "manifest", 0.0, 1.0, 0, "manifest")

    record = RawRecord(parts=(Recorded(spans=(phase,)),)).assembled()

    assert record.events is None
    assert record.timeline.spans["track"].to_pylist() == ["planner"]
