"""What one node reads for a load: its own extents, those of slow readers, what is read again. Threads, no Ray."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megamind_ray.actors.block_pool import BlockPool, PoolClosedError, PooledBlock
from megamind_ray.actors.messages import (
    AgentStatus,
    BlockHandle,
    Consumer,
    Delivery,
    ExtentFailure,
    Verification,
    weakest,
)
from megamind_ray.actors.relays import Neighbours
from megamind_ray.config import Config
from megamind_ray.core.ids import BlockId, ExtentId, Rank
from megamind_ray.core.program import AgentProgram
from megamind_ray.core.read_queue import ReadQueue
from megamind_ray.core.report import Fault
from megamind_ray.core.stragglers import ReadProgress
from megamind_ray.core.tracks import NodeRecorder
from megamind_ray.device.memory import usable_cores
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.cut import BlockCutter
from megamind_ray.engine.extent_reader import ExtentReader, SourceOpener
from megamind_ray.engine.team import run_team
from megamind_ray.errors import ClusterError, IntegrityError, MegamindError, RequestError, SourceError
from megamind_ray.io import ReadCounters

__all__ = ["AgentReads"]


class _TakenBackError(Exception):
    """Another node reads this extent by now. It never leaves this module."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Extents to read and blocks to cut from them: the node's program, or a fragment of the plan.

    Attributes:
        program: Which.
        reader: Of its files.
        cutter: Of its blocks.
        ranks: For whom it is done once more; None: as planned, for all that need it.
        queue: What of it is to be done; jobs that are done as planned share one.
    """

    program: AgentProgram
    reader: ExtentReader
    cutter: BlockCutter
    ranks: frozenset[Rank] | None
    queue: ReadQueue[_Task]

    def cuts(self, block: int, ranks: Collection[Rank]) -> bool:
        """Whether it gives this block to these ranks; a fragment has its blocks for some of them only."""
        blocks = self.program.blocks
        (rows,) = np.nonzero(blocks.block == block)
        return len(rows) > 0 and set(ranks) <= set(self.program.consumer_sets[int(blocks.consumers[rows[0]])])

    def task(self, row: int) -> _Task:
        return _Task(self, row, ExtentId(int(self.program.extents.extent[row])))

    def size(self, row: int) -> int:
        extents = self.program.extents
        return int(extents.end[row] - extents.begin[row])


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """An extent of a job; with ``only``, just some of its blocks, which are cut once more."""

    job: _Job
    row: int
    extent: ExtentId
    only: Collection[int] | None = None

    def wants(self, block: int) -> bool:
        return self.only is None or block in self.only

    def begin(self) -> None:
        """Storage is about to be asked for it."""
        if self.only is None and not self.job.queue.begin(self.extent):
            raise _TakenBackError

    def end(self) -> None:
        if self.only is None:
            self.job.queue.end(self.extent)


class AgentReads:
    """Reads extents, cuts blocks and publishes them in a node's pool. All methods may be called from any thread.

    Args:
        program: What to read, as planned.
        config: Threads and retries, as the node's agent reads.
        pool: Where blocks go to.
        neighbours: Who takes them from there.
        put: Puts a block's bytes into the pool of this node.
        record: Takes what is done, when.
        stop: Set when the load ends.
        spawn: Starts a thread of the load, by name.
        opener: Opens a file; None: ``io.open_source``.
    """

    def __init__(
        self,
        program: AgentProgram,
        config: Config,
        *,
        pool: BlockPool,
        neighbours: Neighbours,
        put: Callable[[int, Bytes], BlockHandle],
        record: NodeRecorder,
        stop: threading.Event,
        spawn: Callable[[str, Callable[[], None]], None],
        opener: SourceOpener | None = None,
    ) -> None:
        self._load, self._node = program.load, program.node
        self._config = config
        self._pool, self._neighbours, self._put = pool, neighbours, put
        self._record = record
        self._stop, self._spawn = stop, spawn
        self._opener = opener
        self._lock = threading.Lock()
        self._failures: list[ExtentFailure] = []
        self._faults: list[Fault] = []
        self._rejected: Counter[tuple[int, tuple[Rank, ...]]] = Counter()  # by block and ranks
        self._verified: set[Verification] = set()
        self._planned: ReadQueue[_Task] = ReadQueue()
        self._jobs: list[_Job] = []
        self._main = self._job(program)

    def start(self) -> None:
        """Begins to read what the node was to read by plan."""
        self._begin(self._main, range(len(self._main.program.extents)), "reads")

    def read_again(self, fragment: AgentProgram, ranks: Sequence[Rank]) -> None:
        """Reads the fragment's extents for these ranks; what the node has still before it is left to that."""
        job = self._job(fragment, frozenset(ranks))
        rows = [row for row in range(len(fragment.extents)) if not self._is_pending(job, row)]
        self._begin(job, rows, "reads-again")

    def read_instead(self, fragment: AgentProgram) -> None:
        """Reads the fragment's extents behind its own, as if they had been planned so."""
        self._begin(self._job(fragment), range(len(fragment.extents)), "reads-instead")

    def take_back(self, keep_bytes: int) -> tuple[ExtentId, ...]:
        """What it does not read any more, of what it has not begun: all but the first ``keep_bytes``."""
        return self._planned.take_back(keep_bytes)

    def cut_anew(self, delivery: Delivery) -> None:
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
        task = replace(job.task(row), job=replace(job, ranks=frozenset(ranks)), only=(block,))
        self._spawn("cut-anew", lambda: self._read_extent(task))

    def status(self) -> AgentStatus:
        """What there is to say about reading; the rest of it is for others to fill in."""
        with self._lock:
            jobs = list(self._jobs)
            totals = [(job.ranks is None, job.reader.counters.totals()) for job in jobs]
            first = sum(one.payload_bytes for is_first, one in totals if is_first)
            return AgentStatus(
                bytes_read=first,
                bytes_retried=sum(one.payload_bytes + one.retried_bytes for _, one in totals) - first,
                failures=tuple(self._failures),
                faults=(*self._faults, *(fault for job in jobs for fault in job.reader.faults)),
                verified=weakest(self._verified),
                reads=_sum([queue.progress for queue in {id(job.queue): job.queue for job in jobs}.values()]),
            )

    def close(self) -> None:
        """Closes the files; nobody reads any more."""
        for job in self._jobs:
            job.reader.close()

    def _job(self, program: AgentProgram, ranks: frozenset[Rank] | None = None) -> _Job:
        longest = int((program.extents.end - program.extents.begin).max(initial=0))
        config = replace(self._config, io=self._config.io.for_agent(usable_cores(), longest))
        reader = ExtentReader(
            program.files,
            config,
            counters=ReadCounters(),
            opener=self._opener,
            stop=self._stop,
            on_fault=self._record.fault,
        )
        queue: ReadQueue[_Task] = self._planned if ranks is None else ReadQueue()
        job = _Job(program, reader, BlockCutter(program.blocks, program.segments), ranks, queue)
        with self._lock:
            self._jobs.append(job)
        return job

    def _begin(self, job: _Job, rows: Collection[int], name: str) -> None:
        tasks = [job.task(row) for row in rows]
        if job.queue.add([(task.extent, job.size(task.row), task) for task in tasks]):
            self._spawn(name, lambda: self._read_all(job.queue, job.program.files.root))

    def _read_all(self, queue: ReadQueue[_Task], root: str) -> None:
        try:
            run_team(
                queue,
                self._read_extent,
                num_threads=self._config.io.reads_in_flight(root),
                name=f"read-{self._load}",
                stop=self._stop,
                on_failure=self._stop_reading,
            )
        except ClusterError:
            if not self._stop.is_set():
                raise

    def _stop_reading(self) -> None:
        for job in list(self._jobs):
            job.reader.stop()

    def _read_extent(self, task: _Task) -> None:
        """Reads one extent and publishes its blocks; a failure is reported, not raised."""
        try:
            self._read_and_publish(task)
        except (PoolClosedError, _TakenBackError):
            return
        except (SourceError, IntegrityError, RequestError) as error:
            # Another node may have a good copy, the file at all, or a way to the storage.
            self._fail(task.extent, error, retryable=True)
        except MegamindError as error:
            self._fail(task.extent, error, retryable=False)
        except Exception as error:  # noqa: BLE001 - a reader thread has nobody above it; the planner hears of it
            what = f"node {self._node}: reading extent {task.extent}: {type(error).__name__}: {error}"
            self._fail(task.extent, ClusterError(what), retryable=True)
        task.end()

    def _read_and_publish(self, task: _Task) -> None:
        job, extent = task.job, task.extent
        extents, blocks = job.program.extents, job.program.blocks
        takers = {int(blocks.block[row]): (row, self._takers(job, row)) for row in job.cutter.rows_of(extent)}
        takers = {block: taker for block, taker in takers.items() if taker[1] and task.wants(block)}
        reserved = sum(int(blocks.nbytes[block_row]) for block_row, _ in takers.values())
        self._pool.reserve(reserved)
        try:
            file, begin, end = (int(column[task.row]) for column in (extents.file, extents.begin, extents.end))
            begin_s = self._record.now()
            with job.reader.staged(file, begin, end, on_begin=task.begin) as staged:
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
                        self._pool.publish(entry, self._takers(job, takers[cut.block][0]))
                    reserved -= cut.data.nbytes
                    begin_s = self._record.now()
        finally:
            if reserved:
                self._pool.give_back(reserved)

    def _takers(self, job: _Job, row: int) -> list[tuple[Consumer, tuple[Rank, ...]]]:
        """Who takes the block in a row of the block table."""
        members = job.program.consumer_sets[int(job.program.blocks.consumers[row])]
        wanted = [Rank(member) for member in members if job.ranks is None or member in job.ranks]
        return self._neighbours.takers(wanted, each=job.ranks is not None)

    def _is_pending(self, job: _Job, row: int) -> bool:
        """Whether the node is still to publish all blocks that a fragment's extent gives, as planned."""
        extent = job.task(row).extent
        blocks = [int(job.program.blocks.block[block_row]) for block_row in job.cutter.rows_of(extent)]
        return self._planned.holds(extent) and not any(self._pool.was_published(block) for block in blocks)

    def _fail(self, extent: ExtentId, error: MegamindError, *, retryable: bool) -> None:
        with self._lock:
            self._failures.append(ExtentFailure(extent=extent, node=self._node, error=error, retryable=retryable))


def _sum(parts: Sequence[ReadProgress]) -> ReadProgress:
    return ReadProgress(
        done_bytes=sum(part.done_bytes for part in parts),
        begun_bytes=sum(part.begun_bytes for part in parts),
        waiting_bytes=sum(part.waiting_bytes for part in parts),
    )
