"""How a client comes to a planner again, with planners that are handles alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megamind_ray.actors import reaching
from megamind_ray.actors.boundary import ActorLostError, NoAnswerError
from megamind_ray.actors.client import FleetClient
from megamind_ray.actors.journal import Charter
from megamind_ray.actors.messages import DrainRequest, PlannerFacts
from megamind_ray.actors.reaching import PlannerLostError, Reach
from megamind_ray.config import Config
from megamind_ray.errors import MegamindError


class Planner:
    """Answers every question with ``answer``."""

    def __init__(self, name: str) -> None:
        self.answer: object = PlannerFacts(
            version="0",
            fleet="f",
            lifetime="job",
            owner="",
            device_memory_bytes=None,
            incarnation=name,
            is_ready=True,
        )
        self.hello = SimpleNamespace(remote=lambda *_: self.answer)


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for(ref: object, **_: Any) -> object:
        if isinstance(ref, MegamindError):
            raise ref
        return ref

    monkeypatch.setattr(reaching, "wait_for", wait_for)


def test_a_planner_that_was_silent_and_ends_while_it_is_greeted_has_a_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host was switched off: first nobody answers, then Ray says that it is dead."""
    first, second = Planner("first"), Planner("second")
    monkeypatch.setattr(reaching, "running_planner", lambda _: first)
    reach = Reach(Charter(fleet="f", lifetime="job", config=Config()), start=True)
    first.answer = NoAnswerError("no answer within 30 s")
    with pytest.raises(PlannerLostError) as lost:
        reach.ask(lambda planner: planner.answer, "asking for progress")
    first.answer = ActorLostError("its node is dead")
    monkeypatch.setattr(reaching, "running_planner", lambda _: None)
    monkeypatch.setattr(reaching, "restart_planner", lambda _, dead=None: second)
    assert reach.again(lost.value)
    assert reach.facts.incarnation == "second"


def test_a_planner_that_was_only_silent_is_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner("first")
    monkeypatch.setattr(reaching, "running_planner", lambda _: planner)
    reach = Reach(Charter(fleet="f", lifetime="job", config=Config()), start=True)
    lost = PlannerLostError("no answer within 30 s", planner=planner, is_silent=True)
    assert reach.again(lost) is False


class Drain(FleetClient):
    """Its planner is silent once while it waits."""

    def __init__(self, reach: Reach, planner: Planner) -> None:
        self._reach = reach
        self.num_begun = 0
        self._lost = [PlannerLostError("no answer within 30 s", planner=planner, is_silent=True)]

    def _begin_drain(self, *_: object) -> str:
        self.num_begun += 1
        return f"drain {self.num_begun}"

    def _wait_for_drain(self, ref: object, *_: object) -> Any:
        if self._lost:
            raise self._lost.pop()
        return ref


def test_a_drain_is_not_begun_twice_with_a_planner_that_was_only_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refused the second one, since the first was under way, and with that error the client called the first off."""
    planner = Planner("first")
    monkeypatch.setattr(reaching, "running_planner", lambda _: planner)
    client = Drain(Reach(Charter(fleet="f", lifetime="job", config=Config()), start=True), planner)
    assert client.drain(DrainRequest(node="n", force=False, wait_s=0.0), None) == "drain 1"
    assert client.num_begun == 1
