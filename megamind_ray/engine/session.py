"""One rank of a load, as a plain class: takes blocks, reads its direct extents, hands out tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from megamind_ray.config import Config
from megamind_ray.core.demands import Int64Array
from megamind_ray.core.program import RankProgram
from megamind_ray.core.recorder import NO_RECORD, Recorder
from megamind_ray.core.report import Fault, RankReport, Verified
from megamind_ray.core.tracks import RankRecorder
from megamind_ray.device.arena import Allocation, Arena
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.cut import BlockCutter, Crc32Array, Segment
from megamind_ray.engine.direct import read_to_sink
from megamind_ray.engine.extent_reader import ExtentReader, SourceOpener
from megamind_ray.engine.sinks import ArenaSink
from megamind_ray.engine.staging import staging_ring
from megamind_ray.engine.team import run_team
from megamind_ray.errors import ClusterError, IntegrityError, MegamindError, RequestError
from megamind_ray.io.checksum import crc32
from megamind_ray.io.counters import ReadTotals
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["DirectFailure", "RankSession"]

DirectFailure = Callable[[int, MegamindError], None]

_MISSING, _ARRIVING, _ARRIVED = 0, 1, 2


class RankSession:
    """What a rank does in a load, and what it holds afterwards.

    ``apply``, ``read_direct`` and the properties may be called from several threads at a time; ``finish``,
    ``state_dict`` and ``release`` are for the session's owner. The life of a session: blocks and direct extents arrive,
    ``finish`` makes sure that every byte did, tensors are handed out, ``release`` gives the memory back.

    Args:
        program: What to do.
        arena: Where the views go; the session takes one allocation of it.
        config: Retries and threads.
        opener: Opens files; by default ``io.open_source`` with the settings of ``config``.
        recorder: Takes a span for each block that is put in place and each direct extent that is read.

    Raises:
        CapacityError: The arena has no room.
    """

    def __init__(
        self,
        program: RankProgram,
        arena: Arena,
        config: Config,
        *,
        opener: SourceOpener | None = None,
        recorder: Recorder = NO_RECORD,
    ) -> None:
        self.program = program
        self.record = RankRecorder(recorder, program.rank)
        self._arena = arena
        self._config = config
        self._cutter = BlockCutter(program.blocks, program.segments)
        self._row_of_block = {block: row for row, block in enumerate(program.blocks.block.tolist())}
        self._states = np.full(len(program.blocks), _MISSING, np.int8)
        self._stop = threading.Event()
        ring = staging_ring(program.files, config.io, arena.staging)
        self._reader = ExtentReader(
            program.files, config, ring=ring, opener=opener, stop=self._stop, on_fault=self.record.fault
        )
        self._lock = threading.Lock()
        self._num_duplicates = 0
        self._bytes_direct = self._bytes_pool = 0
        self._verified: Verified = "reference"
        self._seconds = {"read": 0.0, "wait": 0.0, "copy": 0.0}
        self._started_s = time.perf_counter()
        self._published = False
        self._allocation: Allocation | None = arena.allocate(program.arena_bytes, config.plan.alignment_bytes)
        self._sink = ArenaSink(arena, self._allocation, {view.tensor: view.offset for view in program.views})

    @property
    def missing_blocks(self) -> Int64Array:
        """Plan ids of the blocks that have not arrived, in plan order; direct ones included."""
        with self._lock:
            missing: Int64Array = self.program.blocks.block[self._states != _ARRIVED]
            return missing

    @property
    def num_duplicates(self) -> int:
        """Blocks that came again and were ignored."""
        return self._num_duplicates

    @property
    def bytes_to_device(self) -> int:
        """Bytes written into the arena so far."""
        with self._lock:
            return self._bytes_direct + self._bytes_pool

    @property
    def reads(self) -> ReadTotals:
        """Bytes that the session itself read from storage."""
        return self._reader.counters.totals()

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Direct reads that failed and were repaired."""
        return self._reader.faults

    @property
    def verified(self) -> Verified:
        """How the direct reads were checked: the weakest of them."""
        return self._verified

    def add_seconds(self, step: str, seconds: float) -> None:
        """Adds to the time of a step of the report, as the actor does for its waits."""
        with self._lock:
            self._seconds[step] = self._seconds.get(step, 0.0) + seconds

    def apply(self, block: int, data: Bytes, crc32s: Crc32Array) -> bool:
        """Puts the rank's segments of a block in place and makes sure that they arrived as they were cut.

        Args:
            block: Plan id; a block of a direct extent is taken too, it comes when the direct read failed.
            data: Its bytes, read-only or not; not needed after the call.
            crc32s: Checksum of each of its segments, of those of other ranks too.

        Returns:
            False for a block that is there already, or is being put in place by another thread: it is ignored.

        Raises:
            IntegrityError: A segment does not match. The block counts as missing; it may be applied again.
            RequestError: The block is not of this rank, or the session was released.
        """
        row = self._row_of_block.get(block)
        if row is None:
            raise RequestError(
                f"rank {self.program.rank}: block {block} is not in its program; plan and programs differ"
            )
        with self._writing(), self._arriving(row) as claimed:
            if not claimed:
                return False
            started_s, begin_s = time.perf_counter(), self.record.now()
            placed_bytes = self._put(block, row, data, crc32s)
            self.record.copied(begin_s, placed_bytes, block=block)
            with self._lock:
                self._bytes_pool += placed_bytes
                self._seconds["copy"] += time.perf_counter() - started_s
        return True

    def read_direct(self, on_failure: DirectFailure | None = None, *, stop: threading.Event | None = None) -> None:
        """Reads the program's direct extents with as many threads as ``config.io`` allows for their storage.

        Args:
            on_failure: Called (from any thread) with the plan id of an extent that could not be read and the error; the
                others go on. Without it, the first error ends the reading and is raised.
            stop: Set from outside, it ends the reading early.

        Raises:
            IntegrityError, SourceError: An extent could not be read.
            ClusterError: ``stop`` was set.
        """

        def read(row: int) -> None:
            try:
                self.read_extent(row)
            except MegamindError as error:
                if on_failure is None:
                    raise
                on_failure(int(self.program.extents.extent[row]), error)

        run_team(
            range(len(self.program.extents)),
            read,
            num_threads=min(self._config.io.reads_in_flight(self.program.files.root), len(self.program.extents)),
            name=f"rank-{self.program.rank}-read",
            stop=stop or self._stop,
            on_failure=self._reader.stop,
        )

    def read_extent(self, row: int) -> None:
        """Reads one direct extent: row ``row`` of the program's extent table. Any thread may call it."""
        extents = self.program.extents
        file, begin, end = int(extents.file[row]), int(extents.begin[row]), int(extents.end[row])
        block_rows = self._cutter.rows_of(int(extents.extent[row]))
        segments = [segment for block_row in block_rows for segment in self._cutter.segments_of_row(block_row)]
        with self._writing(), self._arriving(*block_rows) as claimed:
            if not claimed:
                return
            started_s, begin_s = time.perf_counter(), self.record.now()
            verified = read_to_sink(self._reader, self._sink, file, begin, end, segments)
            self._reader.check_unchanged(file)  # now, as an extent that cannot be used may come another way
            placed_bytes = sum(segment.nbytes for segment in segments)
            name = self.program.files.files[file].path
            self.record.read(begin_s, end - begin, placed_bytes=placed_bytes, file=name)
            with self._lock:
                self._bytes_direct += placed_bytes
                self._seconds["read"] += time.perf_counter() - started_s
                if verified != "reference":
                    self._verified = verified

    def finish(self) -> None:
        """Makes sure that every byte arrived once and publishes the tensors. A second call does nothing.

        Raises:
            ClusterError: Blocks are missing, or the program's blocks do not fill its views.
            IntegrityError: A file changed while its direct extents were read.
        """
        if self._published:
            return
        rank, missing = self.program.rank, self.missing_blocks
        if len(missing):
            raise ClusterError(
                f"rank {rank}: {len(missing)} of {len(self.program.blocks)} blocks did not arrive "
                f"(the first are {missing[:8].tolist()}); load again"
            )
        wanted = sum(view.nbytes for view in self.program.views if not view.alias)
        if self.bytes_to_device != wanted:
            raise ClusterError(
                f"rank {rank}: its blocks brought {self.bytes_to_device} bytes, its tensors have {wanted}; plan again"
            )
        # Each extent was followed by such a check; network file systems may cache what it asks for some seconds.
        self._reader.check_unchanged()
        self._reader.close()
        self._seconds["total"] = time.perf_counter() - self._started_s
        self._published = True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The rank's tensors by name; tied names have one tensor.

        Each tensor has a storage of its own in the arena and holds a lease on it until it, and all views of it, are
        forgotten. Dtypes that torch lacks come as packed ``uint8``.

        Raises:
            RequestError: The session is not finished, or was released.
        """
        if not self._published:
            raise RequestError(f"rank {self.program.rank}: its tensors have not all arrived; call finish() first")
        allocation = self._require_allocation()
        by_tensor: dict[int, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for view in self.program.views:
            if view.tensor not in by_tensor:
                by_tensor[view.tensor] = self._arena.tensor(allocation, view)
            tensors[view.name] = by_tensor[view.tensor]
        return tensors

    def report(self, *, node: str = "local", gpu: int = 0) -> RankReport:
        """The rank's share of the load, so far.

        Args:
            node: Where it runs.
            gpu: On which GPU of that node.
        """
        program, coords = self.program, self.program.coords
        sample = max((view for view in program.views if not view.alias), key=lambda view: view.nbytes, default=None)
        with self._lock:
            return RankReport(
                rank=program.rank,
                pp=coords.pp,
                dp=coords.dp,
                tp=coords.tp,
                node=node,
                gpu=gpu,
                num_tensors=len(program.views),
                arena_bytes=program.arena_bytes,
                bytes_to_device=self._bytes_direct + self._bytes_pool,
                bytes_direct=self._bytes_direct,
                bytes_pool=self._bytes_pool,
                seconds={"total": time.perf_counter() - self._started_s} | self._seconds,
                sample_tensor=f"{sample.name} {list(sample.shape)}" if sample else "",
            )

    def stop(self) -> None:
        """Ends direct reads under way, as soon as what each thread reads now has come."""
        self._stop.set()

    def release(self, deadline_s: float = 0.0) -> None:
        """Gives the memory back. A second call does nothing.

        Args:
            deadline_s: How long to wait for tensors that are still held, and for threads that still write.

        Raises:
            RequestError: Tensors are held after the deadline; the session stays as it was.
        """
        self._stop.set()
        allocation = self._allocation
        if allocation is None:
            return
        self._arena.free(allocation, deadline_s)
        self._allocation = None
        self._published = False
        self._reader.close()

    def _require_allocation(self) -> Allocation:
        allocation = self._allocation
        if allocation is None:
            raise RequestError(f"rank {self.program.rank}: the model was unloaded; load it again")
        return allocation

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keeps ``release`` from giving memory away that a thread writes to."""
        with self._arena.lease(self._require_allocation()):
            yield

    @contextmanager
    def _arriving(self, *rows: int) -> Iterator[bool]:
        """Claims blocks for the calling thread; gives False where one is there or under way."""
        with self._lock:
            claimed = bool((self._states[list(rows)] == _MISSING).all())
            if claimed:
                self._states[list(rows)] = _ARRIVING
            else:
                self._num_duplicates += 1
        if not claimed:
            yield False
            return
        state = _MISSING
        try:
            yield True
            state = _ARRIVED
        finally:
            with self._lock:
                self._states[list(rows)] = state

    def _put(self, block: int, row: int, data: Bytes, crc32s: Crc32Array) -> int:
        """Gives the number of bytes that are in place then."""
        segments, blocks = self._cutter.segments_of_row(row), self.program.blocks
        if data.nbytes != int(blocks.nbytes[row]) or len(crc32s) != int(blocks.num_segments[row]):
            raise self._wrong(block, row, None, f"{data.nbytes} bytes and {len(crc32s)} checksums came")
        with ExitStack() as under_way:  # the block's memory is the caller's again only when the device is done with it
            for segment in segments:
                expected = int(crc32s[segment.position])
                packed = data[segment.block_offset : segment.block_offset + segment.nbytes]
                # In place where the host sees the bytes in one piece: then the check covers the copy as well.
                in_place = segment.dst.contiguous and self._sink.host(segment.tensor) is not None
                if not in_place and crc32(packed) != expected:
                    raise self._wrong(block, row, segment, f"CRC-32 is not {expected:08x}")
                ticket = self._sink.write(segment.tensor, segment.dst, packed)
                if ticket is not None:
                    under_way.callback(ticket.wait)
                if in_place and self._sink.checksum(segment.tensor, segment.dst) != expected:
                    raise self._wrong(block, row, segment, f"CRC-32 is not {expected:08x}")
        return sum(segment.nbytes for segment in segments)

    def _wrong(self, block: int, row: int, segment: Segment | None, what: str) -> IntegrityError:
        extent = int(self.program.blocks.extent[row])
        where = f"{self.program.files.root} (extent {extent})"
        names = {view.tensor: view.name for view in reversed(self.program.views)}
        tensor = names.get(segment.tensor) if segment else None
        begin, end = (segment.src.offset, segment.src.end) if segment else (None, None)
        place = f", tensor {tensor}, file bytes [{begin}, {end})" if segment else ""
        return IntegrityError(
            f"rank {self.program.rank}: block {block} of {where}{place} arrived damaged: {what} "
            f"for {format_bytes(int(self.program.blocks.nbytes[row]))}; it must be read again",
            file=where,
            tensor=tensor,
            begin=begin,
            end=end,
        )
