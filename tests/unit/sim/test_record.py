"""What a simulation records, where there is more of it than a timeline holds."""

from __future__ import annotations

import pytest

from megamind_ray.sim.record import Recorder


@pytest.fixture
def recorder() -> Recorder:
    """Long reads on one track, many short copies on another one."""
    found = Recorder()
    for number in range(10):
        found.span("n0/storage", "read", number, number + 1.0, 1000, number)
    for number in range(990):
        found.span("rank 0", "copy", number / 99, number / 99 + 0.001, 10, number)
        found.span("rank 0", "wait", number / 99 + 0.001, number / 99 + 0.002, 0)
    return found


def test_spans_are_in_order_of_their_begin(recorder: Recorder) -> None:
    timeline = recorder.timeline({}, {}, max_spans=10_000)

    begins = timeline.spans["begin_s"].to_pylist()
    assert begins == sorted(begins)
    assert len(begins) == 10 + 2 * 990
    assert timeline.dropped_spans == 0


def test_short_spans_are_joined_and_none_of_their_bytes_are_lost(recorder: Recorder) -> None:
    timeline = recorder.timeline({}, {}, max_spans=100)

    spans = timeline.spans.to_pylist()
    assert 0 < len(spans) <= 110  # the last of each track and kind may be of fewer
    assert sum(span["nbytes"] for span in spans if span["kind"] == "copy") == 990 * 10
    assert sum(span["nbytes"] for span in spans if span["kind"] == "read") == 10 * 1000
    assert {(span["track"], span["kind"]) for span in spans} == {
        ("n0/storage", "read"),
        ("rank 0", "copy"),
        ("rank 0", "wait"),
    }
    assert max(span["end_s"] for span in spans) == pytest.approx(989 / 99 + 0.002, abs=0.02)


def test_a_recorder_without_spans_has_an_empty_timeline() -> None:
    assert Recorder().timeline({}, {}, max_spans=10).end_s == 0
