"""Blocks from node to node: who takes them from here, and the threads that take in those of other nodes (0024)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Final, Protocol

from megamind_ray.actors.block_pool import BlockPool, PooledBlock
from megamind_ray.actors.dataplane import DataPlane
from megamind_ray.actors.messages import BlockHandle, Consumer, Delivery, Reroute, node_consumer, rank_consumer
from megamind_ray.config import DeadlineConfig
from megamind_ray.core.exchange import RELAY_BATCH
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.line import Budget, Line
from megamind_ray.core.program import AgentProgram
from megamind_ray.core.tracks import NodeRecorder
from megamind_ray.device.strided import Bytes
from megamind_ray.errors import ClusterError

__all__ = ["Neighbours", "Peer", "Relays"]

_LOOK_S: Final = 0.2  # how often who waits for the planner's word looks whether the load has ended


class Peer(Protocol):
    """The agent of another node, as a relay sees it."""

    def exchange(
        self, load: LoadId, consumer: Consumer, acked: Sequence[int], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        """As ``AgentLoad.exchange``; None when the load has ended there.

        Raises:
            ClusterError: It does not answer.
        """

    def give_up(self) -> None:
        """Ends calls that wait for an answer; they raise."""


class _PeerTroubleError(Exception):
    """A call to a peer, or the way of a block from it, broke off. It never leaves this module."""

    def __init__(self, error: ClusterError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True, eq=False)
class _Reservation:
    """Credit for a block that is on its way; given back once, by whoever comes first."""

    nbytes: int
    budget: Budget
    is_void: bool = False


class Neighbours:
    """A node's place in the line of its load. It changes while the pool is held, and is asked so.

    Attributes:
        sides: Where blocks of other nodes come from by plan.

    Args:
        program: Of the node.
    """

    def __init__(self, program: AgentProgram) -> None:
        self._node, self._node_of_rank = program.node, dict(program.node_of_rank)
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

    def passed_on(self, ranks: Sequence[Rank], source: NodeId) -> list[tuple[Consumer, tuple[Rank, ...]]]:
        """As ``takers``, of a block that came from ``source``: it goes on in the direction that it came in.

        Ranks that moved while it was on its way may be on the other side by now. They get it again by themselves, and
        pools that wait for each other in both directions might wait for ever.
        """
        return [
            (consumer, taken)
            for consumer, taken in self.takers(ranks)
            if consumer[0] == "rank" or self._line.is_beyond(self._node, source, NodeId(str(consumer[1])))
        ]

    def change(self, route: Reroute) -> None:
        """A node was given up: others hand blocks to each other past it."""
        self._node_of_rank.update(route.homes)
        self._line = Line(route.line)
        self.sides = tuple(sorted({*self.sides, *self._line.sides(self._node, route.sources)}))

    def add(self, source: NodeId) -> None:
        """Blocks for this node, and for those further on, come from there from now on."""
        self.sides = tuple(sorted({*self.sides, *self._line.sides(self._node, [source])}))

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
        self._peers = dict(peers)
        self._record = record
        self._stop = stop
        self._lock = threading.Lock()
        self._begun: set[NodeId] = set()
        self._lost: set[NodeId] = set()
        self._judged = threading.Condition(self._lock)
        self._under_way: dict[NodeId, set[_Reservation]] = {}

    def join(self, peers: Mapping[NodeId, Peer]) -> None:
        """Nodes that have a part in the load from now on."""
        with self._lock:
            self._peers.update(peers)

    def lose(self, peer: NodeId) -> None:
        """Gives a node up: nothing more is taken from it, and what was on its way holds no credit."""
        with self._lock:
            self._lost.add(peer)
            reserved = self._under_way.pop(peer, set())
            for one in reserved:
                one.is_void = True
            self._judged.notify_all()
        for one in reserved:
            self._pool.give_back(one.nbytes, one.budget)
        if peer in self._peers:
            self._peers[peer].give_up()

    def begin(self, peer: NodeId) -> bool:
        """Whether threads are to ``take_from`` this node: it is in the load, and they do not yet."""
        with self._lock:
            if peer in self._begun or peer not in self._peers or peer in self._lost:
                return False
            self._begun.add(peer)
            return True

    def take_from(self, peer: NodeId) -> None:
        """Takes in what another node has for this one, until the load ends or that node is given up.

        Raises:
            PoolClosedError: It ended here.
            CapacityError: A block is larger than what the pool has for such.
            ClusterError: The other node does not answer, or a block is lost, and nobody gave the node up.
        """
        acked: list[int] | None = []
        while acked is not None and not self._stop.is_set() and peer not in self._lost:
            try:
                acked = self._take_batch(peer, acked)
            except _PeerTroubleError as trouble:
                # The planner, which sees all nodes, says whether this one is lost; we may know before it does.
                if not self._is_given_up(peer, timeout_s=2 * self._deadlines.silence_s):
                    raise trouble.error from trouble
                return

    def _is_given_up(self, peer: NodeId, *, timeout_s: float) -> bool:
        """Waits for the planner's word; the end of the load is as good."""
        until_s = monotonic() + timeout_s
        with self._judged:
            while peer not in self._lost and not self._stop.is_set() and monotonic() < until_s:
                self._judged.wait(_LOOK_S)
            return peer in self._lost or self._stop.is_set()

    def _take_batch(self, peer: NodeId, acked: Sequence[int]) -> list[int] | None:
        """Acks one batch and takes in the next one; gives what to ack with the next call.

        Nothing else of a batch is left by then: a handle that waits with that call keeps bytes in the peer's pool that
        count as free there.

        Returns:
            None: the load has ended there, and will be here.
        """
        try:
            deliveries = self._peers[peer].exchange(
                self._load,
                node_consumer(self._node),
                acked,
                limit=RELAY_BATCH,
                timeout_s=self._deadlines.poll_s,
            )
        except ClusterError as error:
            raise _PeerTroubleError(error) from error
        if deliveries is None:
            return None
        for delivery in deliveries:
            self._take_in(peer, delivery)
        return [delivery.serial for delivery in deliveries]

    def _take_in(self, peer: NodeId, delivery: Delivery) -> None:
        """Puts a replica of another node's block into this node's pool, for its ranks and those of nodes further on."""
        reserved = _Reservation(delivery.nbytes, self._neighbours.budget(peer))
        self._pool.reserve(reserved.nbytes, reserved.budget)
        try:
            with self._lock:
                if peer in self._lost:
                    return
                self._under_way.setdefault(peer, set()).add(reserved)
            entry = self._replica(delivery, reserved.budget)
            with self._lock:
                if reserved.is_void:
                    return
                self._under_way[peer].remove(reserved)
                reserved.is_void = True  # the block's by now
            with self._pool.held():
                self._pool.publish(entry, self._neighbours.passed_on(delivery.ranks, peer))
        finally:
            with self._lock:
                is_void, reserved.is_void = reserved.is_void, True
                self._under_way.get(peer, set()).discard(reserved)
            if not is_void:
                self._pool.give_back(reserved.nbytes, reserved.budget)

    def _replica(self, delivery: Delivery, budget: Budget) -> PooledBlock:
        return PooledBlock(
            block=delivery.block,
            extent=delivery.extent,
            nbytes=delivery.nbytes,
            crc32s=delivery.crc32s,
            handle=self._fetch_and_put(delivery),
            budget=budget,
        )

    def _fetch_and_put(self, delivery: Delivery) -> BlockHandle:
        begin_s = self._record.now()
        with ExitStack() as held:
            try:
                data = held.enter_context(self._plane.fetch(delivery.handle, timeout_s=self._deadlines.call_s))
            except ClusterError as error:
                raise _PeerTroubleError(error) from error
            self._record.fetched(begin_s, delivery.nbytes, block=delivery.block)
            return self._put(delivery.block, data)
