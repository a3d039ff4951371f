"""Draining a node, with a fleet of fakes: who may leave, what stands in the way, what is said of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megamind_ray.actors.departures import Departures
from megamind_ray.actors.kept_blocks import Holdings
from megamind_ray.actors.messages import AgentFacts, DrainRequest
from megamind_ray.actors.spawner import NodeResources
from megamind_ray.config import Config
from megamind_ray.core.departure import DrainReport
from megamind_ray.core.evacuation import HeldBlock
from megamind_ray.core.ids import BlockId, LoadId, ModelName, NodeId, Rank
from megamind_ray.core.topology import Node, Topology
from megamind_ray.errors import CapacityError, ClusterError, RequestError
from megamind_ray.units import MIB

HEAD, A, B = (NodeId(letter * 56) for letter in "hab")
LOAD = LoadId("llama#1")
BOUND_S = 20.0


class Agent:
    """Answers at once; ``settle`` is replaced by what hands answers on."""

    def __init__(self, holdings: object) -> None:
        self.holdings = SimpleNamespace(remote=lambda: holdings)


class Fleet:
    """Three nodes: a head without GPUs, and two with one each."""

    name = "default"
    here = HEAD

    def __init__(self) -> None:
        self.rows = [
            NodeResources(node=HEAD, address="10.0.0.1", host="head", num_gpus=0, free_gpus=0, is_head=True),
            NodeResources(node=A, address="10.0.0.2", host="n0", num_gpus=1, free_gpus=0),
            NodeResources(node=B, address="10.0.0.3", host="n1", num_gpus=1, free_gpus=0),
        ]
        self.agents: dict[NodeId, Agent] = {A: Agent(Holdings(blocks={})), B: Agent(Holdings(blocks={}))}
        self.leaving: set[NodeId] = set()
        self.ended: list[NodeId] = []
        self.pool_bytes = 100 * MIB

    def cluster_nodes(self) -> list[NodeResources]:
        return self.rows

    def refresh(self) -> None:
        self.leaving &= {row.node for row in self.rows}

    def end_node(self, node: NodeId) -> None:
        self.ended.append(node)
        self.agents.pop(node, None)

    @property
    def agent_facts(self) -> Mapping[NodeId, AgentFacts]:
        facts = AgentFacts(
            node=A,
            address="",
            memory_bytes=0,
            pool_bytes=self.pool_bytes,
            pool_dir="",
            pool_dir_bytes=0,
            pool_dir_free_bytes=0,
            pool_resident_bytes=0,
        )
        return dict.fromkeys(self.agents, facts)

    def topology(self) -> Topology:
        return Topology(
            nodes=tuple(
                Node(id=node, gpus=(), memory_bytes=0, pool_bytes=self.pool_bytes, is_leaving=node in self.leaving)
                for node in self.agents
            )
        )


@dataclass
class Catalogue:
    """One model, with a rank on each of some nodes."""

    ranks: tuple[NodeId, ...] = ()
    is_stubborn: bool = False

    def __iter__(self) -> Iterator[Any]:
        workers = {Rank(rank): ((node, 0), None) for rank, node in enumerate(self.ranks)}
        return iter([SimpleNamespace(info=SimpleNamespace(load=LOAD), workers=workers)])

    def on_node(self, node: NodeId) -> list[ModelName]:
        return [ModelName("llama")] if node in self.ranks else []

    def remove(self, name: str) -> None:
        self.ranks = ()
        if self.is_stubborn:
            raise RequestError("code still holds its tensors")

    def with_taken(self, topology: Topology) -> Topology:
        return topology


class House:
    """A fleet, and drains of it."""

    def __init__(self) -> None:
        self.fleet, self.catalogue, self.moves = Fleet(), Catalogue(), threading.Lock()
        self.departures = Departures(cast("Any", self.fleet), cast("Any", self.catalogue), self.moves, Config())

    def drain(self, node: str, *, force: bool = False, wait_s: float = BOUND_S) -> DrainReport:
        self.departures.mark("t", DrainRequest(node=node, force=force, wait_s=wait_s))
        return self.departures.drain("t")

    def keeps(self, node: NodeId, *blocks: int) -> None:
        """A node keeps blocks of 40 MiB."""
        held = tuple(HeldBlock(block=BlockId(block), nbytes=40 * MIB) for block in blocks)
        self.fleet.agents[node] = Agent(Holdings(blocks={LOAD: held}))


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr("megamind_ray.actors.emptying.settle", lambda answers, **_: answers)
    return House()


def test_a_drained_node_has_nothing_of_the_fleet_and_says_so_each_time(house: House) -> None:
    report = house.drain("n1")

    assert (report.node, report.address, report.copied_blocks) == (B, "10.0.0.3", 0)
    assert house.fleet.ended == [B]
    assert house.departures.leaving == (B,)
    assert house.drain("10.0.0.3") == report
    assert house.fleet.ended == [B], "once"


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ("n9", "the cluster has none of this id, address or name"),
        ("head", "the planner of fleet 'default' runs there"),
    ],
)
def test_who_cannot_leave_is_refused_and_not_marked(house: House, node: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        house.drain(node, force=True)

    assert house.departures.leaving == ()


def test_rays_head_cannot_leave_wherever_the_planner_is(house: House) -> None:
    house.fleet.here = A

    with pytest.raises(RequestError, match="Ray's head runs there"):
        house.drain("head")


def test_the_last_node_with_gpus_cannot_leave_also_while_the_other_one_is_leaving(house: House) -> None:
    house.catalogue.ranks = (A,)
    with pytest.raises(RequestError, match="it has ranks of 'llama'"):
        house.drain("n0")

    with pytest.raises(RequestError, match=r"last one with GPUs .*`megamind down --fleet default"):
        house.drain("n1")


def test_a_node_with_ranks_stays_and_stays_marked(house: House) -> None:
    house.catalogue.ranks = (A, B)

    with pytest.raises(
        RequestError, match=r"it has ranks of 'llama'; unload what has ranks there \(`megamind unload NAME`\)"
    ):
        house.drain("n1")

    assert house.fleet.ended == []
    assert house.departures.leaving == (B,), "a load of the same elsewhere would go there otherwise"
    house.catalogue.ranks = (A,)
    assert house.drain("n1").unloaded == ()


@pytest.mark.parametrize("is_stubborn", [False, True], ids=["", "user code holds its tensors"])
def test_by_force_models_with_ranks_are_unloaded(house: House, is_stubborn: bool) -> None:
    house.catalogue.ranks, house.catalogue.is_stubborn = (B,), is_stubborn

    report = house.drain("n1", force=True)

    assert report.unloaded == ("llama",)
    assert report.notes == (("code still holds its tensors",) if is_stubborn else ())
    assert house.fleet.ended == [B]


def test_what_others_keep_too_is_let_go(house: House) -> None:
    house.keeps(A, 1, 2)
    house.keeps(B, 2)

    assert house.drain("n1").lost_blocks == 0


def test_what_has_no_room_elsewhere_stops_it_before_anything_moves_and_says_by_how_much(house: House) -> None:
    """The other node's pool of 100 MiB takes 60 of them."""
    house.keeps(B, 1, 2)

    with pytest.raises(
        CapacityError, match=r"alone keeps 80\.00 MiB .*room for 40\.00 MiB .*40\.00 MiB too little"
    ) as caught:
        house.drain("n1")

    assert caught.value.missing_bytes == 40 * MIB
    assert house.fleet.ended == []
    assert house.departures.leaving == (B,)


def test_by_force_what_has_no_room_is_given_up(house: House) -> None:
    house.keeps(B, 1, 2)
    house.fleet.pool_bytes = 60 * MIB

    report = house.drain("n1", force=True)

    assert (report.lost_blocks, report.lost_bytes) == (2, 80 * MIB)
    assert house.fleet.ended == [B]


def test_a_node_that_does_not_say_what_it_keeps_is_lost(house: House) -> None:
    house.fleet.agents[B] = Agent(ClusterError("no answer within 30 s"))

    with pytest.raises(ClusterError, match="is lost, and with it what it alone kept: no answer"):
        house.drain("n1")


def test_a_node_without_actors_of_the_fleet_can_go_at_once(house: House) -> None:
    del house.fleet.agents[B]

    assert house.drain("n1").copied_blocks == 0


def test_a_load_under_way_is_not_waited_for_where_that_is_asked_for(house: House) -> None:
    with house.moves, pytest.raises(RequestError, match="a load is under way; drain the node when it has ended"):
        house.drain("n1", wait_s=0)

    assert house.departures.leaving == (B,)
    house.drain("n1")


def test_a_load_that_takes_too_long_ends_the_wait(house: House) -> None:
    with house.moves, pytest.raises(ClusterError, match=r"has not ended within 0\.2 s"):
        house.drain("n1", wait_s=0.2)


class Drain(threading.Thread):
    """A drain that waits for a load."""

    def __init__(self, house: House, node: str) -> None:
        super().__init__(daemon=True)
        self.house, self.node = house, node
        self.report: DrainReport | None = None
        self.error: Exception | None = None
        self.start()
        # Loads that queue are told to let it first as soon as it waits.
        while house.departures.let_first(0):
            assert self.is_alive(), self.error

    def run(self) -> None:
        try:
            self.report = self.house.drain(self.node)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def ended(self) -> DrainReport | Exception | None:
        self.join(BOUND_S)
        return self.report or self.error


def test_a_load_under_way_is_waited_for_and_those_that_queue_let_the_drain_first(house: House) -> None:
    with house.moves:
        drain = Drain(house, "n1")
        assert house.departures.leaving == (B,), "at once"
        assert house.fleet.ended == []

    assert isinstance(drain.ended(), DrainReport)
    assert house.departures.let_first(0)


def test_a_node_is_drained_by_one_at_a_time(house: House) -> None:
    with house.moves:
        drain = Drain(house, "n1")
        with pytest.raises(RequestError, match=r"is being drained already; .*`megamind drain bbbbbbbb --cancel`"):
            house.departures.mark("u", DrainRequest(node="n1", force=True, wait_s=0))
    assert isinstance(drain.ended(), DrainReport)


def test_an_interrupted_drain_ends_and_its_node_stays_marked(house: House) -> None:
    with house.moves:
        drain = Drain(house, "n1")
        assert house.departures.cancel("t", "the caller gave up waiting")
        assert "called off: the caller gave up waiting" in str(drain.ended())

    assert house.departures.leaving == (B,)
    assert house.fleet.ended == []
    assert not house.departures.cancel("t", "again"), "it has ended"
    assert house.drain("n1").node == B


def test_a_cancel_between_mark_and_drain_counts(house: House) -> None:
    house.catalogue.ranks = (B,)
    house.departures.mark("t", DrainRequest(node="n1", force=True, wait_s=0))
    house.departures.cancel("t", "gave up")

    with pytest.raises(ClusterError, match="called off: gave up"):
        house.departures.drain("t")
    assert house.catalogue.ranks == (B,), "nothing was unloaded"


def test_a_node_is_taken_back_before_during_and_after_its_drain(house: House) -> None:
    with house.moves:
        drain = Drain(house, "n1")
        assert house.departures.undrain("n1") == B
        assert "called off: it was taken back" in str(drain.ended())
    assert house.departures.leaving == ()

    house.drain("n1")
    house.departures.undrain("n1")
    assert house.departures.leaving == ()
    with pytest.raises(RequestError, match="is not leaving fleet 'default'"):
        house.departures.undrain("n1")


def test_a_node_that_has_left_the_cluster_is_forgotten(house: House) -> None:
    house.drain("n1")
    joined = replace(house.fleet.rows.pop(), node=NodeId("c" * 56))
    house.fleet.refresh()
    assert house.departures.leaving == ()

    # The host joins again: Ray gives it another id.
    house.fleet.rows.append(joined)
    house.drain("n0")
    assert house.departures.leaving == (A,)


def test_a_planner_that_was_replaced_in_between_does_not_know_the_drain(house: House) -> None:
    with pytest.raises(ClusterError, match="planner was lost after it had marked the node"):
        house.departures.drain("t")
