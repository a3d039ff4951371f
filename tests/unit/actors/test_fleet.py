"""Nodes that join and leave while the fleet brings itself up to date, with actors that answer at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megamind_ray.actors import fleet as fleet_module
from megamind_ray.actors.fencing import Epoch
from megamind_ray.actors.fleet import Fleet
from megamind_ray.actors.messages import AgentFacts, Lifetime, WorkerFacts
from megamind_ray.actors.spawner import NodeResources
from megamind_ray.config import Config
from megamind_ray.core.ids import NodeId
from megamind_ray.errors import ClusterError

A, B = NodeId("a"), NodeId("b")


class Actor:
    """An agent or a worker; its node may be gone before it has started."""

    def __init__(self, cluster: Cluster, node: NodeId, facts: AgentFacts | WorkerFacts) -> None:
        self.cluster, self.node, self._facts = cluster, node, facts
        self.facts = SimpleNamespace(remote=self._answer)

    def _answer(self) -> Any:
        if self.node in self.cluster.breaks:
            return ClusterError(f"node {self.node} does not start it")
        if self.node in self.cluster.goes:
            self.cluster.living.discard(self.node)
        return self._facts if self.node in self.cluster.living else ClusterError("gone")


class Cluster:
    """Two nodes with a GPU each.

    Attributes:
        living: Those that Ray has.
        goes: Nodes that are gone once an actor is asked there.
        breaks: Nodes that live and start nothing.
        killed: Nodes of the actors that were ended.
    """

    lineage = ""

    def __init__(self) -> None:
        self.living = {A, B}
        self.goes: set[NodeId] = set()
        self.breaks: set[NodeId] = set()
        self.killed: list[NodeId] = []

    def nodes(self) -> list[NodeResources]:
        return [NodeResources(node=node, address=node, num_gpus=1, free_gpus=1) for node in sorted(self.living)]

    def here(self) -> NodeId:
        return A

    def take_command(self, epoch: Epoch) -> None:
        raise NotImplementedError

    def members(self) -> list[tuple[str, Any]]:
        raise NotImplementedError

    def agent(self, name: str, node: NodeId, lifetime: Lifetime) -> Actor:
        sizes = dict.fromkeys(("memory_bytes", "pool_bytes", "pool_dir_bytes", "pool_dir_free_bytes"), 1)
        return Actor(self, node, AgentFacts(node=node, address=node, pool_dir="", pool_resident_bytes=0, **sizes))

    def worker(self, name: str, node: NodeResources, lifetime: Lifetime, device_memory_bytes: int | None) -> Actor:
        facts = WorkerFacts(node=node.node, gpu=0, pid=1, device="cpu", memory_bytes=1, free_bytes=1)
        return Actor(self, node.node, facts)

    def kill(self, handle: Actor) -> None:
        self.killed.append(handle.node)


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "settle", lambda answers, **_: list(answers))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def fleet(cluster: Cluster) -> Fleet:
    return Fleet("f", lifetime="job", config=Config(), spawner=cluster, device_memory_bytes=None)


def shown(fleet: Fleet) -> list[NodeId]:
    fleet.refresh()
    return [node.id for node in fleet.topology().nodes if node.gpus]


def test_the_topology_has_nodes_that_joined_and_none_that_left(cluster: Cluster, fleet: Fleet) -> None:
    cluster.living = {A}
    assert shown(fleet) == [A]
    cluster.living = {A, B}
    assert shown(fleet) == [A, B]
    cluster.living = {B}
    assert shown(fleet) == [B]


def test_a_node_that_leaves_while_its_actors_start_is_left_out(cluster: Cluster, fleet: Fleet) -> None:
    cluster.goes = {B}

    assert shown(fleet) == [A]
    assert cluster.killed == [B, B]


def test_a_node_that_is_there_and_starts_nothing_is_an_error_and_leaves_no_actor(
    cluster: Cluster, fleet: Fleet
) -> None:
    cluster.breaks = {B}

    with pytest.raises(ClusterError, match="node b does not start it"):
        fleet.refresh()
    assert sorted(cluster.killed) == [A, A, B, B]


def test_nothing_is_started_on_a_node_that_is_leaving(cluster: Cluster, fleet: Fleet) -> None:
    fleet.leaving.add(B)
    assert shown(fleet) == [A]

    fleet.leaving.clear()
    assert shown(fleet) == [A, B]


def test_a_node_that_is_leaving_is_shown_so_until_it_is_emptied(cluster: Cluster, fleet: Fleet) -> None:
    fleet.refresh()
    fleet.leaving.add(B)
    assert shown(fleet) == [A, B]
    assert [node.is_leaving for node in fleet.topology().nodes] == [False, True]

    fleet.end_node(B)

    assert cluster.killed == [B, B]
    assert [node.id for node in fleet.topology().nodes] == [A]
    assert shown(fleet) == [A]


def test_a_mark_goes_with_its_node(cluster: Cluster, fleet: Fleet) -> None:
    fleet.leaving.add(B)
    cluster.living = {A}
    fleet.refresh()

    assert fleet.leaving == set()


def test_a_node_that_is_marked_while_the_fleet_is_brought_up_to_date_stays_marked(
    cluster: Cluster, fleet: Fleet
) -> None:
    """Whoever marks does not wait for the planner's lock: marks are taken off the set that is there."""
    marks = fleet.leaving
    fleet.refresh()
    assert fleet.leaving is marks
