"""Recorded loads without Ray: agents and ranks of two nodes as threads, each with a recorder of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, time
from typing import Any

import numpy as np
import pytest

from megamind_ray.actors.agent_load import AgentLoad
from megamind_ray.actors.block_pool import PoolClosedError
from megamind_ray.actors.gpu_worker import GpuWorker
from megamind_ray.actors.messages import Consumer, Delivery, rank_consumer
from megamind_ray.actors.node_agent import NodeAgent
from megamind_ray.actors.rank_load import RankLoad
from megamind_ray.actors.recording import RecordBook
from megamind_ray.actors.ticket import Ticket
from megamind_ray.config import Config, load_config
from megamind_ray.core.ids import Generation, LoadId, NodeId, Rank
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.recorder import Recorded, Recorder, RecordSettings
from megamind_ray.core.recording import RawRecord, measured_timeline
from megamind_ray.core.timeline import Timeline
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.session import RankSession
from megamind_ray.errors import ClusterError
from megamind_ray.io import open_manifest
from megamind_ray.planning import build_demands, build_plan, compile_agent, compile_rank
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.fakes import MemoryPlane
from megamind_ray.units import GIB, MIB

LOAD = LoadId("m#1")
FIRST = Generation(0)
BOUND_S = 30.0
NO_BLOCKS = np.zeros(0, np.int64)
CREDIT_BYTES = MIB


class RecordedCluster:
    """Two nodes of two GPUs that load a checkpoint; every agent and every rank records."""

    def __init__(self, folder: Path, parallel: Parallel, *, force_pool: bool) -> None:
        overrides: dict[str, dict[str, object]] = {
            "io": {"chunk_bytes": 64 * 1024, "extent_bytes": 128 * 1024},
            "routing": {"force_pool": force_pool, "min_direct_bytes": 1},
            "deadlines": {"poll_s": 0.2},
        }
        config: Config = load_config(overrides=overrides, environ={})
        settings = RecordSettings(started_at_s=time())
        self.plane = MemoryPlane()
        self.recorders: list[Recorder] = []
        manifest = open_manifest(folder)
        topology = Topology(nodes=tuple(_node(name) for name in ("n0", "n1")))
        self.plan = build_plan(manifest, build_demands(manifest, parallel), topology, config=config)
        self.homes = {row["rank"]: NodeId(row["node"]) for row in self.plan.tables["ranks"].to_pylist()}
        self.agents: dict[NodeId, AgentLoad] = {}
        for node in topology.nodes:
            program = compile_agent(
                self.plan, manifest, node.id, LOAD, credit_bytes=CREDIT_BYTES, keep_blocks=NO_BLOCKS
            )
            peers = {other.id: _Peer(self.agents, other.id) for other in topology.nodes if other.id != node.id}
            self.agents[node.id] = AgentLoad(
                program, config, plane=self.plane, peers=peers, recorder=self._recorder(settings)
            )
        self.ranks: dict[int, RankLoad] = {}
        for rank, node_id in self.homes.items():
            rank_program = compile_rank(self.plan, manifest, Rank(rank), LOAD)
            session = RankSession(rank_program, HostArena(64 * MIB), config, recorder=self._recorder(settings))
            self.ranks[rank] = RankLoad(session, self.plane, node=node_id, generation=FIRST, deadlines=config.deadlines)

    def _recorder(self, settings: RecordSettings) -> Recorder:
        self.recorders.append(settings.recorder(wall=time, steps=perf_counter))
        return self.recorders[-1]

    def run(self) -> None:
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                self.ranks[rank].receive(_Home(self.agents[self.homes[rank]], rank))
            except BaseException as error:  # noqa: BLE001 - shown below, in the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for agent in self.agents.values():
            agent.start()
        for thread in threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), "a rank still waits for blocks"
        for agent in self.agents.values():
            agent.close()
        assert not errors, errors

    @property
    def timeline(self) -> Timeline:
        return measured_timeline([recorder.page() for recorder in self.recorders], node_of_rank=self.homes)

    @property
    def bytes_from_storage(self) -> int:
        agents = sum(agent.status().bytes_read for agent in self.agents.values())
        return agents + sum(rank.session.reads.payload_bytes for rank in self.ranks.values())

    @property
    def bytes_to_device(self) -> int:
        return sum(rank.session.bytes_to_device for rank in self.ranks.values())


class _Peer:
    """The agent of another node in the same process."""

    def __init__(self, agents: dict[NodeId, AgentLoad], node: NodeId) -> None:
        self._agents = agents
        self._node = node

    def exchange(
        self, load: LoadId, consumer: Consumer, acked: Sequence[int], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        try:
            return self._agents[self._node].exchange(consumer, FIRST, acked=acked, limit=limit, timeout_s=timeout_s)
        except PoolClosedError:
            return None


class _Home:
    """The agent of a rank's node in the same process."""

    def __init__(self, agent: AgentLoad, rank: int) -> None:
        self._agent = agent
        self._rank = Rank(rank)

    def exchange(
        self, acked: Sequence[int], rejected: Sequence[Delivery], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        return self._agent.exchange(
            rank_consumer(self._rank), FIRST, acked=acked, rejected=rejected, limit=limit, timeout_s=timeout_s
        )

    def retire(self) -> None:
        self._agent.retire_rank(self._rank, FIRST)


def _node(name: str) -> Node:
    gpus = tuple(Gpu(index=index, memory_bytes=GIB, free_bytes=GIB) for index in range(2))
    return Node(id=NodeId(name), gpus=gpus, memory_bytes=GIB, pool_bytes=64 * MIB)


def total(timeline: Timeline, kind: str, track: str | None = None) -> int:
    rows = timeline.spans.to_pylist()
    return sum(row["nbytes"] for row in rows if row["kind"] == kind and track in (None, row["track"]))


def values(timeline: Timeline, series: str) -> list[float]:
    return [row["value"] for row in timeline.samples.to_pylist() if row["series"] == series]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("llama"), num_files=3)


@pytest.fixture(scope="module")
def pooled(folder: Path) -> RecordedCluster:
    """A load through the pools of two nodes, which has run."""
    cluster = RecordedCluster(folder, Parallel(tp=2, dp=2), force_pool=True)
    cluster.run()
    return cluster


@pytest.fixture(scope="module")
def direct(folder: Path) -> RecordedCluster:
    """A load of which ranks read a part themselves, which has run."""
    cluster = RecordedCluster(folder, Parallel(tp=2, pp=2), force_pool=False)
    cluster.run()
    return cluster


@pytest.fixture(params=["pooled", "direct"])
def cluster(request: pytest.FixtureRequest) -> RecordedCluster:
    made: RecordedCluster = request.getfixturevalue(request.param)
    return made


def test_every_byte_of_storage_is_in_one_read_span(cluster: RecordedCluster) -> None:
    assert total(cluster.timeline, "read") == cluster.bytes_from_storage > 0
    assert cluster.timeline.dropped_spans == 0


def test_copy_spans_add_up_to_what_is_on_devices(cluster: RecordedCluster) -> None:
    timeline = cluster.timeline

    assert total(timeline, "copy") == cluster.bytes_to_device > 0
    for rank, load in cluster.ranks.items():
        assert total(timeline, "copy", f"rank {rank}") == load.session.bytes_to_device
        assert values(timeline, f"bytes rank {rank}/device")[-1] == load.session.bytes_to_device


def test_direct_reads_are_spans_of_their_ranks(direct: RecordedCluster) -> None:
    timeline = direct.timeline

    by_rank = {rank: total(timeline, "read", f"rank {rank}") for rank in direct.ranks}

    assert by_rank == {rank: load.session.reads.payload_bytes for rank, load in direct.ranks.items()}
    assert sum(by_rank.values()) > 0


def test_blocks_are_cut_once_and_put_where_they_are_needed(pooled: RecordedCluster) -> None:
    timeline = pooled.timeline
    sent = {node: agent.status().bytes_sent for node, agent in pooled.agents.items()}
    cut = {node: total(timeline, "cut", f"{node}/pool") for node in pooled.agents}
    put = {node: total(timeline, "put", f"{node}/pool") for node in pooled.agents}

    assert sum(cut.values()) == int(pooled.plan.tables["blocks"]["nbytes"].to_numpy().sum())
    assert put["n0"] == cut["n0"] + sent["n1"]
    assert put["n1"] == cut["n1"] + sent["n0"]


def test_the_wire_has_what_came_from_the_other_node(pooled: RecordedCluster) -> None:
    sent = {node: agent.status().bytes_sent for node, agent in pooled.agents.items()}

    assert total(pooled.timeline, "wire", "n0/wire") == sent["n1"] > 0
    assert total(pooled.timeline, "wire", "n1/wire") == sent["n0"] > 0


def test_credits_stay_within_the_limit_and_end_at_nothing(pooled: RecordedCluster) -> None:
    for node, agent in pooled.agents.items():
        used = values(pooled.timeline, f"bytes {node}/host")
        assert max(used) == agent.status().peak_credit_bytes <= CREDIT_BYTES
        assert used[-1] == 0


def test_read_spans_name_their_files(pooled: RecordedCluster) -> None:
    rows = pooled.timeline.spans.to_pylist()

    labels = {row["label"] for row in rows if row["kind"] == "read"}

    assert labels == set(pooled.plan.tables["files"]["path"].to_pylist())


def test_spans_lie_within_the_load(cluster: RecordedCluster) -> None:
    rows = cluster.timeline.spans.to_pylist()

    assert all(0 <= row["begin_s"] <= row["end_s"] <= BOUND_S for row in rows)
    assert {row["track"] for row in rows} >= {f"rank {rank}" for rank in cluster.ranks}


def test_an_agent_gives_the_record_of_its_latest_load_only(folder: Path) -> None:
    config = load_config(environ={})
    manifest = open_manifest(folder)
    plan = build_plan(manifest, build_demands(manifest, Parallel()), Topology(nodes=(_node("n0"),)), config=config)
    agent = NodeAgent(MemoryPlane())
    for number in (1, 2):
        program = compile_agent(
            plan, manifest, NodeId("n0"), LoadId(f"m#{number}"), credit_bytes=MIB, keep_blocks=NO_BLOCKS
        )
        agent.open_load(program, {}, config, RecordSettings(started_at_s=time()))
        load = agent._loads[LoadId(f"m#{number}")]
        load._pool.reserve(number)

    assert [row[2] for row in agent.recorded(LoadId("m#2"), 0).samples] == [2]
    assert agent.recorded(LoadId("m#1"), 0) == Recorded()
    assert agent.recorded(LoadId("m#9"), 0) == Recorded()


def test_a_worker_gives_the_record_of_a_load_that_failed(folder: Path) -> None:
    config = load_config(overrides={"routing": {"min_direct_bytes": 1}}, environ={})
    manifest = open_manifest(folder)
    plan = build_plan(manifest, build_demands(manifest, Parallel()), Topology(nodes=(_node("n0"),)), config=config)
    worker = GpuWorker(64 * MIB, plane=MemoryPlane(), place=(NodeId("n0"), 0))

    class Refuses:
        """An agent's handle, whose calls fail when all direct reads are done."""

        def __getattr__(self, name: str) -> Any:
            raise ClusterError("the agent is gone")

    program = compile_rank(plan, manifest, Rank(0), LOAD)
    with pytest.raises(ClusterError, match="the agent is gone"):
        worker.load(program, Refuses(), FIRST, config, RecordSettings(started_at_s=time()))

    page = worker.recorded(LOAD, 0)
    assert sum(row[4] for row in page.spans if row[1] == "read") == manifest.nbytes


def test_a_load_that_is_not_recorded_records_nothing(folder: Path) -> None:
    config = load_config(environ={})
    manifest = open_manifest(folder)
    plan = build_plan(manifest, build_demands(manifest, Parallel()), Topology(nodes=(_node("n0"),)), config=config)
    agent = NodeAgent(MemoryPlane())
    program = compile_agent(plan, manifest, NodeId("n0"), LOAD, credit_bytes=MIB, keep_blocks=NO_BLOCKS)

    agent.open_load(program, {}, config)
    agent._loads[LOAD]._pool.reserve(1)

    assert agent.recorded(LOAD, 0) == Recorded()


def test_phases_of_the_planner_are_spans_of_a_recorded_load() -> None:
    ticket = Ticket()
    with ticket.timed("manifest"):
        pass
    assert ticket.recorded() is None
    ticket.start_recording()
    with ticket.timed("manifest"):
        pass
    with pytest.raises(ZeroDivisionError), ticket.timed("plan"):
        raise ZeroDivisionError
    with ticket.timed("transfer"):  # others work
        pass

    raw = ticket.recorded()

    assert raw is not None
    rows = raw.assembled().timeline.spans.to_pylist()
    assert [(row["track"], row["kind"]) for row in rows] == [
        ("planner", "manifest"),
        ("planner", "plan"),
        ("planner", "wait"),
    ]


def test_records_that_nobody_fetches_are_pushed_out() -> None:
    book = RecordBook()
    for number in range(10):
        book.keep(f"ticket {number}", RawRecord())
    book.keep("not recorded", None)

    assert [book.take(f"ticket {number}") is not None for number in range(10)] == [False] * 6 + [True] * 4
    assert book.take("ticket 9") is None, "it was taken"
    assert book.take("not recorded") is None
