"""How a client comes to a planner again, with planners that are handles alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megamind_ray.actors import reaching
from megamind_ray.actors.boundary import ActorLostError, NoAnswerError
from megamind_ray.actors.journal import Charter
from megamind_ray.actors.messages import PlannerFacts
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
    reach.again(lost.value)
    assert reach.facts.incarnation == "second"
