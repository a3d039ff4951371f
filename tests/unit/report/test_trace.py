"""A trace is what the viewers' format allows, and has all that the timeline has."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from megamind_ray.core.timeline import Mark, Sample, Span, Timeline
from megamind_ray.report.trace import perfetto
from megamind_ray.testing.timelines import made_up_load

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return made_up_load().timeline


@pytest.fixture(scope="module")
def events(timeline: Timeline) -> Events:
    return list(perfetto(timeline, name="tiny")["traceEvents"])


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def test_every_event_has_the_fields_of_its_phase(events: Events) -> None:
    needed = {
        "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
        "C": {"name", "ts", "pid", "args"},
        "i": {"name", "ts", "pid", "tid", "s"},
        "M": {"name", "pid", "tid", "args"},
    }
    for event in events:
        assert needed[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    assert {event["ph"] for event in events} == set(needed)


def test_spans_of_a_thread_never_overlap(events: Events) -> None:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))

    for spans in threads.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_all_spans_and_all_bytes_are_there(events: Events, timeline: Timeline) -> None:
    spans = [event for event in events if event["ph"] == "X"]

    assert len(spans) == len(timeline.spans)
    assert sum(event["args"]["bytes"] for event in spans) == sum(timeline.spans["nbytes"].to_pylist())


def test_every_process_and_every_thread_has_a_name(events: Events) -> None:
    named = {
        (event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else 0)
        for event in events
        if event["ph"] == "M"
    }

    for event in events:
        assert ("process_name", event["pid"], 0) in named
        if event["ph"] in "Xi":
            assert ("thread_name", event["pid"], event["tid"]) in named


def test_a_node_is_a_process_and_a_track_as_many_threads_as_it_needs() -> None:
    spans = [Span(track="n0/storage", kind="read", begin_s=begin, end_s=begin + 1) for begin in (0, 0.5, 1.0)]

    events = perfetto(Timeline.of("measured", spans), name="tiny")["traceEvents"]

    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"tiny", "n0"}
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["storage (1)", "storage (2)"]


def test_spans_that_touch_share_a_thread_after_rounding_too() -> None:
    third = 1 / 3
    spans = [Span(track="rank 0", kind="copy", begin_s=i * third, end_s=(i + 1) * third) for i in range(30)]

    events = perfetto(Timeline.of("measured", spans), name="tiny")["traceEvents"]

    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 1


def test_a_series_is_a_counter_that_lasts_until_the_end() -> None:
    spans = [Span(track="n0/pool", kind="put", begin_s=0, end_s=2)]
    samples = [Sample(series="bytes n0/host", at_s=0.5, value=10), Sample(series="bytes n0/host", at_s=1, value=5)]
    timeline = Timeline.of("measured", spans, samples, limits={"bytes n0/host": 2048})

    counters = [e for e in perfetto(timeline, name="tiny")["traceEvents"] if e["ph"] == "C"]

    assert {event["name"] for event in counters} == {"host bytes (at most 2.00 KiB)"}
    assert [(event["ts"], event["args"]["value"]) for event in counters] == [(0.5e6, 10), (1e6, 5), (2e6, 5)]


def test_marks_are_instants() -> None:
    marks = [Mark(at_s=0.25, kind="worker_lost", text="rank 3")]

    events = perfetto(Timeline.of("measured", [], marks=marks), name="tiny")["traceEvents"]

    (instant,) = [event for event in events if event["ph"] == "i"]
    assert (instant["name"], instant["ts"], instant["args"]["text"]) == ("worker_lost", 250_000, "rank 3")


def test_two_timelines_are_two_groups_of_processes() -> None:
    measured, predicted = made_up_load().timeline, made_up_load(origin="predicted").timeline

    trace = perfetto(measured, predicted, name="tiny")

    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "process_sort_index"}
    assert trace["otherData"]["origins"] == ["measured", "predicted"]
    assert len(names) == len(set(names.values()))
    assert "measured: n0" in names.values()
    assert "predicted: n0" in names.values()
    last_measured = max(order[pid] for pid, name in names.items() if name.startswith("measured"))
    assert all(order[pid] > last_measured for pid, name in names.items() if name.startswith("predicted"))


def test_a_trace_is_plain_json(timeline: Timeline) -> None:
    trace = perfetto(timeline, name="tiny")

    assert json.loads(json.dumps(trace, allow_nan=False)) == trace


def test_control_characters_of_names_are_written_out() -> None:
    spans = [Span(track="n\x1b[2J/storage", kind="read", begin_s=0, end_s=1, label="a\u202eb")]

    text = json.dumps(perfetto(Timeline.of("measured", spans), name="x\x00y"), ensure_ascii=False)

    assert all(letter.isprintable() for letter in text)
    assert r"\\u202e" in text
