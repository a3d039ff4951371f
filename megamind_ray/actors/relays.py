"""Blocks from node to node: who takes them from here, and the threads that take in those of other nodes (0024)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from megamind_ray.actors.block_pool import BlockPool, PooledBlock
from megamind_ray.actors.dataplane import DataPlane
from megamind_ray.actors.messages import BlockHandle, Consumer, Delivery, node_consumer, rank_consumer
from megamind_ray.config import DeadlineConfig
from megamind_ray.core.exchange import RELAY_BATCH
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.line import Budget, Line
from megamind_ray.core.program import AgentProgram
from megamind_ray.core.tracks import NodeRecorder
from megamind_ray.device.strided import Bytes

__all__ = ["Neighbours", "Peer", "Relays"]


class Peer(Protocol):
    """The agent of another node, as a relay sees it."""

    def exchange(
        self, load: LoadId, consumer: Consumer, acked: Sequence[int], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        """As ``AgentLoad.exchange``; None when the load has ended there.

        Raises:
            ClusterError: It does not answer.
        """


class Neighbours:
    """A node's place in the line of its load.

    Attributes:
        sides: Where blocks of other nodes come from by plan.

    Args:
        program: Of the node.
    """

    def __init__(self, program: AgentProgram) -> None:
        self._node, self._node_of_rank = program.node, program.node_of_rank
        self._line = Line(program.line)
        self.sides = self._line.sides(program.node, map(NodeId, program.relays))

    def takers(self, ranks: Sequence[Rank], *, each: bool = False) -> list[tuple[Consumer, tuple[Rank, ...]]]:
        """Who takes a block from here: local ranks one by one, others by the node that takes it for them.

        Args:
            ranks: That need it, here and further on.
            each: Hand it to each of their nodes by itself. So goes what is read again: they were told to ask here, and
                not to ask each other.
        """
        line = Line() if each else self._line
        found: list[tuple[Consumer, tuple[Rank, ...]]] = []
        for node, taken in line.takers(self._node, ranks, self._node_of_rank).items():
            found += (
                [(rank_consumer(rank), (rank,)) for rank in taken]
                if node == self._node
                else [(node_consumer(node), taken)]
            )
        return found

    def budget(self, peer: NodeId) -> Budget:
        """What a block counts as that comes from there."""
        return self._line.budget(self._node, peer, self.sides)


class Relays:
    """Takes in blocks that other nodes have for this one. All methods may be called from any thread.

    Args:
        program: Of the node.
        deadlines: Of the load.
        neighbours: Whom blocks go on to.
        pool: Where they go to.
        plane: Where their bytes come from.
        put: Puts a block's bytes into the pool of this node.
        peers: Agents of the other nodes in the load.
        record: Takes what is done, when.
        stop: Set when the load ends.
    """

    def __init__(
        self,
        program: AgentProgram,
        deadlines: DeadlineConfig,
        *,
        neighbours: Neighbours,
        pool: BlockPool,
        plane: DataPlane,
        put: Callable[[int, Bytes], BlockHandle],
        peers: Mapping[NodeId, Peer],
        record: NodeRecorder,
        stop: threading.Event,
    ) -> None:
        self._load, self._node = program.load, program.node
        self._deadlines = deadlines
        self._neighbours = neighbours
        self._pool = pool
        self._plane = plane
        self._put = put
        self._peers = peers
        self._record = record
        self._stop = stop
        self._lock = threading.Lock()
        self._begun: set[NodeId] = set()

    def begin(self, peer: NodeId) -> bool:
        """Whether threads are to ``take_from`` this node: it is in the load, and they do not yet."""
        with self._lock:
            if peer in self._begun or peer not in self._peers:
                return False
            self._begun.add(peer)
            return True

    def take_from(self, peer: NodeId) -> None:
        """Takes in what another node has for this one, until the load ends.

        Raises:
            PoolClosedError: It ended here.
            CapacityError: A block is larger than what the pool has for such.
            ClusterError: The other node does not answer, or a block is lost.
        """
        acked: list[int] | None = []
        while acked is not None and not self._stop.is_set():
            acked = self._take_batch(peer, acked)

    def _take_batch(self, peer: NodeId, acked: Sequence[int]) -> list[int] | None:
        """Acks one batch and takes in the next one; gives what to ack with the next call.

        Nothing else of a batch is left by then: a handle that waits with that call keeps bytes in the peer's pool that
        count as free there.

        Returns:
            None: the load has ended there, and will be here.
        """
        deliveries = self._peers[peer].exchange(
            self._load,
            node_consumer(self._node),
            acked,
            limit=RELAY_BATCH,
            timeout_s=self._deadlines.poll_s,
        )
        if deliveries is None:
            return None
        for delivery in deliveries:
            self._take_in(peer, delivery)
        return [delivery.serial for delivery in deliveries]

    def _take_in(self, peer: NodeId, delivery: Delivery) -> None:
        """Puts a replica of another node's block into this node's pool, for its ranks and those of nodes further on."""
        budget = self._neighbours.budget(peer)
        self._pool.reserve(delivery.nbytes, budget)
        begin_s = self._record.now()
        data = self._plane.fetch(delivery.handle, timeout_s=self._deadlines.call_s)
        self._record.fetched(begin_s, delivery.nbytes, block=delivery.block)
        entry = PooledBlock(
            block=delivery.block,
            extent=delivery.extent,
            nbytes=delivery.nbytes,
            crc32s=delivery.crc32s,
            handle=self._put(delivery.block, data),
            budget=budget,
        )
        self._pool.publish(entry, self._neighbours.takers(delivery.ranks))
