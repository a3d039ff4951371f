"""``megamind drain``, and what other commands say of nodes that leave, with a fleet that only answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from megamind_ray.actors.messages import ModelInfo
from megamind_ray.core.departure import DrainReport
from megamind_ray.core.ids import LoadId, ModelName, NodeId
from megamind_ray.core.parallel import Parallel
from megamind_ray.errors import CapacityError, ClusterError, RequestError
from megamind_ray.units import MIB

A, B = NodeId("ab" * 28), NodeId("cd" * 28)
REPORT = DrainReport(
    fleet="default",
    node=A,
    address="10.0.0.7",
    copied_blocks=3,
    copied_bytes=24 * MIB,
    holders={B: 24 * MIB},
    seconds=2.5,
    waited_s=1.5,
)
FORCED = DrainReport(
    fleet="default",
    node=A,
    address="10.0.0.7",
    lost_blocks=2,
    lost_bytes=16 * MIB,
    unloaded=(ModelName("llama"),),
    notes=("code still holds its tensors",),
)
MODEL = ModelInfo(
    name=ModelName("llama"),
    load=LoadId("llama#1"),
    uri="/models/llama",
    parallel=Parallel(tp=2),
    num_bytes=8 * MIB,
    kept_bytes=8 * MIB,
    loaded_at="2026-12-01T12:00:00+00:00",
    kept_by={A: 2 * MIB, B: 6 * MIB},
)


@dataclass
class Fleet:
    """Answers as it is told to."""

    outcome: DrainReport | BaseException = REPORT
    asked: list[Any] = field(default_factory=list)
    leaving: tuple[NodeId, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def drain(self, node: str, *, force: bool, wait_s: float, on_progress: object) -> DrainReport:
        self.asked.append((node, force, wait_s))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def undrain(self, node: str) -> NodeId:
        self.asked.append(("back", node))
        return A

    def models(self) -> list[ModelInfo]:
        return [MODEL]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    found = Fleet()
    monkeypatch.setattr("megamind_ray.cli.running.connect_running", lambda *_: found)
    return found


def test_it_says_that_the_node_can_go_and_where_its_blocks_are(megamind: Any, fleet: Fleet) -> None:
    result = megamind("drain", "10.0.0.7")

    assert result.code == 0
    assert result.stdout.splitlines() == [
        f"node {A} (10.0.0.7) can go: nothing of fleet default is left there",
        "  copied 3 blocks, 24.00 MiB, that it alone kept; 2.5 s, of which 1.5 s waiting for a load",
        f"  24.00 MiB to node {B}",
    ]
    assert fleet.asked == [("10.0.0.7", False, 600.0)]


def test_what_force_took_is_said(megamind: Any, fleet: Fleet) -> None:
    fleet.outcome = FORCED

    result = megamind("drain", "10.0.0.7", "--force", "--wait", "2")

    assert result.stdout.splitlines()[2:] == [
        "  unloaded llama",
        "  gave up 2 blocks, 16.00 MiB",
        "  code still holds its tensors",
    ]
    assert fleet.asked == [("10.0.0.7", True, 2.0)]


def test_its_document_has_the_report(megamind: Any, fleet: Fleet) -> None:
    assert megamind("drain", "ab", "--json").document == json.loads(json.dumps(REPORT.to_json()))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("it has ranks of 'llama'"), 2),
        (CapacityError("8 MiB too little", where="pools", needed_bytes=3, free_bytes=1), 2),
        (ClusterError("it was lost"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_drain_that_comes_to_nothing_has_the_code_of_its_error(
    megamind: Any, fleet: Fleet, error: Any, code: int
) -> None:
    fleet.outcome = error

    assert megamind("drain", "ab", "--json").document["error"]["exit_code"] == code


def test_a_node_is_taken_back(megamind: Any, fleet: Fleet) -> None:
    assert megamind("drain", "ab", "--cancel").stdout == "loads use node ab again\n"
    assert megamind("drain", "ab", "--cancel", "--json").document == {"fleet": "default", "node": A, "leaving": False}
    assert fleet.asked == [("back", "ab")] * 2


def test_models_say_on_how_many_nodes_they_are_kept_and_who_is_leaving(megamind: Any, fleet: Fleet) -> None:
    fleet.leaving = (A,)

    lines = megamind("models").stdout.splitlines()
    document = megamind("models", "--json").document

    assert "8.00 MiB on 2 nodes" in lines[1] + lines[2]
    assert lines[-1] == f"node {A} is leaving: no load uses it"
    assert document["leaving"] == [A]
    assert document["models"][0]["kept_by"] == {A: 2 * MIB, B: 6 * MIB}
