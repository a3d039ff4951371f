"""Node agents without Ray: a small cluster of threads that moves a real checkpoint through a memory plane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megamind_ray.actors.agent_load import AgentLoad
from megamind_ray.actors.block_pool import PoolClosedError
from megamind_ray.actors.messages import Consumer, Delivery, ExtentFailure, rank_consumer
from megamind_ray.actors.relays import Peer
from megamind_ray.config import Config, load_config
from megamind_ray.core.ids import ExtentId, Generation, LoadId, NodeId, Rank
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.session import RankSession
from megamind_ray.errors import ClusterError, IntegrityError
from megamind_ray.io import open_manifest
from megamind_ray.planning import build_demands, build_plan, choose_keep_blocks, compile_agent, compile_rank
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.fakes import MemoryPlane
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.units import GIB, MIB

if TYPE_CHECKING:
    import torch

LOAD = LoadId("m#1")
BOUND_S = 30.0


class SmallCluster:
    """Agents and sessions of one load; ``pull`` does what a GPU worker does."""

    def __init__(
        self,
        folder: Path,
        parallel: Parallel,
        *,
        gpus_per_node: int,
        keep: bool = False,
        blocks_in_pool: int = 0,
        peer: Peer | None = None,
    ) -> None:
        overrides = {
            "io": {"chunk_bytes": 64 * 1024, "extent_bytes": 128 * 1024, "pool_extent_bytes": 128 * 1024},
            "routing": {"force_pool": True},
            "deadlines": {"poll_s": 0.2},
            "retry": {"first_wait_s": 0.0, "attempts": 3},
        }
        self.config: Config = load_config(overrides=overrides, environ={})
        self.plane = MemoryPlane()
        self.manifest: Manifest = open_manifest(folder)
        num_nodes = parallel.world // gpus_per_node
        self.topology = Topology(nodes=tuple(_node(f"n{number}", gpus_per_node) for number in range(num_nodes)))
        demands = build_demands(self.manifest, parallel)
        self.plan: Plan = build_plan(self.manifest, demands, self.topology, config=self.config, keep=keep)
        self.home = {Rank(row["rank"]): NodeId(row["node"]) for row in self.plan.tables["ranks"].to_pylist()}
        kept = choose_keep_blocks(self.plan, self.topology, self.config) if keep else {}
        self.agents: dict[NodeId, AgentLoad] = {}
        peers = {node.id: peer or _Direct(self.agents, node.id) for node in self.topology.nodes}
        largest = int(self.plan.tables["blocks"]["nbytes"].to_numpy().max())
        for node in self.topology.nodes:
            program = compile_agent(
                self.plan,
                self.manifest,
                node.id,
                LOAD,
                credit_bytes=blocks_in_pool * largest or MIB,
                keep_blocks=kept.get(node.id, np.zeros(0, np.int64)),
            )
            others = {other: peer for other, peer in peers.items() if other != node.id}
            self.agents[node.id] = AgentLoad(program, self.config, plane=self.plane, peers=others)
        self.sessions = {rank: self.new_session(rank) for rank in self.home}

    def new_session(self, rank: Rank) -> RankSession:
        return RankSession(compile_rank(self.plan, self.manifest, rank, LOAD), HostArena(64 * MIB), self.config)

    def start(self) -> None:
        for agent in self.agents.values():
            agent.start()

    def pull(self, rank: Rank, generation: int = 0, *, at_most: int | None = None) -> None:
        """Takes blocks until none is missing, or so many were taken."""
        agent, session = self.agents[self.home[rank]], self.sessions[rank]
        acked: list[int] = []
        rejected: list[Delivery] = []
        taken = 0
        while len(session.missing_blocks) and (at_most is None or taken < at_most):
            deliveries = agent.exchange(
                rank_consumer(rank), Generation(generation), acked=acked, rejected=rejected, limit=1, timeout_s=BOUND_S
            )
            acked, rejected = [], []
            for one, data in zip(
                deliveries, self.plane.get([it.handle for it in deliveries], timeout_s=1), strict=True
            ):
                taken += 1
                try:
                    session.apply(one.block, data, one.crc32s)
                    acked.append(one.serial)
                except IntegrityError:
                    rejected.append(one)
        agent.exchange(
            rank_consumer(rank), Generation(generation), acked=acked, rejected=rejected, limit=0, timeout_s=0
        )

    def pull_all(self) -> None:
        errors: list[BaseException] = []

        def work(rank: Rank) -> None:
            try:
                self.pull(rank)
            except BaseException as error:  # noqa: BLE001 - shown below, in the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in self.sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), "a rank still waits for blocks"
        assert not errors, errors

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()


class _Direct:
    """A peer in the same process; as through Ray, a closed load shows as None."""

    def __init__(self, agents: dict[NodeId, AgentLoad], node: NodeId) -> None:
        self._agents = agents
        self._node = node

    def exchange(
        self, load: LoadId, consumer: Consumer, acked: Sequence[int], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        assert load == LOAD
        try:
            return self._agents[self._node].exchange(
                consumer, Generation(0), acked=acked, limit=limit, timeout_s=timeout_s
            )
        except PoolClosedError:
            return None

    def give_up(self) -> None:
        """Its calls end soon by themselves."""


def _node(name: str, num_gpus: int) -> Node:
    gpus = tuple(Gpu(index=index, memory_bytes=GIB, free_bytes=GIB) for index in range(num_gpus))
    return Node(id=NodeId(name), gpus=gpus, memory_bytes=GIB, pool_bytes=64 * MIB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("llama"), num_files=3)


Build = Callable[..., SmallCluster]


@pytest.fixture
def build(folder: Path) -> Iterator[Build]:
    clusters: list[SmallCluster] = []

    def make(parallel: Parallel, **more: Any) -> SmallCluster:
        clusters.append(SmallCluster(folder, parallel, **more))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def assert_exact(cluster: SmallCluster, folder: Path) -> None:
    for rank, session in cluster.sessions.items():
        session.finish()
        expected = expected_state_dict(folder, cluster.plan.parallel, rank)
        actual = session.state_dict()
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert same_bytes(actual[name], tensor), f"rank {rank}: {name}"


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    import torch

    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (left, right)))


@pytest.mark.parametrize(
    ("parallel", "gpus_per_node"),
    [
        (Parallel(tp=2), 2),
        (Parallel(tp=2, dp=2), 2),  # each node needs everything: half of it comes from the other
        (Parallel(tp=4), 2),
        (Parallel(pp=2, tp=2), 1),  # four nodes
    ],
    ids=str,
)
def test_every_rank_gets_its_bytes_and_storage_is_read_once(
    build: Build, folder: Path, parallel: Parallel, gpus_per_node: int
) -> None:
    cluster = build(parallel, gpus_per_node=gpus_per_node)
    cluster.start()
    cluster.pull_all()
    assert_exact(cluster, folder)
    statuses = [agent.status() for agent in cluster.agents.values()]
    assert sum(status.bytes_read for status in statuses) == cluster.plan.bytes_total
    assert sum(status.bytes_retried for status in statuses) == 0
    assert all(status.peak_credit_bytes <= MIB for status in statuses)
    assert not [fault for status in statuses for fault in status.faults]


def test_a_replica_reaches_each_node_once(build: Build) -> None:
    cluster = build(Parallel(dp=2, tp=2), gpus_per_node=2)
    cluster.start()
    cluster.pull_all()
    sent = sum(agent.status().bytes_sent for agent in cluster.agents.values())
    assert sent == cluster.plan.bytes_total


def test_nothing_is_left_in_the_pool_unless_it_is_kept(build: Build) -> None:
    cluster = build(Parallel(dp=2, tp=2), gpus_per_node=2)
    cluster.start()
    cluster.pull_all()
    assert [agent.close() for agent in cluster.agents.values()] == [{}, {}]
    assert cluster.plane.live_bytes == 0


def test_a_relay_that_waits_keeps_no_block_of_its_peer(build: Build) -> None:
    """Its bytes would stay in the peer's pool, while their credit is given to others."""
    cluster = build(Parallel(dp=3), gpus_per_node=1)
    cluster.start()
    cluster.pull_all()
    until_s = monotonic() + BOUND_S
    while cluster.plane.live_bytes and monotonic() < until_s:
        threading.Event().wait(0.01)
    assert cluster.plane.live_bytes == 0


def test_a_block_leaves_its_reader_once_in_each_direction_however_many_need_it(build: Build, folder: Path) -> None:
    cluster = build(Parallel(dp=4), gpus_per_node=1)
    cluster.start()
    cluster.pull_all()
    assert_exact(cluster, folder)
    sent = [cluster.agents[node].status().bytes_sent for node in cluster.plan.line]
    total = cluster.plan.bytes_total
    assert sum(sent) == 3 * total, "each of the others takes every byte in once"
    reads = {node: cluster.agents[node].status().bytes_read for node in cluster.plan.line}
    own = [reads[node] for node in cluster.plan.line]
    for place, num_bytes in enumerate(sent):
        below, above = sum(own[: place + 1]), sum(own[place:])
        assert num_bytes == below * (place < 3) + above * (place > 0)


def test_a_line_of_small_pools_never_waits_in_a_circle(build: Build, folder: Path) -> None:
    """A pool in the middle holds one block from each side, and all nodes have something for all others."""
    cluster = build(Parallel(dp=5), gpus_per_node=1, blocks_in_pool=4)
    cluster.start()
    cluster.pull_all()
    assert_exact(cluster, folder)


def test_nodes_further_on_do_not_wait_for_the_successor_of_a_lost_worker(folder: Path) -> None:
    """Its node has room for one block of others: what nobody takes must not keep it."""
    cluster = SmallCluster(folder, Parallel(dp=3), gpus_per_node=1, blocks_in_pool=4)
    try:
        middle = cluster.plan.line[1]
        lost = next(rank for rank, home in cluster.home.items() if home == middle)
        cluster.start()
        cluster.pull(lost, at_most=1)
        cluster.agents[middle].retire_rank(lost, Generation(0))
        others = [rank for rank in cluster.home if rank != lost]
        threads = [threading.Thread(target=cluster.pull, args=(rank,), daemon=True) for rank in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), "a node waits for the lost worker of another one"
        for rank in others:
            cluster.sessions[rank].finish()
    finally:
        cluster.close()


def test_kept_blocks_hold_every_byte_once_they_were_delivered(build: Build) -> None:
    cluster = build(Parallel(tp=2), gpus_per_node=2, keep=True)
    cluster.start()
    cluster.pull_all()
    (agent,) = cluster.agents.values()
    assert agent.status().kept.num_bytes == cluster.plan.bytes_total
    kept = agent.close()
    assert sum(block.nbytes for block in kept.values()) == cluster.plan.bytes_total == cluster.plane.live_bytes


@pytest.mark.parametrize("taken_before_it_died", [0, 1, 3])
def test_the_successor_of_a_lost_worker_gets_everything(build: Build, folder: Path, taken_before_it_died: int) -> None:
    cluster = build(Parallel(dp=2, tp=2), gpus_per_node=2)
    cluster.start()
    cluster.pull(Rank(1), at_most=taken_before_it_died)
    cluster.sessions[Rank(1)] = cluster.new_session(Rank(1))
    home = cluster.home[Rank(1)]
    cluster.agents[home].reset_rank(Rank(1), Generation(1))
    for node in cluster.agents:
        extents = [ExtentId(row["extent"]) for row in cluster.plan.tables["extents"].to_pylist() if row["node"] == node]
        fragment = compile_agent(
            cluster.plan,
            cluster.manifest,
            node,
            LOAD,
            credit_bytes=MIB,
            keep_blocks=np.zeros(0, np.int64),
            extents=extents,
            ranks=[Rank(1)],
        )
        cluster.agents[node].read_again(fragment, [Rank(1)])
    others = [
        threading.Thread(target=cluster.pull, args=(rank,), daemon=True) for rank in cluster.sessions if rank != 1
    ]
    for thread in others:
        thread.start()
    cluster.pull(Rank(1), generation=1)
    for thread in others:
        thread.join(BOUND_S)
    assert_exact(cluster, folder)


def test_a_damaged_block_is_cut_anew_and_the_fault_is_told(build: Build, folder: Path) -> None:
    cluster = build(Parallel(tp=2), gpus_per_node=2)
    cluster.plane.corrupt_next_gets = 2
    cluster.start()
    cluster.pull_all()
    assert_exact(cluster, folder)
    (agent,) = cluster.agents.values()
    status = agent.status()
    assert [fault.kind for fault in status.faults] == ["block_rejected", "block_rejected"]
    assert status.failures == ()


def test_a_damaged_block_is_cut_anew_for_its_rank_after_it_was_read_again_for_another(
    build: Build, folder: Path
) -> None:
    cluster = build(Parallel(dp=2), gpus_per_node=2)
    cluster.start()
    ((node, agent),) = cluster.agents.items()
    cluster.sessions[Rank(1)] = cluster.new_session(Rank(1))
    agent.reset_rank(Rank(1), Generation(1))
    fragment = compile_agent(
        cluster.plan,
        cluster.manifest,
        node,
        LOAD,
        credit_bytes=MIB,
        keep_blocks=np.zeros(0, np.int64),
        extents=[ExtentId(row["extent"]) for row in cluster.plan.tables["extents"].to_pylist()],
        ranks=[Rank(1)],
    )
    agent.read_again(fragment, [Rank(1)])
    cluster.plane.corrupt_next_gets = 1
    cluster.pull(Rank(0), at_most=1)
    pulls = [threading.Thread(target=cluster.pull, args=args, daemon=True) for args in ((Rank(0), 0), (Rank(1), 1))]
    for pull in pulls:
        pull.start()
    for pull in pulls:
        pull.join(BOUND_S)
        assert not pull.is_alive(), "a rank still waits for blocks"
    assert_exact(cluster, folder)
    assert [fault.kind for fault in agent.status().faults] == ["block_rejected"]


def test_a_block_that_all_ranks_of_a_node_find_damaged_once_is_no_failure(build: Build, folder: Path) -> None:
    """One copy in the pool, wrong for each of as many ranks as a block may be read again."""
    cluster = build(Parallel(tp=4), gpus_per_node=4)
    cluster.plane.corrupt_next_gets = 4
    cluster.start()
    for rank in cluster.sessions:
        cluster.pull(rank, at_most=1)
    cluster.pull_all()
    assert_exact(cluster, folder)
    (agent,) = cluster.agents.values()
    status = agent.status()
    assert [fault.kind for fault in status.faults] == ["block_rejected"] * 4
    assert status.failures == ()


def test_a_block_that_stays_damaged_is_reported_as_a_failed_extent(build: Build) -> None:
    cluster = build(Parallel(), gpus_per_node=1)
    cluster.plane.corrupt_next_gets = 10**6
    cluster.start()
    (agent,) = cluster.agents.values()
    taken: list[Delivery] = []
    while not agent.status().failures:
        taken = list(
            agent.exchange(rank_consumer(0), Generation(0), acked=[], rejected=taken[:1], limit=1, timeout_s=BOUND_S)
        )
    (failure, *_) = agent.status().failures
    assert isinstance(failure.error, IntegrityError)
    assert failure.retryable


def test_a_file_that_is_gone_is_a_failure_that_names_it(tmp_path: Path) -> None:
    folder = llama_checkpoint(tmp_path / "gone")
    cluster = SmallCluster(folder, Parallel(), gpus_per_node=1)
    (folder / "model.safetensors").unlink()
    cluster.start()
    (agent,) = cluster.agents.values()
    try:
        failure = first_failure(agent)
    finally:
        cluster.close()
    assert "model.safetensors" in str(failure.error)
    assert failure.retryable


def first_failure(agent: AgentLoad) -> ExtentFailure:
    """Polls a mailbox that stays empty until the agent has given up on an extent."""
    while not agent.status().failures:
        agent.exchange(rank_consumer(0), Generation(0), acked=[], limit=1, timeout_s=0.05)
    return agent.status().failures[0]


def test_closing_in_the_middle_stops_readers_that_wait_for_credit(build: Build) -> None:
    cluster = build(Parallel(tp=2), gpus_per_node=2)
    cluster.start()
    (agent,) = cluster.agents.values()
    first = agent.exchange(rank_consumer(0), Generation(0), acked=[], limit=1, timeout_s=BOUND_S)
    assert first
    agent.close()
    del first
    with pytest.raises(PoolClosedError):
        agent.exchange(rank_consumer(0), Generation(0), acked=[], limit=1, timeout_s=BOUND_S)
    assert not [thread for thread, _ in agent._threads if thread.is_alive()]
    assert cluster.plane.live_bytes == 0


def test_a_relay_that_breaks_off_is_told_whatever_broke_it(build: Build) -> None:
    """Else its ranks would wait for the blocks until the whole load counts as stalled."""

    class Broken:
        def exchange(
            self, load: LoadId, consumer: Consumer, acked: Sequence[int], *, limit: int, timeout_s: float
        ) -> tuple[Delivery, ...] | None:
            raise ZeroDivisionError("a bug in the wire")

        def give_up(self) -> None:
            raise AssertionError("nobody gave it up")

    cluster = build(Parallel(tp=4), gpus_per_node=2, peer=Broken())
    agent = cluster.agents[NodeId("n0")]
    assert agent.status().error is None
    agent.start()
    for relay in [thread for thread, _ in agent._threads if thread.name.startswith("relay")]:
        relay.join(BOUND_S)
    error = agent.status().error
    assert isinstance(error, ClusterError)
    assert "n0" in str(error)
    assert "a bug in the wire" in str(error)
