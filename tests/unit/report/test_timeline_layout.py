"""Laying out: what is drawn adds up to what was recorded."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.timeline import Sample, Span, Timeline
from megamind_ray.report.timeline_layout import (
    Curve,
    binned,
    busy_share,
    curves_of,
    lanes_of,
    natural_key,
    spread,
    sum_of,
    thinned,
    tracks_of,
)

RANGES = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=40
)


def curve(at: list[float], value: list[float], *, unit: str = "bytes/s", limit: float | None = None) -> Curve:
    return Curve(unit=unit, place="n0/storage", group="storage", at_s=np.array(at), value=np.array(value), limit=limit)


@given(RANGES)
def test_spans_of_a_lane_never_overlap_and_no_lane_is_wasted(ranges: list[tuple[int, int]]) -> None:
    lanes = lanes_of([begin for begin, _ in ranges], [end for _, end in ranges])

    for lane in set(lanes.tolist()):
        own = sorted(span for span, where in zip(ranges, lanes.tolist(), strict=True) if where == lane)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    # As many as are open at once at the busiest moment; a span without length takes a lane of its own at its moment.
    moments = [begin for begin, _ in ranges]
    open_at = [sum(b <= at < e or b == at == e for b, e in ranges) for at in moments]
    assert len(set(lanes.tolist())) <= max(open_at, default=0)


@given(RANGES)
def test_busy_time_of_the_bins_is_the_time_in_which_something_was_open(ranges: list[tuple[int, int]]) -> None:
    begin, end = np.array([r[0] for r in ranges], float), np.array([r[1] for r in ranges], float)
    edges = np.linspace(0, 80, 33)

    busy_s = float(np.sum(busy_share(begin, end, edges) * np.diff(edges)))

    covered = {second for b, e in ranges for second in range(b, e)}
    assert busy_s == pytest.approx(len(covered))


@given(RANGES)
def test_amounts_that_are_spread_over_bins_are_all_there(ranges: list[tuple[int, int]]) -> None:
    begin, end = np.array([r[0] for r in ranges], float), np.array([r[1] for r in ranges], float)
    amount = np.arange(len(ranges)) * 1000

    bins = spread(begin, end, amount, np.linspace(0, 80, 33))

    assert bins.sum() == pytest.approx(amount.sum())


def test_an_amount_is_spread_evenly_over_its_time() -> None:
    bins = spread(np.array([1.0]), np.array([3.0]), np.array([100]), np.linspace(0, 4, 5))

    assert bins.tolist() == [0, 50, 50, 0]


def test_names_with_numbers_are_in_the_order_of_the_numbers() -> None:
    names = ["rank 10", "rank 9", "n2-1/wire", "n2/wire", "n10/wire", "n" + "9" * 5000]

    assert sorted(names, key=natural_key)[:4] == ["n2/wire", "n2-1/wire", "n10/wire", "n" + "9" * 5000]
    assert sorted(names, key=natural_key)[4:] == ["rank 9", "rank 10"]


def test_tracks_are_in_the_order_in_which_bytes_pass() -> None:
    names = ["planner", "rank 10", "rank 2", "n0/pool", "n0/wire", "n1/storage", "n0/storage"]
    spans = [Span(track=name, kind="other", begin_s=0, end_s=1) for name in names]

    tracks = tracks_of(Timeline.of("measured", spans))

    assert [track.name for track in tracks] == [
        "n0/storage",
        "n1/storage",
        "n0/wire",
        "n0/pool",
        "rank 2",
        "rank 10",
        "planner",
    ]


def test_a_timeline_without_anything_has_no_tracks_and_no_curves() -> None:
    empty = Timeline.of("predicted", [])

    assert tracks_of(empty) == ()
    assert curves_of(empty) == ()


def test_throughput_that_nobody_sampled_is_added_up_from_the_spans() -> None:
    spans = [
        Span(track="n0/storage", kind="read", begin_s=0, end_s=2, nbytes=4000),
        Span(track="n0/storage", kind="verify", begin_s=2, end_s=4, nbytes=4000),
    ]

    (rate,) = curves_of(Timeline.of("measured", spans, limits={"bytes/s n0/storage": 2500.0}))

    assert (rate.unit, rate.place, rate.limit) == ("bytes/s", "n0/storage", 2500.0)
    assert rate.value[rate.at_s < 1.99].tolist() == pytest.approx([2000.0] * int((rate.at_s < 1.99).sum()))
    assert rate.value[rate.at_s > 2.01].max() == pytest.approx(0)


@pytest.mark.parametrize("place", ["rank 0", "rank 0/device"])
def test_throughput_that_was_sampled_is_taken_as_it_is(place: str) -> None:
    spans = [Span(track="rank 0", kind="copy", begin_s=0, end_s=1, nbytes=4000)]
    samples = [Sample(series=f"bytes/s {place}", at_s=0, value=17)]

    (rate,) = curves_of(Timeline.of("measured", spans, samples))

    assert rate.value.tolist() == [17]


def test_values_that_are_no_numbers_are_left_out() -> None:
    samples = [
        Sample(series="bytes n0/host", at_s=at, value=value) for at, value in enumerate([1.0, float("nan"), 3.0])
    ]

    (held,) = curves_of(Timeline.of("measured", [], samples, limits={"bytes n0/host": float("inf")}))

    assert held.value.tolist() == [1, 3]
    assert held.limit is None


def test_a_sum_of_curves_holds_each_value_until_its_next() -> None:
    total = sum_of([curve([0, 2], [1, 3], limit=5), curve([1], [10], limit=7)], "all 2")

    assert total.at_s.tolist() == [0, 1, 2]
    assert total.value.tolist() == [1, 11, 13]
    assert total.limit == 12


def test_a_sum_has_a_limit_only_where_each_part_has_one() -> None:
    assert sum_of([curve([0], [1], limit=5), curve([0], [1])], "all 2").limit is None


def test_bins_keep_the_integral_of_a_rate() -> None:
    rate = curve([0.5, 1.5, 3.25], [10.0, 40.0, 0.0])

    bins = binned(rate, np.linspace(0, 4, 5))

    assert bins.tolist() == pytest.approx([5, 25, 40, 10])


def test_bins_keep_the_peak_of_an_amount() -> None:
    held = curve([0.0, 1.1, 1.2], [1.0, 99.0, 2.0], unit="bytes")

    assert binned(held, np.linspace(0, 3, 4)).tolist() == [1, 99, 2]


def test_a_curve_with_few_samples_is_not_touched_and_one_with_many_is_thinned() -> None:
    few, many = curve([0, 1], [1, 2]), curve(list(np.linspace(0, 1, 1000)), [3.0] * 1000)

    assert thinned(few, 1.0, 100) is few
    assert thinned(many, 1.0, 100).value.tolist() == pytest.approx([3.0] * 100)
