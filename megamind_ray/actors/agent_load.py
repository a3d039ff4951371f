"""One load on one node: reads extents, cuts blocks, hands them out; relays take in the rest. Threads, no Ray."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megamind_ray.actors.block_pool import BlockPool, PoolClosedError, PooledBlock
from megamind_ray.actors.dataplane import DataPlane
from megamind_ray.actors.messages import (
    AgentStatus,
    BlockHandle,
    Consumer,
    Delivery,
    ExtentFailure,
    Reroute,
    Verification,
    node_consumer,
    rank_consumer,
    weakest,
)
from megamind_ray.actors.relays import Neighbours, Peer, Relays
from megamind_ray.config import Config
from megamind_ray.core.exchange import RELAY_FETCHES
from megamind_ray.core.ids import BlockId, ExtentId, Generation, NodeId, Rank
from megamind_ray.core.program import AgentProgram
from megamind_ray.core.recorder import NO_RECORD, Recorder
from megamind_ray.core.report import Fault, Kept
from megamind_ray.core.tracks import NodeRecorder
from megamind_ray.device.memory import usable_cores
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.cut import BlockCutter
from megamind_ray.engine.extent_reader import ExtentReader
from megamind_ray.engine.team import run_team
from megamind_ray.errors import ClusterError, IntegrityError, MegamindError, RequestError, SourceError
from megamind_ray.io import ReadCounters

__all__ = ["AgentLoad"]

_STOP_S = 1.0  # how long closing waits for threads that are in the middle of a read


@dataclass(frozen=True, slots=True)
class _Job:
    """Extents to read and blocks to cut from them: the node's program, or a fragment of it that is done again."""

    program: AgentProgram
    reader: ExtentReader
    cutter: BlockCutter

    def cuts(self, block: int, ranks: Collection[Rank]) -> bool:
        """Whether it gives this block to these ranks; a fragment has its blocks for some of them only."""
        blocks = self.program.blocks
        (rows,) = np.nonzero(blocks.block == block)
        return len(rows) > 0 and set(ranks) <= set(self.program.consumer_sets[int(blocks.consumers[rows[0]])])


class AgentLoad:
    """Executes an ``AgentProgram``. All methods may be called from any thread.

    Args:
        program: What to read and whom to give it.
        config: Threads, retries, deadlines.
        plane: Where blocks are put.
        peers: Agents of the other nodes in the load.
        recorder: Takes what the node does, when.
    """

    def __init__(
        self,
        program: AgentProgram,
        config: Config,
        *,
        plane: DataPlane,
        peers: Mapping[NodeId, Peer],
        recorder: Recorder = NO_RECORD,
    ) -> None:
        self.load = program.load
        self._node = program.node
        self._config = replace(config, io=config.io.for_agent(usable_cores()))
        self._plane = plane
        self._record = NodeRecorder(recorder, program.node)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[tuple[threading.Thread, NodeId | None]] = []  # with the peer that a relay takes from
        self._failures: list[ExtentFailure] = []
        self._failed: set[int] = set()
        self._faults: list[Fault] = []
        self._rejected: Counter[tuple[int, tuple[Rank, ...]]] = Counter()  # by block and ranks
        self._bytes_sent = 0
        self._error: MegamindError | None = None
        self._verified: set[Verification] = set()
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
        self._main = self._job(program)
        self._jobs = [self._main]
        self._own_blocks = set(program.blocks.block.tolist())

    def start(self) -> None:
        """Begins to read, and to relay from each node that has blocks for this one."""
        for peer in self._main.program.relays:
            self.relay_from(NodeId(peer))
        self._spawn("reads", lambda: self._read_all(self._main, range(len(self._main.program.extents)), None))

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
            self._cut_anew(delivery)
        done = [*acked, *(delivery.serial for delivery in rejected)]
        deliveries = self._pool.exchange(consumer, generation, acked=done, limit=limit, timeout_s=timeout_s)
        if consumer[0] == "node":
            with self._lock:
                self._bytes_sent += sum(delivery.nbytes for delivery in deliveries)
        return deliveries

    def retire_rank(self, rank: Rank, generation: Generation) -> None:
        """The rank has all its blocks; whatever else comes for it is dropped, what it was handed counts as acked."""
        self._pool.retire(rank_consumer(rank), generation)

    def reset_rank(self, rank: Rank, generation: Generation) -> None:
        """Gives the successor of a lost worker an empty mailbox."""
        self._pool.reset(rank_consumer(rank), generation)

    def read_again(self, fragment: AgentProgram, ranks: Sequence[Rank]) -> None:
        """Reads the fragment's extents for these ranks; what the node has still before it is left to that."""
        job = self._job(fragment)
        with self._lock:
            self._jobs.append(job)
        rows = [row for row in range(len(fragment.extents)) if not self._is_pending(job, row)]
        self._spawn("reads-again", lambda: self._read_all(job, rows, frozenset(ranks)))

    def relay_from(self, peer: NodeId) -> None:
        """Takes in blocks that another node has for this one, until the load ends."""
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
            jobs = list(self._jobs)
            again = [job.reader.counters.totals() for job in jobs[1:]]
            main = jobs[0].reader.counters.totals()
            kept = self._pool.kept.values()
            return AgentStatus(
                bytes_read=main.payload_bytes,
                bytes_retried=main.retried_bytes + sum(one.payload_bytes + one.retried_bytes for one in again),
                bytes_sent=self._bytes_sent,
                failures=tuple(self._failures),
                faults=(*self._faults, *(fault for job in jobs for fault in job.reader.faults)),
                peak_credit_bytes=self._pool.peak_bytes,
                verified=weakest(self._verified),
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
        for job in self._jobs:
            job.reader.close()

    def _job(self, program: AgentProgram) -> _Job:
        longest = int((program.extents.end - program.extents.begin).max(initial=0))
        config = replace(self._config, io=self._config.io.for_agent(usable_cores(), longest))
        reader = ExtentReader(
            program.files, config, counters=ReadCounters(), stop=self._stop, on_fault=self._record.fault
        )
        return _Job(program, reader, BlockCutter(program.blocks, program.segments))

    def _spawn(self, name: str, target: Callable[[], None], peer: NodeId | None = None) -> None:
        thread = threading.Thread(target=self._guarded, args=(name, target), name=f"{name}-{self.load}", daemon=True)
        with self._lock:
            self._threads.append((thread, peer))
        thread.start()

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

    def _read_all(self, job: _Job, rows: Iterable[int], ranks: frozenset[Rank] | None) -> None:
        try:
            run_team(
                rows,
                lambda row: self._read_extent(job, row, ranks),
                num_threads=self._config.io.reads_in_flight(job.program.files.root),
                name=f"read-{self.load}",
                stop=self._stop,
                on_failure=job.reader.stop,
            )
        except ClusterError:
            if not self._stop.is_set():
                raise

    def _read_extent(
        self, job: _Job, row: int, ranks: frozenset[Rank] | None, only: Collection[int] | None = None
    ) -> None:
        """Reads one extent and publishes its blocks; a failure is reported, not raised."""
        extent = ExtentId(int(job.program.extents.extent[row]))
        try:
            self._read_and_publish(job, row, extent, ranks, only)
        except PoolClosedError:
            return
        except (SourceError, IntegrityError, RequestError) as error:
            # Another node may have a good copy, the file at all, or a way to the storage.
            self._fail(extent, error, retryable=True)
        except MegamindError as error:
            self._fail(extent, error, retryable=False)
        except Exception as error:  # noqa: BLE001 - a reader thread has nobody above it; the planner hears of it
            what = f"node {self._node}: reading extent {extent}: {type(error).__name__}: {error}"
            self._fail(extent, ClusterError(what), retryable=True)

    def _read_and_publish(
        self, job: _Job, row: int, extent: ExtentId, ranks: frozenset[Rank] | None, only: Collection[int] | None
    ) -> None:
        extents, blocks = job.program.extents, job.program.blocks
        takers = {
            int(blocks.block[block_row]): (block_row, self._takers(job, block_row, ranks))
            for block_row in job.cutter.rows_of(extent)
        }
        takers = {block: taker for block, taker in takers.items() if taker[1] and (only is None or block in only)}
        reserved = sum(int(blocks.nbytes[block_row]) for block_row, _ in takers.values())
        self._pool.reserve(reserved)
        try:
            file, begin, end = (int(column[row]) for column in (extents.file, extents.begin, extents.end))
            begin_s = self._record.now()
            with job.reader.staged(file, begin, end) as staged:
                name = job.program.files.files[file].path
                self._record.read(begin_s, end - begin, file=name, verified=staged.verified)
                self._verified.add(staged.verified)
                begin_s = self._record.now()
                for cut in job.cutter.cut(extent, begin, staged.data, only=takers):
                    self._record.cut(begin_s, cut.data.nbytes, block=cut.block)
                    entry = PooledBlock(
                        block=BlockId(cut.block),
                        extent=extent,
                        nbytes=cut.data.nbytes,
                        crc32s=cut.crc32,
                        handle=self._put(cut.block, cut.data),
                    )
                    with self._pool.held():  # a node may have been given up since the read began
                        self._pool.publish(entry, self._takers(job, takers[cut.block][0], ranks))
                    reserved -= cut.data.nbytes
                    begin_s = self._record.now()
        finally:
            if reserved:
                self._pool.give_back(reserved)

    def _takers(self, job: _Job, row: int, ranks: Collection[Rank] | None) -> list[tuple[Consumer, tuple[Rank, ...]]]:
        """Who takes the block in a row of the block table."""
        members = job.program.consumer_sets[int(job.program.blocks.consumers[row])]
        wanted = [Rank(member) for member in members if ranks is None or member in ranks]
        return self._neighbours.takers(wanted, each=ranks is not None)

    def _put(self, block: int, data: Bytes) -> BlockHandle:
        begin_s = self._record.now()
        handle = self._plane.put(data)
        self._record.put(begin_s, data.nbytes, block=block)
        return handle

    def _cut_anew(self, delivery: Delivery) -> None:
        """Reads the extent of a block that arrived wrong once more; gives up after as many tries as a read has."""
        block, ranks = delivery.block, delivery.ranks
        with self._lock:
            self._rejected[block, ranks] += 1
            count = self._rejected[block, ranks]
            job = next((job for job in reversed(self._jobs) if job.cuts(block, ranks)), None)
            fault = Fault(
                kind="block_rejected",
                where=f"block {block} of extent {delivery.extent} on node {self._node}",
                action="read and cut again" if job is not None else "asked of another node",
            )
            self._faults.append(fault)
        self._record.fault(fault)
        if job is None or count >= self._config.retry.attempts:
            where = f"block {block} arrived with wrong checksums {count} times"
            error = IntegrityError(f"node {self._node}: {where}; check the node's memory", file=str(delivery.extent))
            self._fail(delivery.extent, error, retryable=True)
            return
        row = job.program.extents.extent.tolist().index(delivery.extent)
        # Not with the delivery itself, whose handle would keep the damaged bytes in the pool.
        self._spawn("cut-anew", lambda: self._read_extent(job, row, frozenset(ranks), only=(block,)))

    def _is_pending(self, job: _Job, row: int) -> bool:
        """Whether the node's own program is still to publish all blocks that a fragment's extent gives."""
        extent = int(job.program.extents.extent[row])
        blocks = [int(job.program.blocks.block[block_row]) for block_row in job.cutter.rows_of(extent)]
        with self._lock:
            if extent in self._failed:
                return False
        return all(block in self._own_blocks and not self._pool.was_published(block) for block in blocks)

    def _fail(self, extent: ExtentId, error: MegamindError, *, retryable: bool) -> None:
        with self._lock:
            self._failed.add(extent)
            self._failures.append(ExtentFailure(extent=extent, node=self._node, error=error, retryable=retryable))
