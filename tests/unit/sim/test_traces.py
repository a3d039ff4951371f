"""The simulator and the real agents and ranks, driven by the same machine: equal events, equal instructions."""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megamind_ray.actors.agent_load import AgentLoad
from megamind_ray.actors.block_pool import PoolClosedError
from megamind_ray.actors.messages import Consumer, Delivery, rank_consumer
from megamind_ray.actors.rank_load import RankLoad
from megamind_ray.config import Config, load_config
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import LogEntry, as_document
from megamind_ray.core.ids import ExtentId, Generation, LoadId, NodeId, Rank
from megamind_ray.core.load_machine import LoadMachine, LoadState
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.session import RankSession
from megamind_ray.io import open_manifest
from megamind_ray.planning import build_demands, build_plan, compile_agent, compile_rank, load_facts
from megamind_ray.sim import ExtentFault, WorkerLoss, simulate_plan
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.fakes import MemoryPlane
from megamind_ray.units import GIB, MIB

LOAD, FIRST = LoadId("m#1"), Generation(0)
N0 = NodeId("n0")
BOUND_S = 30.0
NO_BLOCKS = np.zeros(0, np.int64)


class RealLoad:
    """Agents and ranks as threads of this process, and what the planner does about what the machine says.

    Args:
        plan: What to move.
        manifest: The checkpoint.
        config: Settings.
        blind: A node that cannot see the files.
        lost: A rank whose first worker dies before it asks for anything.
    """

    def __init__(
        self, plan: Plan, manifest: Manifest, config: Config, *, blind: NodeId | None = None, lost: Rank | None = None
    ) -> None:
        self.machine = LoadMachine(load_facts(plan, max_worker_restarts=config.load.max_worker_restarts))
        self.log: list[LogEntry] = []
        self._plan, self._manifest, self._config, self._lost = plan, manifest, config, lost
        self._plane = MemoryPlane()
        self._home = {Rank(row["rank"]): NodeId(row["node"]) for row in plan.tables["ranks"].to_pylist()}
        self._events: deque[ev.Event] = deque([ev.LoadStarted()])
        self._ended: queue.Queue[ev.Event] = queue.Queue()
        self._heard: dict[NodeId, int] = {}
        self.agents: dict[NodeId, AgentLoad] = {}
        for node in self.machine.facts.nodes:
            program = compile_agent(plan, manifest, node, LOAD, credit_bytes=MIB, keep_blocks=NO_BLOCKS)
            if node == blind:
                program = replace(program, files=replace(program.files, root="/nowhere"))
            peers = {peer: _Peer(self.agents, peer) for peer in self.machine.facts.nodes if peer != node}
            self.agents[node] = AgentLoad(program, config, plane=self._plane, peers=peers)

    def run(self) -> list[LogEntry]:
        try:
            while self.machine.state in (LoadState.PLANNED, LoadState.RUNNING):
                if not self._events:
                    self._collect()
                while self._events:
                    event = self._events.popleft()
                    said = tuple(self.machine.handle(event))
                    self.log.append(LogEntry(at_s=0.0, event=event, instructions=said))
                    for instruction in said:
                        self._execute(instruction)
        finally:
            for agent in self.agents.values():
                agent.close()
        return self.log

    def _collect(self) -> None:
        try:
            self._events.append(self._ended.get(timeout=0.05))
        except queue.Empty:
            for node, agent in self.agents.items():
                failures = agent.status().failures
                for one in failures[self._heard.get(node, 0) :]:
                    self._events.append(
                        ev.ExtentFailed(extent=one.extent, node=node, error=one.error, retryable=one.retryable)
                    )
                self._heard[node] = len(failures)

    def _execute(self, instruction: ins.Instruction) -> None:
        match instruction:
            case ins.StartRank(rank=rank, generation=generation):
                if (rank, generation) == (self._lost, FIRST):
                    self._ended.put(ev.WorkerLost(rank=rank, generation=generation, reason="it died"))
                else:
                    threading.Thread(target=self._fill, args=(rank, generation), daemon=True).start()
            case ins.StartReads(node=node):
                self.agents[node].start()
            case ins.ReplaceWorker(rank=rank, generation=generation):
                self.agents[self._home[rank]].reset_rank(rank, generation)
                self._events.append(ev.WorkerReady(rank=rank, generation=generation))
            case ins.ReadAgain(node=node, extents=extents, ranks=ranks):
                fragment = compile_agent(
                    self._plan,
                    self._manifest,
                    node,
                    LOAD,
                    credit_bytes=MIB,
                    keep_blocks=NO_BLOCKS,
                    extents=extents,
                    ranks=ranks,
                )
                for home in {self._home[rank] for rank in ranks} - {node}:
                    self.agents[home].relay_from(node)
                self.agents[node].read_again(fragment, ranks)

    def _fill(self, rank: Rank, generation: Generation) -> None:
        session = RankSession(compile_rank(self._plan, self._manifest, rank, LOAD), HostArena(64 * MIB), self._config)
        home = self._home[rank]
        load = RankLoad(session, self._plane, node=home, generation=generation, deadlines=self._config.deadlines)
        try:
            load.receive(_Home(self.agents[home], rank, generation))
            self._ended.put(ev.RankDone(rank=rank, generation=generation))
        except Exception as error:  # noqa: BLE001 - the load shows it
            self._ended.put(ev.DeadlinePassed(what=f"rank {rank}: {error}"))


class _Peer:
    def __init__(self, agents: dict[NodeId, AgentLoad], node: NodeId) -> None:
        self._agents, self._node = agents, node

    def exchange(
        self, load: LoadId, consumer: Consumer, acked: Sequence[int], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        try:
            return self._agents[self._node].exchange(consumer, FIRST, acked=acked, limit=limit, timeout_s=timeout_s)
        except PoolClosedError:
            return None

    def give_up(self) -> None:
        """Its calls end soon by themselves."""


class _Home:
    def __init__(self, agent: AgentLoad, rank: Rank, generation: Generation) -> None:
        self._agent, self._rank, self._generation = agent, rank, generation

    def exchange(
        self, acked: Sequence[int], rejected: Sequence[Delivery], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        consumer = rank_consumer(self._rank)
        return self._agent.exchange(
            consumer, self._generation, acked=acked, rejected=rejected, limit=limit, timeout_s=timeout_s
        )

    def retire(self) -> None:
        self._agent.retire_rank(self._rank, self._generation)


@pytest.fixture(scope="module")
def loads() -> Config:
    overrides: dict[str, dict[str, object]] = {
        "io": {"chunk_bytes": 64 * 1024, "extent_bytes": 128 * 1024},
        "placement": {"policy": "first_fit"},
        "routing": {"force_pool": True},
        "deadlines": {"poll_s": 0.2},
    }
    return load_config(overrides=overrides, environ={})


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return open_manifest(llama_checkpoint(tmp_path_factory.mktemp("llama"), num_files=3))


@pytest.fixture(scope="module")
def topology() -> Topology:
    gpus = tuple(Gpu(index=index, memory_bytes=GIB, free_bytes=GIB) for index in range(2))
    node = Node(id=N0, gpus=gpus, memory_bytes=GIB, pool_bytes=64 * MIB)
    return Topology(nodes=(node, replace(node, id=NodeId("n1"))))


@pytest.fixture(scope="module")
def plan(manifest: Manifest, topology: Topology, loads: Config) -> Plan:
    return build_plan(manifest, build_demands(manifest, Parallel(dp=2, tp=2)), topology, config=loads)


def events_of(log: Sequence[LogEntry]) -> list[str]:
    """What happened, without times and the words of errors, in an order that does not depend on who was faster."""
    return sorted(_text(entry.event) for entry in log)


def instructions_of(log: Sequence[LogEntry]) -> list[str]:
    """What was said to it, likewise."""
    return sorted(_text(one) for entry in log for one in entry.instructions)


def _text(value: object) -> str:
    document: dict[str, Any] = as_document(value)
    document.pop("error", None)
    document.pop("reason", None)
    if "fault" in document:
        document["fault"].pop("where")
        document["fault"].pop("at_s")
    return json.dumps(document, sort_keys=True)


def test_a_load_without_faults_has_the_same_trace(
    plan: Plan, manifest: Manifest, topology: Topology, loads: Config
) -> None:
    real = RealLoad(plan, manifest, loads).run()
    simulated = simulate_plan(plan, topology, loads).events.entries
    assert events_of(simulated) == events_of(real)
    assert instructions_of(simulated) == instructions_of(real)
    # What is said before anything can happen is the same in its order, too.
    assert simulated[0].instructions == real[0].instructions
    assert simulated[-1].instructions == real[-1].instructions == (ins.CompleteLoad(),)


def test_a_lost_worker_has_the_same_trace(plan: Plan, manifest: Manifest, topology: Topology, loads: Config) -> None:
    real = RealLoad(plan, manifest, loads, lost=Rank(1)).run()
    loss = WorkerLoss(rank=Rank(1), at_s=0.0, noticed_after_s=0.0, restart_s=0.1)
    simulated = simulate_plan(plan, topology, loads, faults=[loss]).events.entries
    assert events_of(simulated) == events_of(real)
    assert instructions_of(simulated) == instructions_of(real)
    ready = [
        next(entry.instructions for entry in log if isinstance(entry.event, ev.WorkerReady))
        for log in (simulated, real)
    ]
    assert ready[0] == ready[1]
    assert [type(one) for one in ready[0]] == [ins.StartRank, ins.ReadAgain, ins.ReadAgain]


def test_a_node_that_cannot_see_the_files_has_the_same_trace(
    plan: Plan, manifest: Manifest, topology: Topology, loads: Config
) -> None:
    real = RealLoad(plan, manifest, loads, blind=N0).run()
    rows = plan.tables["extents"].to_pylist()
    faults = [ExtentFault(extent=ExtentId(row["extent"]), node=N0, after_s=0.0) for row in rows if row["node"] == N0]
    simulated = simulate_plan(plan, topology, loads, faults=faults).events.entries
    assert events_of(simulated) == events_of(real)
    assert instructions_of(simulated) == instructions_of(real)
    assert sum(isinstance(entry.event, ev.ExtentFailed) for entry in simulated) == len(faults)
