"""A plan in virtual time: how long it takes, what is busy meanwhile, and what happens when something breaks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megamind_ray.config import Config
from megamind_ray.core.event_log import EventLog
from megamind_ray.core.exchange import RELAY_SHARE
from megamind_ray.core.ids import NodeId, Rank
from megamind_ray.core.load_machine import LoadFacts
from megamind_ray.core.plan import Plan
from megamind_ray.core.report import Kept, LoadReport
from megamind_ray.core.timeline import Timeline
from megamind_ray.core.topology import Topology
from megamind_ray.errors import RequestError
from megamind_ray.planning.bound import plan_bound
from megamind_ray.planning.capacity import choose_keep_blocks, pool_budget_bytes
from megamind_ray.planning.spares import spares_beside
from megamind_ray.sim.agent import Agent
from megamind_ray.sim.clock import Task
from megamind_ray.sim.driver import Driver
from megamind_ray.sim.faults import ExtentFault, LoadFault, NodeLoss, WorkerLoss
from megamind_ray.sim.outcome import Outcome, build_report, build_timeline
from megamind_ray.sim.plan_work import cut_work
from megamind_ray.sim.work import Work
from megamind_ray.sim.world import Place, World

__all__ = ["MAX_FLOWS", "Simulation", "simulate_plan"]

MAX_FLOWS = 1_200_000
"""Flows that are simulated before extents are merged: about 20 s of a processor."""

_MAX_MOMENTS = 10_000  # at which rates are shared out, where flows begin and end all the time
_MIN_MOMENTS = 1_000
_LANES_PER_MOMENT = 2_000_000  # sharing out takes as long as there are lanes
_MIN_UNITS_IN_POOL = 4  # merged units leave room for as many at a time


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a simulation gave.

    Attributes:
        report: As a load's, of kind ``simulation``.
        timeline: As a load's, predicted.
        events: Every event that the load machine took, when, and what it said; it can be replayed.
    """

    report: LoadReport
    timeline: Timeline
    events: EventLog


def simulate_plan(
    plan: Plan,
    topology: Topology,
    config: Config,
    *,
    faults: Sequence[LoadFault] = (),
    max_flows: int = MAX_FLOWS,
    exact: bool = False,
    started_at: str = "",
    release: str = "",
) -> Simulation:
    """Executes a plan in virtual time.

    Args:
        plan: What to move.
        topology: The hardware; it has the nodes and GPUs of the plan.
        config: Threads, pools, bounds.
        faults: What is to go wrong meanwhile.
        max_flows: Of larger plans, consecutive extents are merged until about so many flows are left; the notes of the
            report say so.
        exact: Share out rates whenever a flow begins or ends, and merge nothing. By default what happens within
            1/10,000 of the time that the load takes at least is handled together.
        started_at: For the report.
        release: For the event log.

    Raises:
        RequestError: The topology lacks a node or GPU of the plan, or a fault names what is not there.
        CapacityError: The blocks of an extent do not fit a pool.
        MegamindError: What the load machine gives a load up with.
    """
    places = _places(plan, topology)
    _check_faults(plan, topology, faults)
    spares = spares_beside(plan, topology) if any(isinstance(fault, NodeLoss) for fault in faults) else ()
    kept = choose_keep_blocks(plan, topology, config) if plan.keep else {}
    taking_part = _nodes_of(plan) | {spare.node for spare in spares}
    credit = _credit_bytes(plan, topology, config, kept, taking_part)
    work = cut_work(
        plan,
        max_flows=2**62 if exact else max_flows,
        max_unit_bytes=int(min(credit.values(), default=0) * RELAY_SHARE / _MIN_UNITS_IN_POOL),
    )
    world = World(
        topology,
        work,
        config,
        places,
        is_remote=config.io.is_remote(plan.root),
        is_referenced=plan.is_referenced,
        chunk_bytes=plan.chunk_bytes,
        max_samples=_max_samples(work),
        spares={spare.node for spare in spares},
    )
    bound = plan_bound(plan, world.model)
    if not exact:
        world.fluid.resolution_s = bound.seconds / _num_moments(work)
    ranks = plan.tables["ranks"]
    facts = replace(
        work.facts(max_worker_restarts=config.load.max_worker_restarts),
        home=work.node_of_rank,
        arena_bytes=tuple(ranks["arena_bytes"].to_pylist()),
        line=plan.line,
        spares=spares,
    )
    driver = _run(world, facts, config, credit, faults)
    if driver.error is not None:
        raise driver.error
    outcome = Outcome(
        plan=plan,
        world=world,
        driver=driver,
        bound=bound,
        kept=_kept(plan, {node: blocks for node, blocks in kept.items() if node in driver.agents}),
        credit_bytes=credit,
        started_at=started_at,
    )
    return Simulation(
        report=build_report(outcome),
        timeline=build_timeline(outcome),
        events=EventLog(facts=driver.machine.facts, entries=tuple(driver.log), load="simulation", release=release),
    )


def _run(
    world: World, facts: LoadFacts, config: Config, credit: Mapping[NodeId, int], faults: Sequence[LoadFault]
) -> Driver:
    def new_agent(node: NodeId, agents: Mapping[NodeId, Agent], failing: Mapping[int, ExtentFault]) -> Agent:
        return Agent(node, world, credit_bytes=credit[node], peers=agents, faults=failing)

    driver = Driver(world, facts, config, new_agent, faults)
    task = Task(driver.steps())
    while not task.is_done and world.fluid.advance():
        pass
    assert task.is_done, "the planner looks around for ever"
    return driver


def _places(plan: Plan, topology: Topology) -> dict[Rank, Place]:
    node_index = {node.id: index for index, node in enumerate(topology.nodes)}
    ranks = plan.tables["ranks"]
    places = {}
    for rank, (name, gpu) in enumerate(zip(ranks["node"].to_pylist(), ranks["gpu"].to_pylist(), strict=True)):
        index = node_index.get(NodeId(name))
        indices = [] if index is None else [item.index for item in topology.nodes[index].gpus]
        if index is None or gpu not in indices:
            raise RequestError(
                f"rank {rank} of the plan is on GPU {name}:{gpu}, which topology {topology.name!r} lacks; give the "
                "topology that the plan was made for"
            )
        places[Rank(rank)] = Place(index, indices.index(gpu))

    if missing := sorted(_nodes_of(plan) - set(node_index)):
        raise RequestError(
            f"node {missing[0]} reads for the plan, and topology {topology.name!r} lacks it; give the topology that "
            "the plan was made for"
        )
    return places


def _nodes_of(plan: Plan) -> set[NodeId]:
    """Nodes that read for the plan, or have ranks of it."""
    return {NodeId(name) for table in ("ranks", "extents") for name in plan.tables[table]["node"].unique().to_pylist()}


def _check_faults(plan: Plan, topology: Topology, faults: Sequence[LoadFault]) -> None:
    num_extents, nodes = len(plan.tables["extents"]), _nodes_of(plan)
    for fault in faults:
        if isinstance(fault, WorkerLoss):
            if fault.rank not in plan.parallel.ranks:
                raise RequestError(f"fault on rank {fault.rank}: the plan has ranks 0 to {plan.parallel.world - 1}")
        elif isinstance(fault, NodeLoss):
            if fault.node not in {node.id for node in topology.nodes}:
                raise RequestError(f"fault of node {fault.node!r}: topology {topology.name!r} lacks it")
        elif not 0 <= fault.extent < num_extents or fault.node not in nodes:
            raise RequestError(
                f"fault of extent {fault.extent} on node {fault.node!r}: the plan has extents 0 to {num_extents - 1} "
                f"and nodes {', '.join(sorted(nodes))}"
            )


def _credit_bytes(
    plan: Plan, topology: Topology, config: Config, kept: Mapping[NodeId, np.ndarray], nodes: Collection[NodeId]
) -> dict[NodeId, int]:
    """By node, what blocks on their way may take of its pool, as the planner gives it."""
    sizes = plan.tables["blocks"]["nbytes"].to_numpy()
    return {
        node.id: pool_budget_bytes(node, config) - (int(sizes[kept[node.id]].sum()) if node.id in kept else 0)
        for node in topology.nodes
        if node.id in nodes
    }


def _kept(plan: Plan, kept: Mapping[NodeId, np.ndarray]) -> Kept:
    if not plan.keep:
        return Kept()
    sizes = plan.tables["blocks"]["nbytes"].to_numpy()
    blocks = np.concatenate([np.zeros(0, np.int64), *kept.values()])
    missing = int(sizes.sum() - sizes[np.unique(blocks)].sum())
    return Kept(
        num_blocks=len(blocks),
        num_bytes=int(sizes[blocks].sum()),
        bytes_not_kept=missing,
        reason="the pool's share for kept blocks is full (pool.max_fraction x pool.keep_fraction)" if missing else "",
    )


def _max_samples(work: Work) -> int:
    """Samples of a series: fewer where there are many series."""
    return max(32, min(512, 200_000 // (len(work.node_of_rank) + 3 * len(work.nodes))))


def _num_moments(work: Work) -> int:
    relays = sum(len(peers) for peers in work.relays.values())
    num_lanes = len(work.node_of_rank) + 4 * len(work.nodes) + relays
    return max(_MIN_MOMENTS, min(_MAX_MOMENTS, _LANES_PER_MOMENT // num_lanes))
