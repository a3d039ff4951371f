"""Flows in virtual time: closed forms where there are some, and what must hold where there are none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.sim.clock import Clock, Steps, Task
from megamind_ray.sim.fluid import Fluid
from megamind_ray.sim.history import History


def ends(fluid: Fluid, clock: Clock, *flows: tuple[int, float, float]) -> list[float]:
    """Runs (lane, bytes, begin) flows; gives when each ended."""
    ended = [math.nan] * len(flows)

    def steps(number: int, lane: int, nbytes: float, begin_s: float) -> Steps:
        yield clock.sleep(begin_s)
        yield fluid.flow(lane, nbytes)
        ended[number] = clock.now_s

    for number, flow in enumerate(flows):
        Task(steps(number, *flow))
    fluid.run()
    return ended


@given(nbytes=st.floats(1, 1e12), capacity=st.floats(1, 1e12), cap=st.floats(1, 1e12), units=st.floats(0.01, 10))
def test_one_flow_takes_its_bytes_over_its_rate(nbytes: float, capacity: float, cap: float, units: float) -> None:
    clock = Clock()
    fluid = Fluid(clock, [capacity])
    lane = fluid.lane([(0, units)], cap=cap)
    (end_s,) = ends(fluid, clock, (lane, nbytes, 0.0))
    assert end_s == pytest.approx(nbytes / min(cap, capacity / units), rel=1e-9)


def test_a_flow_that_comes_later_slows_the_first_one_down_from_then_on() -> None:
    clock = Clock()
    fluid = Fluid(clock, [10.0])
    lane = fluid.lane([(0, 1.0)])
    # Alone for 1 s (10 bytes), then at half the rate: the first has 10 left, 2 s; then the second has 10 left, 1 s.
    assert ends(fluid, clock, (lane, 20.0, 0.0), (lane, 20.0, 1.0)) == pytest.approx([3.0, 4.0])


def test_flows_of_different_lanes_share_what_both_use() -> None:
    clock = Clock()
    fluid = Fluid(clock, [10.0, 4.0])
    wide, narrow = fluid.lane([(0, 1.0)]), fluid.lane([(0, 1.0), (1, 1.0)])
    assert ends(fluid, clock, (wide, 12.0, 0.0), (narrow, 8.0, 0.0)) == pytest.approx([2.0, 2.0])


def test_no_bytes_take_no_time() -> None:
    clock = Clock()
    fluid = Fluid(clock, [10.0])
    assert ends(fluid, clock, (fluid.lane([(0, 1.0)]), 0.0, 2.0)) == [2.0]


def test_a_flow_that_is_called_off_leaves_its_part_to_the_others() -> None:
    clock = Clock()
    fluid = Fluid(clock, [10.0])
    lane = fluid.lane([(0, 1.0)])

    def endless() -> Steps:
        yield fluid.flow(lane, 1e9)

    task = Task(endless())
    clock.at(1.0, task.end)
    # 5 bytes in the first second, the other 15 at the full rate.
    assert ends(fluid, clock, (lane, 20.0, 0.0)) == pytest.approx([2.5])
    assert fluid.units_moved()[0] == pytest.approx(25.0)


def test_a_flow_that_nothing_limits_is_refused() -> None:
    fluid = Fluid(Clock(), [math.inf])
    with pytest.raises(ValueError, match="nothing limits this flow"):
        fluid.lane([(0, 1.0)])


@dataclass(frozen=True)
class Traffic:
    """Resources, lanes, and flows (lane, bytes, begin) over them."""

    capacity: tuple[float, ...]
    lanes: tuple[tuple[tuple[tuple[int, float], ...], float], ...]
    flows: tuple[tuple[int, float, float], ...]

    def fluid(self, clock: Clock, history: History | None = None) -> Fluid:
        fluid = Fluid(clock, self.capacity, history=history)
        for uses, cap in self.lanes:
            fluid.lane(uses, cap=cap)
        return fluid

    def run(self, resolution_s: float = 0.0) -> tuple[list[float], Fluid]:
        clock = Clock()
        fluid = self.fluid(clock)
        fluid.resolution_s = resolution_s
        return ends(fluid, clock, *self.flows), fluid

    def alone_s(self, lane: int, nbytes: float) -> float:
        uses, cap = self.lanes[lane]
        return nbytes / min([cap, *(self.capacity[resource] / units for resource, units in uses)])

    def units(self) -> list[float]:
        moved = [0.0] * len(self.capacity)
        for lane, nbytes, _ in self.flows:
            for resource, units in self.lanes[lane][0]:
                moved[resource] += units * nbytes
        return moved


@st.composite
def traffic(draw: st.DrawFn) -> Traffic:
    amounts = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0])
    capacity = tuple(draw(st.lists(amounts, min_size=1, max_size=4)))
    uses = st.dictionaries(st.integers(0, len(capacity) - 1), amounts, min_size=1, max_size=3)
    num_lanes = draw(st.integers(1, 5))
    begins = st.sampled_from([0.0, 0.0, 0.7, 3.0])
    flow = st.tuples(st.integers(0, num_lanes - 1), st.sampled_from([0.0, 0.1, 1.0, 5.0, 20.0]), begins)
    return Traffic(
        capacity=capacity,
        lanes=tuple((tuple(draw(uses).items()), draw(st.sampled_from([0.3, 1.0, math.inf]))) for _ in range(num_lanes)),
        flows=tuple(draw(st.lists(flow, min_size=1, max_size=12))),
    )


@given(traffic())
def test_every_flow_ends_and_none_sooner_than_alone(case: Traffic) -> None:
    ended, _ = case.run()
    for (lane, nbytes, begin_s), end_s in zip(case.flows, ended, strict=True):
        assert end_s >= begin_s + case.alone_s(lane, nbytes) * (1 - 1e-9)


@given(traffic())
def test_what_is_taken_of_each_resource_is_what_the_flows_need(case: Traffic) -> None:
    _, fluid = case.run()
    assert fluid.units_moved() == pytest.approx(case.units())


@given(traffic())
def test_no_resource_gives_more_than_it_has_until_the_last_flow_ends(case: Traffic) -> None:
    ended, fluid = case.run()
    assert (fluid.units_moved() <= np.array(case.capacity) * max(ended) * (1 + 1e-9) + 1e-9).all()


@given(traffic(), st.sampled_from([0.05, 0.5, 2.0]))
def test_a_coarser_resolution_moves_the_same_bytes_and_no_flow_faster_than_alone(
    case: Traffic, resolution_s: float
) -> None:
    ended, fluid = case.run(resolution_s)
    assert fluid.units_moved() == pytest.approx(case.units())
    for (lane, nbytes, begin_s), end_s in zip(case.flows, ended, strict=True):
        assert end_s >= begin_s + case.alone_s(lane, nbytes) * (1 - 1e-9)


def test_a_chain_of_steps_takes_their_sum_at_any_resolution() -> None:
    clock = Clock()
    fluid = Fluid(clock, [10.0])
    fluid.resolution_s = 0.35
    lane = fluid.lane([(0, 1.0)])
    ended: list[float] = []

    def chain() -> Steps:
        for _ in range(10):
            yield clock.sleep(0.1)
            yield fluid.flow(lane, 2.0)
        ended.append(clock.now_s)

    Task(chain())
    fluid.run()
    assert ended == pytest.approx([10 * (0.1 + 0.2)])


def test_the_history_has_the_rate_over_time() -> None:
    clock = Clock()
    history = History(1, max_samples=8, span_s=1.0)
    fluid = Fluid(clock, [10.0], history=history)
    lane = fluid.lane([(0, 1.0)], cap=5.0)
    ends(fluid, clock, (lane, 20.0, 0.0), (lane, 10.0, 2.0))
    assert np.array(list(history.samples(0, 4.0))) == pytest.approx(np.array([(0.0, 5.0), (2.0, 10.0), (4.0, 0.0)]))


@given(traffic())
def test_the_history_adds_up_to_what_was_moved(case: Traffic) -> None:
    clock = Clock()
    history = History(len(case.capacity), max_samples=16, span_s=0.1)
    fluid = case.fluid(clock, history)
    end_s = max(ends(fluid, clock, *case.flows))
    for resource, units in enumerate(case.units()):
        samples = list(history.samples(resource, end_s))
        total = sum(rate * (after[0] - at_s) for (at_s, rate), after in pairwise(samples))
        assert total == pytest.approx(units, abs=1e-6)
