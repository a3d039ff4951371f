"""Nodes that go in the middle of a load, in virtual time: the load machine decides, its instructions are executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import check
from megamind_ray.core.ids import NodeId, Rank
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Topology
from megamind_ray.errors import ClusterError, RequestError
from megamind_ray.sim import NodeLoss, Simulation, WorkerLoss, simulate_plan
from megamind_ray.units import MIB

MakePlan: TypeAlias = Callable[..., Plan]
MakeTopology: TypeAlias = Callable[..., Topology]
Said = TypeVar("Said")
N1, N3 = NodeId("n1"), NodeId("n3")
MESHES = [Parallel(dp=3), Parallel(tp=2, dp=2), Parallel(pp=2, tp=2), Parallel(pp=2)]


@pytest.fixture(scope="module")
def small(config: Config) -> Config:
    """Extents so short that each node reads many, and pools that hold a few of them."""
    return replace(config, io=replace(config.io, extent_bytes=MIB, pool_extent_bytes=MIB, agent_threads=2))


def said(simulation: Simulation, kind: type[Said]) -> list[Said]:
    return [one for entry in simulation.events.entries for one in entry.instructions if isinstance(one, kind)]


def require_right(simulation: Simulation, plan: Plan) -> None:
    """Every rank has its bytes, and the log gives the same once more."""
    assert simulation.report.bytes_to_device == plan.bytes_to_device
    assert check(simulation.events) is None


@pytest.mark.parametrize("at_s", [0.0, 0.3, 1.5])
@pytest.mark.parametrize("node", ["n0", "n1", "n2"])
def test_the_rank_of_a_lost_node_is_loaded_on_the_spare_one(
    node: str, at_s: float, plan_of: MakePlan, topology_of: MakeTopology, small: Config
) -> None:
    topology = topology_of(4, 1, disk=20e6)
    plan = plan_of(Parallel(dp=3), replace(topology, nodes=topology.nodes[:3]), force_pool=True, config=small)
    whole = simulate_plan(plan, topology, small)
    broken = simulate_plan(plan, topology, small, faults=[NodeLoss(node=NodeId(node), at_s=at_s, noticed_after_s=2.0)])
    require_right(broken, plan)
    (drop,) = said(broken, ins.DropNode)
    assert [move.node for move in drop.moves] == [N3]
    assert sorted(rank.node for rank in broken.report.ranks) == sorted({"n0", "n1", "n2", "n3"} - {node})
    assert broken.report.seconds["total"] > max(whole.report.seconds["total"], at_s + 2.0)
    assert [fault.kind for fault in broken.report.faults] == ["node_lost"]
    assert [mark.kind for mark in broken.timeline.marks].count("node_lost") == 1


def test_a_load_that_is_nearly_done_when_a_node_goes_begins_its_rank_anew(
    plan_of: MakePlan, topology_of: MakeTopology, small: Config
) -> None:
    """The rank is done, others are not: it must not be counted among those that are."""
    topology = topology_of(4, 1, disk=20e6)
    plan = plan_of(Parallel(dp=3), replace(topology, nodes=topology.nodes[:3]), force_pool=True, config=small)
    whole = simulate_plan(plan, topology, small)
    done_s = {entry.event.rank: entry.at_s for entry in whole.events.entries if isinstance(entry.event, ev.RankDone)}
    first = min(done_s, key=lambda rank: done_s[rank])
    node = NodeId(whole.report.ranks[first].node)
    loss = NodeLoss(node=node, at_s=done_s[first] + 1e-4, noticed_after_s=30.0)
    broken = simulate_plan(plan, topology, small, faults=[loss])
    require_right(broken, plan)
    assert broken.report.ranks[first].node == "n3"


def test_without_a_spare_gpu_the_load_ends_and_says_why(
    plan_of: MakePlan, topology_of: MakeTopology, small: Config
) -> None:
    topology = topology_of(3, 1, disk=20e6)
    plan = plan_of(Parallel(dp=3), topology, force_pool=True, config=small)
    with pytest.raises(ClusterError, match=r"node n1 was lost \(no sign of life \(simulated\)\) with rank 1"):
        simulate_plan(plan, topology, small, faults=[NodeLoss(node=N1, at_s=0.5)])


def test_a_spare_node_that_is_gone_too_is_passed_over(
    plan_of: MakePlan, topology_of: MakeTopology, small: Config
) -> None:
    topology = topology_of(5, 1, disk=20e6)
    plan = plan_of(Parallel(dp=3), replace(topology, nodes=topology.nodes[:3]), force_pool=True, config=small)
    losses = [NodeLoss(node=N3, at_s=0.1, noticed_after_s=1.0), NodeLoss(node=N1, at_s=0.5, noticed_after_s=1.0)]
    broken = simulate_plan(plan, topology, small, faults=losses)
    require_right(broken, plan)
    assert [[move.node for move in drop.moves] for drop in said(broken, ins.DropNode)] == [["n3"], ["n4"]]


def test_a_node_that_nobody_knows_cannot_be_lost(plan_of: MakePlan, topology_of: MakeTopology, small: Config) -> None:
    topology = topology_of(2, 2)
    with pytest.raises(RequestError, match="fault of node 'n9': topology 'small' lacks it"):
        simulate_plan(
            plan_of(Parallel(tp=4), topology), topology, small, faults=[NodeLoss(node=NodeId("n9"), at_s=0.0)]
        )


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_goes_when_every_byte_arrives(
    data: Any, plan_of: MakePlan, topology_of: MakeTopology, small: Config
) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    gpus = data.draw(st.sampled_from([1, 2]))
    num_nodes = -(-mesh.world // gpus)
    topology = topology_of(num_nodes + 2, gpus, disk=20e6, pool=data.draw(st.sampled_from([32, 1024])) * MIB)
    inside = replace(topology, nodes=topology.nodes[:num_nodes])
    plan = plan_of(mesh, inside, force_pool=data.draw(st.booleans()), config=small)
    times = st.floats(0.0, 4.0)
    chosen = data.draw(st.lists(st.sampled_from(topology.nodes), min_size=1, max_size=2, unique_by=lambda one: one.id))
    faults: list[NodeLoss | WorkerLoss] = [
        NodeLoss(node=node.id, at_s=data.draw(times), noticed_after_s=data.draw(st.sampled_from([0.0, 0.5, 3.0])))
        for node in chosen
    ]
    if data.draw(st.booleans()):
        rank = data.draw(st.sampled_from(list(mesh.ranks)))
        faults.append(WorkerLoss(rank=Rank(rank), at_s=data.draw(times), noticed_after_s=0.1, restart_s=0.5))
    broken = simulate_plan(plan, topology, small, faults=faults)
    require_right(broken, plan)
