"""Figures and how many samples they take."""

from __future__ import annotations

import threading

import pytest

from megamind_ray.engine.measure_figures import Figure, Sampler
from megamind_ray.errors import ClusterError


class _Clock:
    """Goes on by one second with each sample that is taken with it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sample_of(self, *values: float) -> Sample:
        return Sample(self, values)


class Sample:
    """Gives values in turn, the last one for ever."""

    def __init__(self, clock: _Clock, values: tuple[float, ...]) -> None:
        self.count = 0
        self._clock = clock
        self._values = values

    def __call__(self) -> float:
        self._clock.now_s += 1
        self.count += 1
        return self._values[min(self.count, len(self._values)) - 1]


def test_a_figure_is_the_median_to_three_digits() -> None:
    assert Figure(name="copy", unit="bytes/s", samples=(9.0, 1.23456, 1.0)).value == 1.23


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (
            Figure(name="copy", unit="bytes/s", samples=(1e9, 3e9, 2e9)),
            "copy: 2.00 GB/s (3 samples, 1.00 GB/s to 3.00 GB/s)",
        ),
        (Figure(name="read", unit="s", samples=(8e-5, 9e-5, 0.002)), "read: 90 us (3 samples, 80 us to 2.0 ms)"),
    ],
)
def test_a_figure_tells_how_far_it_scatters(figure: Figure, text: str) -> None:
    assert str(figure) == text


def test_a_calm_figure_takes_three_samples() -> None:
    clock = _Clock()
    sampler, sample = Sampler(deadline_s=100, clock=clock), clock.sample_of(1.0, 1.01, 0.99)

    assert sampler.take("copy", "s", sample) == 1.0
    assert sample.count == 3
    assert sampler.figures == [Figure(name="copy", unit="s", samples=(1.0, 1.01, 0.99))]
    assert sampler.notes == []


def test_a_figure_that_scatters_takes_seven() -> None:
    clock = _Clock()
    sample = clock.sample_of(1.0, 2.0)

    Sampler(deadline_s=100, clock=clock).take("copy", "s", sample)

    assert sample.count == 7


def test_a_figure_that_was_begun_is_taken_to_its_end_and_no_further() -> None:
    clock = _Clock()
    sample = clock.sample_of(1.0, 2.0)

    Sampler(deadline_s=0.5, clock=clock).take("copy", "s", sample)

    assert sample.count == 3


def test_a_figure_that_scatters_leaves_the_others_their_time() -> None:
    clock = _Clock()
    sampler, wide, calm = (
        Sampler(deadline_s=10, num_planned=2, clock=clock),
        clock.sample_of(1.0, 2.0),
        clock.sample_of(1.0),
    )

    sampler.take("copy", "s", wide)
    sampler.take("touch", "s", calm)

    assert (wide.count, calm.count) == (5, 3)


def test_without_time_nothing_is_measured_and_that_is_told() -> None:
    clock = _Clock()
    sampler, sample = Sampler(deadline_s=0.0, clock=clock), clock.sample_of(1.0)

    assert sampler.take("copy", "s", sample) is None
    assert sample.count == 0
    assert sampler.figures == []
    assert sampler.notes == ["copy: not measured for want of time"]


def test_who_stops_it_in_the_middle_of_a_figure_is_obeyed() -> None:
    stop = threading.Event()
    sampler = Sampler(deadline_s=100, clock=lambda: 0.0, stop=stop)
    taken: list[float] = []

    def sample() -> float:
        taken.append(1.0)
        stop.set()
        return 1.0

    with pytest.raises(ClusterError, match="measuring was stopped"):
        sampler.take("copy", "s", sample)
    assert taken == [1.0]
    assert sampler.figures == []


def test_what_is_measured_now_is_told() -> None:
    told: list[str] = []
    sampler = Sampler(deadline_s=100, clock=lambda: 0.0, on_figure=told.append)

    sampler.take("copy", "s", lambda: 1.0)
    sampler.take("touch", "s", lambda: 1.0)

    assert told == ["copy", "touch"]
