"""Who is silent: heartbeats and answers come and stay away at given times."""

from __future__ import annotations

import pytest

from megamind_ray.core.ids import NodeId
from megamind_ray.core.liveness import Liveness

A, B = NodeId("a"), NodeId("b")


@pytest.fixture
def liveness() -> Liveness:
    """Two nodes that are expected from second 0 on; whoever is silent for 8 s is lost."""
    made = Liveness(8.0, now_s=0.0)
    made.expect(A, 0.0)
    made.expect(B, 0.0)
    return made


def look_until(liveness: Liveness, begin_s: float, end_s: float) -> dict[NodeId, float]:
    """Looks four times a second."""
    found: dict[NodeId, float] = {}
    for quarter in range(int(begin_s * 4), int(end_s * 4) + 1):
        found = liveness.look(quarter / 4)
    return found


def test_a_node_without_a_sign_for_so_long_is_silent(liveness: Liveness) -> None:
    liveness.beat(A, 1.0)
    liveness.beat(B, 5.0)
    assert look_until(liveness, 0.0, 9.0) == {}
    assert look_until(liveness, 9.0, 9.25) == {A: 8.25}


def test_an_answer_is_as_good_as_a_heartbeat(liveness: Liveness) -> None:
    liveness.beat(B, 1.0)
    liveness.answered(A, 8.0)
    assert look_until(liveness, 0.0, 9.0) == {}


def test_a_sign_that_is_told_late_does_not_take_back_a_newer_one(liveness: Liveness) -> None:
    liveness.beat(A, 6.0)
    liveness.answered(A, 2.0)
    liveness.beat(B, 6.0)
    assert look_until(liveness, 0.0, 14.0) == {}


def test_where_no_heartbeat_ever_came_through_nobody_is_called_silent(liveness: Liveness) -> None:
    liveness.answered(A, 1.0)
    assert look_until(liveness, 0.0, 60.0) == {}


def test_time_in_which_nobody_looked_does_not_count(liveness: Liveness) -> None:
    """The process that listens was stopped for a minute."""
    liveness.beat(A, 4.0)
    liveness.beat(B, 4.0)
    assert look_until(liveness, 0.0, 5.0) == {}
    assert liveness.look(65.0) == {}
    assert look_until(liveness, 65.0, 72.0) == {}
    assert set(look_until(liveness, 72.0, 72.25)) == {A, B}


def test_a_node_that_was_given_up_is_not_told_again_and_its_late_heartbeats_are_nothing(liveness: Liveness) -> None:
    liveness.beat(A, 1.0)
    liveness.beat(B, 1.0)
    assert set(look_until(liveness, 0.0, 9.25)) == {A, B}
    liveness.forget(A)
    liveness.beat(A, 9.5)
    assert set(look_until(liveness, 9.25, 9.5)) == {B}
