"""Reading slices of a checkpoint to wherever they belong in this process, each byte of storage once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from megamind_ray.config import Config, IoConfig
from megamind_ray.core.demands import Demands, Int64Array, SliceTable, ViewTable
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.program import BlockTable, FileTable, SegmentTable
from megamind_ray.core.report import Fault, Verified
from megamind_ray.core.tensor import TensorInfo
from megamind_ray.device.arena import host_buffer
from megamind_ray.device.memory import usable_cores
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.cut import BlockCutter
from megamind_ray.engine.direct import Sink, read_to_sink
from megamind_ray.engine.extent_reader import ExtentReader, SourceOpener
from megamind_ray.engine.staging import staging_ring
from megamind_ray.engine.team import run_team
from megamind_ray.io.counters import ReadTotals
from megamind_ray.planning.compile import file_table
from megamind_ray.planning.extents import Cut, cut
from megamind_ray.planning.geometry import BoxRows
from megamind_ray.planning.grid import Grid
from megamind_ray.units import MIB

__all__ = ["ReadSummary", "SliceRows", "read_slices", "slice_table", "whole_tensors"]

# Looked up before a load: all of them in memory means that all is, or that few reads will have to wait.
_SAMPLED_SLICES: Final = 8
# Of an extent that is in memory: with longer ones the last thread works too long alone (docs/design/0010).
_LONGEST_IN_MEMORY_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True)
class SliceRows:
    """Strided rows of one tensor on disk that go to one destination.

    Attributes:
        file: Index into the manifest's files.
        tensor: The sink's number of the destination.
        rows: Offsets are absolute in the file, and in the destination.
    """

    file: int
    tensor: int
    rows: BoxRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSummary:
    """What was read.

    Attributes:
        totals: Bytes, counted at the read calls.
        verified: ``reference`` where every chunk was checked against a trusted checksum.
        faults: What went wrong and was dealt with.
        seconds: From the first read to the last byte in place.
    """

    totals: ReadTotals
    verified: Verified
    faults: tuple[Fault, ...]
    seconds: float


def read_slices(
    manifest: Manifest,
    slices: SliceTable,
    sink: Sink,
    config: Config,
    *,
    opener: SourceOpener | None = None,
    make_buffer: Callable[[int], Bytes] = host_buffer,
    stop: threading.Event | None = None,
) -> ReadSummary:
    """Reads slices with ``config.io.reads_in_flight`` threads; returns when all are in place.

    Args:
        manifest: The checkpoint.
        slices: What to read, sorted by (file, offset).
        sink: Where to; ``slices.tensor`` are its numbers.
        config: Sizes, threads, retries.
        opener: Opens files; by default ``io.open_source`` with the settings of ``config``.
        make_buffer: Makes staging buffers.
        stop: Set from outside, it ends the reading early.

    Raises:
        IntegrityError, SourceError: Bytes are wrong, or cannot be read. Some slices may be in place already.
        ClusterError: ``stop`` was set.
    """
    reference = manifest.reference
    files = file_table(manifest, reference.chunk_bytes if reference else config.io.chunk_bytes)
    reader = ExtentReader(files, config, ring=staging_ring(files, config.io, make_buffer), opener=opener, stop=stop)
    checks: list[Verified] = []

    def read(extent: int) -> None:
        segments = [segment for row in cutter.rows_of(extent) for segment in cutter.segments_of_row(row)]
        file, begin, end = (int(column[extent]) for column in (pieces.file, pieces.begin, pieces.end))
        checks.append(read_to_sink(reader, sink, file, begin, end, segments))

    started_s = time.perf_counter()
    try:
        pace = _pace(reader, slices, config.io, manifest.root)
        pieces = _cut(manifest, slices, files, config.io, pace)
        cutter = _cutter(pieces)
        run_team(
            range(len(pieces.begin)),
            read,
            num_threads=max(1, min(pace.num_threads, len(pieces.begin))),
            name="slice-read",
            stop=stop,
            on_failure=reader.stop,
        )
        # Each extent was followed by such a check; network file systems may cache what it asks for some seconds.
        reader.check_unchanged()
    finally:
        reader.close()
    return ReadSummary(
        totals=reader.counters.totals(),
        verified="transit" if "transit" in checks or manifest.reference is None else "reference",
        faults=reader.faults,
        seconds=time.perf_counter() - started_s,
    )


def slice_table(pieces: Sequence[SliceRows]) -> SliceTable:
    """Rows of many tensors as one table, sorted as ``read_slices`` wants them."""

    def column(name: str) -> Int64Array:
        return np.concatenate([np.empty(0, np.int64), *(getattr(piece.rows, name) for piece in pieces)])

    owners = np.repeat(np.arange(len(pieces)), np.array([len(piece.rows) for piece in pieces], np.int64))
    file = np.array([piece.file for piece in pieces], np.int64)[owners]
    tensor = np.array([piece.tensor for piece in pieces], np.int64)[owners]
    return _sorted_table(file, tensor, BoxRows(**{name: column(name) for name in BoxRows.__slots__}))


def whole_tensors(infos: Sequence[TensorInfo]) -> SliceTable:
    """All bytes of some tensors; the sink's numbers are their places in ``infos``."""
    nbytes = np.array([info.nbytes for info in infos], np.int64)
    tensor = np.flatnonzero(nbytes)
    file, begin = (
        np.array(column, np.int64)[tensor] for column in ([it.file for it in infos], [it.begin for it in infos])
    )
    nbytes, zeros = nbytes[tensor], np.zeros(len(tensor), np.int64)
    return _sorted_table(file, tensor, BoxRows(begin, nbytes, np.ones_like(zeros), nbytes, zeros, nbytes))


def _sorted_table(file: Int64Array, tensor: Int64Array, rows: BoxRows) -> SliceTable:
    order = np.lexsort((tensor, rows.src_offset, file))
    nothing = np.zeros(len(order), np.int64)
    return SliceTable(
        file=file[order],
        disk_tensor=nothing,
        tensor=tensor[order],
        consumers=nothing,
        **{name: getattr(rows, name)[order] for name in BoxRows.__slots__},
    )


@dataclass(frozen=True, slots=True)
class _Pace:
    """Reads in flight, and the longest extent in bytes."""

    num_threads: int
    extent_bytes: int


def _pace(reader: ExtentReader, slices: SliceTable, io: IoConfig, root: str) -> _Pace:
    """As storage wants it; for bytes in memory a thread for each core, with as many bytes in flight (0010).

    A read of the page cache takes a core's time. Further threads only wait for each other, and each extent costs the
    same work in Python however long it is.
    """
    most, cores = io.reads_in_flight(root), usable_cores()
    if most <= cores or io.is_remote(root) or not len(slices.file):
        return _Pace(most, io.extent_bytes)
    for row in np.linspace(0, len(slices.file) - 1, min(_SAMPLED_SLICES, len(slices.file))).astype(np.int64):
        begin = int(slices.src_offset[row])
        if not reader.is_in_memory(int(slices.file[row]), begin, begin + int(slices.run_bytes[row])):
            return _Pace(most, io.extent_bytes)
    return _Pace(cores, max(io.extent_bytes, min(io.extent_bytes * most // cores, _LONGEST_IN_MEMORY_BYTES)))


def _cut(manifest: Manifest, slices: SliceTable, files: FileTable, io: IoConfig, pace: _Pace) -> Cut:
    """Extents as the planner makes them, for one consumer; short ones where there is little to share among threads."""
    chunk_bytes = files.chunk_bytes
    share_bytes = int((slices.run_bytes * slices.num_runs).sum()) // (4 * pace.num_threads)
    extent_bytes = min(max(pace.extent_bytes, chunk_bytes), max(share_bytes, chunk_bytes))
    grid = Grid(
        files=manifest.files,
        chunk_bytes=chunk_bytes,
        extent_bytes=extent_bytes // chunk_bytes * chunk_bytes,
        max_gap_bytes=io.gap_bytes(manifest.root),
        whole_chunks=manifest.reference is not None,
    )
    none = np.empty(0, np.int64)
    views = ViewTable(**dict.fromkeys(ViewTable.__slots__, none))
    demands = Demands(
        parallel=Parallel(), tensors=(), names=(), shapes=(), views=views, slices=slices, consumer_sets=((0,),)
    )
    return cut(demands, grid, np.zeros(1, np.int64))


def _cutter(pieces: Cut) -> BlockCutter:
    segments = pieces.segments
    num_blocks = len(pieces.block_extent)
    first = np.searchsorted(segments.block, np.arange(num_blocks + 1))
    blocks = BlockTable(
        block=np.arange(num_blocks, dtype=np.int64),
        extent=pieces.block_extent,
        nbytes=pieces.block_nbytes,
        consumers=pieces.block_consumers,
        num_segments=np.diff(first),
        first_segment=first,
    )
    names = [name for name in SegmentTable.__slots__ if name != "position"]
    position = np.arange(len(segments.block)) - first[segments.block]
    return BlockCutter(blocks, SegmentTable(position=position, **{name: getattr(segments, name) for name in names}))
