"""Values over time in a bounded number of samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.sim.history import History, StepSeries


def test_a_history_that_grows_long_keeps_its_sums_in_longer_spans() -> None:
    history = History(1, max_samples=4, span_s=1.0)
    for second in range(100):
        history.add(second, second + 1, np.array([float(second % 2)]))
    assert history.span_s == 32.0
    samples = list(history.samples(0, 100.0))
    assert len(samples) <= 5
    assert sum(rate * min(32.0, 100.0 - at_s) for at_s, rate in samples[:-1]) >= 0
    assert samples[0] == (0.0, 0.5)


def test_a_history_ends_with_zero() -> None:
    history = History(1, max_samples=4, span_s=1.0)
    history.add(0.0, 0.5, np.array([8.0]))
    assert list(history.samples(0, 0.5)) == [(0.0, 8.0), (0.5, 0.0)]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 100)), min_size=1, max_size=300))
def test_a_step_series_stays_short_in_order_and_ends_with_the_last_value(changes: list[tuple[float, float]]) -> None:
    series, at_s = StepSeries(16), 0.0
    for after_s, value in changes:
        at_s += after_s
        series.set(at_s, value)
    samples = list(series)
    assert len(samples) <= 16
    assert [time for time, _ in samples] == sorted(time for time, _ in samples)
    assert samples[-1][1] == changes[-1][1]
