"""Whatever was recorded can be rendered, all three ways."""

from __future__ import annotations

import io
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megamind_ray.core.timeline import Mark, Sample, Span, Timeline
from megamind_ray.report.timeline_html import render
from megamind_ray.report.timeline_layout import KINDS
from megamind_ray.report.timeline_text import TimelineText
from megamind_ray.report.trace import perfetto
from megamind_ray.testing.timelines import made_up_load

REPORT = made_up_load(num_extents=2).report
NAMES = st.one_of(
    st.sampled_from(["n0/storage", "n0/wire", "n0/pool", "rank 0", "rank 10", "planner", ""]), st.text(max_size=12)
)
MOMENTS = st.one_of(st.just(0.0), st.floats(0, 1e4))
SPANS = st.builds(
    lambda track, kind, begin_s, length_s, nbytes, label: Span(
        track=track, kind=kind, begin_s=begin_s, end_s=begin_s + length_s, nbytes=nbytes, label=label
    ),
    NAMES,
    st.sampled_from(KINDS),
    MOMENTS,
    st.one_of(st.just(0.0), st.floats(1e-9, 1e3)),
    st.integers(0, 1 << 40),
    st.text(max_size=12),
)
SERIES = st.one_of(
    st.sampled_from(["bytes/s n0/storage", "bytes n0/host", "bytes rank 0/device", "credits n0", "bytes"]), NAMES
)
SAMPLES = st.builds(
    lambda series, at_s, value: Sample(series=series, at_s=at_s, value=value), SERIES, MOMENTS, st.floats(0, 1e15)
)
MARKS = st.builds(lambda at_s, kind, text: Mark(at_s=at_s, kind=kind, text=text), MOMENTS, NAMES, NAMES)
TIMELINES = st.builds(
    lambda spans, samples, marks, limits: Timeline.of("measured", spans, samples, marks=marks, limits=limits),
    st.lists(SPANS, max_size=12),
    st.lists(SAMPLES, max_size=8),
    st.lists(MARKS, max_size=4),
    st.dictionaries(SERIES, st.floats(0), max_size=3),
)


@given(TIMELINES, st.integers(1, 20))
@settings(max_examples=60)
def test_as_a_page(timeline: Timeline, max_spans: int) -> None:
    page = render(REPORT, [timeline], max_spans=max_spans)

    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    tracks = data["timelines"][0]["tracks"]
    assert sum(sum(track["bytes"]) for track in tracks) == sum(timeline.spans["nbytes"].to_pylist())
    page.encode()


@given(TIMELINES)
@settings(max_examples=60)
def test_as_a_trace(timeline: Timeline) -> None:
    trace = perfetto(timeline, name="any")

    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(timeline.spans)
    json.dumps(trace, allow_nan=False)


@given(TIMELINES, st.integers(30, 120))
@settings(max_examples=60)
def test_as_text(timeline: Timeline, width: int) -> None:
    stream = io.StringIO()

    Console(file=stream, width=width).print(TimelineText(timeline=timeline, report=REPORT))

    assert "measured timeline" in stream.getvalue()
