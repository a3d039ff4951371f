"""One load on one node: reads extents, cuts blocks, hands them out; relays take in the rest. Threads, no Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megamind_ray.actors.agent_reads import AgentReads
from megamind_ray.actors.block_pool import BlockPool, PoolClosedError, PooledBlock
from megamind_ray.actors.dataplane import DataPlane
from megamind_ray.actors.messages import (
    AgentStatus,
    BlockHandle,
    Consumer,
    Delivery,
    Reroute,
    node_consumer,
    rank_consumer,
)
from megamind_ray.actors.relays import Neighbours, Peer, Relays
from megamind_ray.config import Config
from megamind_ray.core.exchange import RELAY_FETCHES
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.program import AgentProgram
from megamind_ray.core.recorder import NO_RECORD, Recorder
from megamind_ray.core.report import Kept
from megamind_ray.core.tracks import NodeRecorder
from megamind_ray.device.memory import usable_cores
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.extent_reader import SourceOpener
from megamind_ray.errors import ClusterError, MegamindError

__all__ = ["AgentLoad"]

_STOP_S = 1.0  # how long closing waits for threads that are in the middle of a read


class AgentLoad:
    """Executes an ``AgentProgram``. All methods may be called from any thread.

    Args:
        program: What to read and whom to give it.
        config: Threads, retries, deadlines.
        plane: Where blocks are put.
        peers: Agents of the other nodes in the load.
        recorder: Takes what the node does, when.
        opener: Opens a file; None: ``io.open_source``.
    """

    def __init__(
        self,
        program: AgentProgram,
        config: Config,
        *,
        plane: DataPlane,
        peers: Mapping[NodeId, Peer],
        recorder: Recorder = NO_RECORD,
        opener: SourceOpener | None = None,
    ) -> None:
        self.load = program.load
        self._node = program.node
        self._planned_relays = tuple(program.relays)
        self._plane = plane
        self._record = NodeRecorder(recorder, program.node)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[tuple[threading.Thread, NodeId | None]] = []  # with the peer that a relay takes from
        self._bytes_sent = 0
        self._error: MegamindError | None = None
        self._neighbours = Neighbours(program)
        self._pool = BlockPool(
            credit_bytes=program.credit_bytes,
            sides=self._neighbours.sides if peers else (),
            keep=program.keep_blocks.tolist(),
            node=program.node,
            on_used=self._record.credit,
        )
        self._relays = Relays(
            program,
            config.deadlines,
            neighbours=self._neighbours,
            pool=self._pool,
            plane=plane,
            put=self._put,
            peers=peers,
            record=self._record,
            stop=self._stop,
        )
        self._reads = AgentReads(
            program,
            replace(config, io=config.io.for_agent(usable_cores())),
            pool=self._pool,
            neighbours=self._neighbours,
            put=self._put,
            record=self._record,
            stop=self._stop,
            spawn=self._spawn,
            opener=opener,
        )
        self._has_started = False

    def start(self) -> None:
        """Begins to read, and to relay from each node that has blocks for this one. The second time nothing happens."""
        with self._lock:
            has_started, self._has_started = self._has_started, True
        if has_started:
            return
        for peer in self._planned_relays:
            self.relay_from(NodeId(peer))
        self._reads.start()

    def exchange(
        self,
        consumer: Consumer,
        generation: Generation,
        *,
        acked: Sequence[int],
        rejected: Sequence[Delivery] = (),
        limit: int,
        timeout_s: float,
    ) -> tuple[Delivery, ...]:
        """Takes new blocks and acks earlier ones (see ``BlockPool.exchange``).

        Args:
            consumer: Who asks.
            generation: Of the rank; 0 for a node.
            acked: Serials of deliveries that arrived well.
            rejected: Deliveries whose checksums did not hold; their blocks are cut anew for the consumer. They are
                acked as well.
            limit: At most so many.
            timeout_s: To wait for the first one.

        Raises:
            PoolClosedError: The load ended.
        """
        for delivery in rejected:
            self._pool.spoil(consumer, delivery.serial)
            self._reads.cut_anew(delivery)
        done = [*acked, *(delivery.serial for delivery in rejected)]
        deliveries = self._pool.exchange(consumer, generation, acked=done, limit=limit, timeout_s=timeout_s)
        if consumer[0] == "node":
            with self._lock:
                self._bytes_sent += sum(delivery.nbytes for delivery in deliveries)
            return tuple(replace(delivery, handle=self._plane.offer(delivery.handle)) for delivery in deliveries)
        return deliveries

    def retire_rank(self, rank: Rank, generation: Generation) -> None:
        """The rank has all its blocks; whatever else comes for it is dropped, what it was handed counts as acked."""
        self._pool.retire(rank_consumer(rank), generation)

    def reset_rank(self, rank: Rank, generation: Generation) -> None:
        """Gives the successor of a lost worker an empty mailbox."""
        self._pool.reset(rank_consumer(rank), generation)

    def read_again(self, fragment: AgentProgram, ranks: Sequence[Rank]) -> None:
        """Reads the fragment's extents for these ranks; what the node has still before it is left to that."""
        self._reads.read_again(fragment, ranks)

    def read_instead(self, fragment: AgentProgram) -> None:
        """Reads the fragment's extents, which another node was to read, as if they had been planned so."""
        self._reads.read_instead(fragment)

    def take_back(self, keep_bytes: int) -> tuple[ExtentId, ...]:
        """What it will not read any more: all that it has not begun, but for the first ``keep_bytes`` of it."""
        return self._reads.take_back(keep_bytes)

    def relay_from(self, peer: NodeId, *, passes_on: bool = False) -> None:
        """Takes in blocks that another node has for this one, until the load ends.

        Args:
            peer: The other node.
            passes_on: Some of them go on along the line.
        """
        if passes_on:
            with self._pool.held():
                self._neighbours.add(peer)
                self._pool.divide(self._neighbours.sides)
        if self._relays.begin(peer):
            for number in range(RELAY_FETCHES):
                self._spawn(f"relay-{peer[:8]}-{number}", lambda: self._relays.take_from(peer), peer)

    def reroute(self, route: Reroute, peers: Mapping[NodeId, Peer]) -> None:
        """A node was given up: what was for it, or through it, goes past it; nothing of it is waited for.

        What it was handed and had acked may be lost with it, and so may what it was to read: that is for the planner.
        What was for its ranks is dropped: they get all of it again where they moved to.

        Args:
            route: How blocks go from now on.
            peers: Agents of nodes that have a part in the load from now on.
        """
        with self._pool.held():
            self._neighbours.change(route)
            self._pool.divide(self._neighbours.sides)
            self._pool.lose(
                node_consumer(route.lost),
                lambda ranks: self._neighbours.takers([rank for rank in ranks if rank not in route.homes]),
            )
        self._relays.join(peers)
        self._relays.lose(route.lost)
        with self._lock:
            # They may wait for their last call for a while, and hold nothing that closing waits for.
            self._threads = [(thread, peer) for thread, peer in self._threads if peer != route.lost]
        for peer in route.sources:
            self.relay_from(peer)

    def status(self) -> AgentStatus:
        """Counters, failures and faults so far."""
        with self._lock:
            kept = self._pool.kept.values()
            return replace(
                self._reads.status(),
                bytes_sent=self._bytes_sent,
                peak_credit_bytes=self._pool.peak_bytes,
                kept=Kept(num_blocks=len(kept), num_bytes=sum(block.nbytes for block in kept)),
                error=self._error,
            )

    @property
    def reserved_bytes(self) -> int:
        """Credit in use."""
        return self._pool.used_bytes

    def close(self) -> dict[int, PooledBlock]:
        """Stops everything and returns the blocks that are kept.

        A read that storage does not answer cannot be called off: its thread ends when the answer comes, and what it
        brings is thrown away. Files are closed when the last thread has ended.
        """
        self._stop.set()
        kept = self._pool.close()
        with self._lock:
            threads = [thread for thread, _ in self._threads]
        closing = threading.Thread(target=self._close_files, args=(threads,), name=f"close-{self.load}", daemon=True)
        closing.start()
        closing.join(timeout=_STOP_S)
        return kept

    def _close_files(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            thread.join()
        self._reads.close()

    def _spawn(self, name: str, target: Callable[[], None], peer: NodeId | None = None) -> None:
        thread = threading.Thread(target=self._guarded, args=(name, target), name=f"{name}-{self.load}", daemon=True)
        with self._lock:
            self._threads.append((thread, peer))
            thread.start()  # before anybody sees it: one that was not started cannot be waited for

    def _guarded(self, name: str, target: Callable[[], None]) -> None:
        """Nobody is above a thread of the load: what ends one before its time ends the load, by way of ``status``."""
        try:
            target()
        except PoolClosedError:
            return
        except Exception as error:  # noqa: BLE001 - kept, the planner asks for it
            if not self._stop.is_set():
                what = f"node {self._node}: {name}: {type(error).__name__}: {error}"
                with self._lock:
                    self._error = self._error or (error if isinstance(error, MegamindError) else ClusterError(what))

    def _put(self, block: int, data: Bytes) -> BlockHandle:
        begin_s = self._record.now()
        handle = self._plane.put(data)
        self._record.put(begin_s, data.nbytes, block=block)
        return handle
