"""Max-min fair shares: what must hold for any flows over any resources."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.sim.shares import FloatArray, Lanes, fair_rates, usage

CLOSE = 1e-9


@dataclass(frozen=True)
class Case:
    """Resources, and lanes of flows that use some of them."""

    capacity: tuple[float, ...]
    uses: tuple[tuple[tuple[int, float], ...], ...]
    cap: tuple[float, ...]
    weight: tuple[float, ...]
    count: tuple[int, ...]

    @property
    def lanes(self) -> Lanes:
        return Lanes.of(self.uses, np.array(self.cap), np.array(self.weight), np.array(self.capacity))

    def rates(self) -> FloatArray:
        return fair_rates(np.array(self.capacity), self.lanes, np.array(self.count, np.float64))

    def used(self) -> FloatArray:
        return usage(self.lanes, self.rates(), np.array(self.count, np.float64), len(self.capacity))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    amounts = st.sampled_from([0.25, 1.0, 1.0, 2.0, 3.0, 7.5])
    capacity = tuple(draw(st.lists(amounts, min_size=1, max_size=6)))
    num_lanes = draw(st.integers(1, 8))
    one = st.dictionaries(st.integers(0, len(capacity) - 1), amounts, min_size=1, max_size=4)
    return Case(
        capacity=capacity,
        uses=tuple(tuple(draw(one).items()) for _ in range(num_lanes)),
        cap=tuple(draw(st.sampled_from([0.1, 0.5, 1.0, math.inf, math.inf])) for _ in range(num_lanes)),
        weight=tuple(draw(st.sampled_from([1.0, 1.0, 2.0, 0.5])) for _ in range(num_lanes)),
        count=tuple(draw(st.integers(1, 5)) for _ in range(num_lanes)),
    )


@given(cases())
def test_no_resource_gives_more_than_it_has(case: Case) -> None:
    assert (case.used() <= np.array(case.capacity) * (1 + CLOSE)).all()


@given(cases())
def test_every_flow_has_its_cap_or_the_highest_rate_at_something_that_is_full(case: Case) -> None:
    """The max-min condition: nobody's rate can grow but at the cost of one that is no higher."""
    rates, used = case.rates(), case.used()
    level = rates / np.array(case.weight)
    for lane, uses in enumerate(case.uses):
        if rates[lane] >= case.cap[lane] * (1 - CLOSE):
            continue
        limits = [
            resource
            for resource, _ in uses
            if used[resource] >= case.capacity[resource] * (1 - CLOSE)
            and all(
                level[other] <= level[lane] * (1 + CLOSE)
                for other, others in enumerate(case.uses)
                if resource in dict(others)
            )
        ]
        assert limits, f"lane {lane} could go faster than {rates[lane]}"


@given(cases())
def test_every_flow_gets_something_and_none_more_than_its_cap(case: Case) -> None:
    rates = case.rates()
    assert (rates > 0).all()
    assert (rates <= np.array(case.cap)).all()


def test_two_flows_share_a_link_and_the_third_takes_what_the_capped_one_leaves() -> None:
    case = Case(
        capacity=(9.0,),
        uses=(((0, 1.0),), ((0, 1.0),)),
        cap=(1.0, math.inf),
        weight=(1.0, 1.0),
        count=(1, 2),
    )
    assert case.rates().tolist() == [1.0, 4.0]


def test_a_flow_of_twice_the_weight_gets_twice_the_rate() -> None:
    case = Case(capacity=(9.0,), uses=(((0, 1.0),), ((0, 1.0),)), cap=(math.inf,) * 2, weight=(1.0, 2.0), count=(1, 1))
    assert case.rates().tolist() == [3.0, 6.0]


def test_a_flow_that_is_slowed_down_elsewhere_leaves_its_part_to_the_others() -> None:
    slow_link = Case(
        capacity=(10.0, 2.0),
        uses=(((0, 1.0), (1, 1.0)), ((0, 1.0),)),
        cap=(math.inf,) * 2,
        weight=(1.0, 1.0),
        count=(1, 1),
    )
    assert slow_link.rates().tolist() == [2.0, 8.0]


def test_a_flow_that_takes_two_units_for_a_byte_gets_half_the_bytes() -> None:
    case = Case(capacity=(10.0,), uses=(((0, 2.0),),), cap=(math.inf,), weight=(1.0,), count=(1,))
    assert case.rates().tolist() == [5.0]
