"""Workers that die and extents that fail, in virtual time: the load machine decides, its instructions are executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from megamind_ray.config import Config, LoadConfig
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import check
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import DIRECT, Plan
from megamind_ray.core.topology import Topology
from megamind_ray.errors import ClusterError, RequestError, SourceError
from megamind_ray.sim import ExtentFault, Simulation, WorkerLoss, simulate_plan

MakePlan: TypeAlias = Callable[..., Plan]
MakeTopology: TypeAlias = Callable[..., Topology]
N0, N1 = NodeId("n0"), NodeId("n1")


def said(simulation: Simulation, kind: type) -> list[ins.Instruction]:
    return [one for entry in simulation.events.entries for one in entry.instructions if isinstance(one, kind)]


def first_extent(plan: Plan, node: str, *, direct: bool) -> ExtentId:
    rows = plan.tables["extents"].to_pylist()
    return next(ExtentId(row["extent"]) for row in rows if row["node"] == node and (row["route"] == DIRECT) is direct)


@pytest.fixture
def topology(topology_of: MakeTopology) -> Topology:
    return topology_of(disk=200e6)


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.2])
def test_the_successor_of_a_lost_worker_gets_everything(
    at_s: float, plan_of: MakePlan, topology: Topology, config: Config
) -> None:
    plan = plan_of(Parallel(dp=2, tp=2), topology)
    whole = simulate_plan(plan, topology, config)
    loss = WorkerLoss(rank=Rank(1), at_s=at_s, noticed_after_s=0.1, restart_s=2.0)
    broken = simulate_plan(plan, topology, config, faults=[loss])
    assert said(broken, ins.ReplaceWorker) == [ins.ReplaceWorker(rank=Rank(1), generation=Generation(1))]
    assert {one.node for one in said(broken, ins.ReadAgain) if isinstance(one, ins.ReadAgain)} == {N0, N1}
    assert broken.report.ranks[1].bytes_to_device == whole.report.ranks[1].bytes_to_device
    assert broken.report.seconds["total"] > max(whole.report.seconds["total"], 2.1)
    assert [fault.kind for fault in broken.report.faults] == ["worker_lost"]
    assert broken.report.bytes_from_storage == plan.bytes_from_storage
    assert broken.report.bytes_retried > 0
    assert [mark.kind for mark in broken.timeline.marks].count("worker_lost") == 1
    assert check(broken.events) is None


def test_a_worker_that_died_when_it_had_all_is_noticed_before_the_load_is_done(
    plan_of: MakePlan, topology: Topology, config: Config
) -> None:
    """Rank 0 dies after its last byte, while rank 3, which is slower, still loads; nobody told the planner yet."""
    plan = plan_of(Parallel(pp=2, tp=2), topology)
    whole = simulate_plan(plan, topology, config)
    done_s = {entry.event.rank: entry.at_s for entry in whole.events.entries if isinstance(entry.event, ev.RankDone)}
    first = min(done_s, key=lambda rank: done_s[rank])
    loss = WorkerLoss(rank=first, at_s=done_s[first] + 1e-4, noticed_after_s=100.0)
    broken = simulate_plan(plan, topology, config, faults=[loss])
    assert said(broken, ins.ReplaceWorker) == [ins.ReplaceWorker(rank=first, generation=Generation(1))]
    assert broken.report.bytes_to_device == plan.bytes_to_device


def test_a_worker_that_is_lost_too_often_ends_the_load(plan_of: MakePlan, topology: Topology, config: Config) -> None:
    plan = plan_of(Parallel(tp=4), topology)
    once = replace(config, load=LoadConfig(max_worker_restarts=0))
    with pytest.raises(ClusterError, match=r"rank 2 .*its worker was lost 1 times"):
        simulate_plan(plan, topology, once, faults=[WorkerLoss(rank=Rank(2), at_s=0.05)])


@pytest.mark.parametrize("direct", [False, True])
def test_an_extent_that_fails_on_one_node_is_read_on_the_other(
    direct: bool, plan_of: MakePlan, topology: Topology, config: Config
) -> None:
    plan = plan_of(Parallel(pp=2, tp=2), topology)
    fault = ExtentFault(extent=first_extent(plan, "n0", direct=direct), node=N0, after_s=0.1)
    broken = simulate_plan(plan, topology, config, faults=[fault])
    (again,) = said(broken, ins.ReadAgain)
    assert isinstance(again, ins.ReadAgain)
    assert (again.node, again.extents) == (N1, (fault.extent,))
    assert broken.report.bytes_to_device == plan.bytes_to_device
    row = plan.tables["extents"].to_pylist()[fault.extent]
    assert broken.report.bytes_retried == row["end"] - row["begin"]
    assert broken.report.bytes_from_storage == plan.bytes_from_storage - broken.report.bytes_retried
    assert [kind.kind for kind in broken.report.faults] == ["extent_failed"]
    assert broken.report.bytes_over_network > 0


def test_an_extent_that_no_node_can_read_ends_the_load(plan_of: MakePlan, topology: Topology, config: Config) -> None:
    plan = plan_of(Parallel(tp=4), topology)
    extent = first_extent(plan, "n0", direct=False)
    faults = [ExtentFault(extent=extent, node=node) for node in (N0, N1)]
    with pytest.raises(SourceError, match=f"extent {extent} cannot be read"):
        simulate_plan(plan, topology, config, faults=faults)


def test_an_extent_that_another_node_would_not_read_either_ends_the_load(
    plan_of: MakePlan, topology: Topology, config: Config
) -> None:
    plan = plan_of(Parallel(tp=4), topology)
    fault = ExtentFault(extent=first_extent(plan, "n0", direct=False), node=N0, retryable=False)
    with pytest.raises(SourceError):
        simulate_plan(plan, topology, config, faults=[fault])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (WorkerLoss(rank=Rank(9), at_s=0.0), "fault on rank 9: the plan has ranks 0 to 3"),
        (ExtentFault(extent=ExtentId(999), node=N0), "fault of extent 999 on node 'n0': the plan has extents 0 to"),
        (ExtentFault(extent=ExtentId(0), node=NodeId("n9")), "fault of extent 0 on node 'n9'"),
    ],
    ids=["rank", "extent", "node"],
)
def test_a_fault_of_what_is_not_there_is_refused(
    fault: WorkerLoss | ExtentFault, message: str, plan_of: MakePlan, topology: Topology, config: Config
) -> None:
    with pytest.raises(RequestError, match=message):
        simulate_plan(plan_of(Parallel(tp=4), topology), topology, config, faults=[fault])
