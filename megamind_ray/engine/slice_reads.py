"""Reading slices of a checkpoint to wherever they belong in this process, each byte of storage once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megamind_ray.config import Config
from megamind_ray.core.demands import Demands, Int64Array, SliceTable, ViewTable
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.program import BlockTable, FileTable, SegmentTable
from megamind_ray.core.report import Fault, Verified
from megamind_ray.device.arena import host_buffer
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

__all__ = ["ReadSummary", "SliceRows", "read_slices", "slice_table"]


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
    pieces = _cut(manifest, slices, files, config)
    cutter = _cutter(pieces)
    num_threads = max(1, min(config.io.reads_in_flight(manifest.root), len(pieces.begin)))
    reader = ExtentReader(files, config, ring=staging_ring(files, config.io, make_buffer), opener=opener, stop=stop)
    checks: list[Verified] = []

    def read(extent: int) -> None:
        segments = [segment for row in cutter.rows_of(extent) for segment in cutter.segments_of_row(row)]
        file, begin, end = (int(column[extent]) for column in (pieces.file, pieces.begin, pieces.end))
        checks.append(read_to_sink(reader, sink, file, begin, end, segments))

    started_s = time.perf_counter()
    try:
        run_team(
            range(len(pieces.begin)),
            read,
            num_threads=num_threads,
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

    counts = np.array([len(piece.rows) for piece in pieces], np.int64)
    owners = np.repeat(np.arange(len(pieces)), counts)
    file = np.array([piece.file for piece in pieces], np.int64)[owners]
    tensor = np.array([piece.tensor for piece in pieces], np.int64)[owners]
    columns = {name: column(name) for name in BoxRows.__slots__}
    order = np.lexsort((tensor, columns["src_offset"], file))
    nothing = np.zeros(len(order), np.int64)
    return SliceTable(
        file=file[order],
        disk_tensor=nothing,
        tensor=tensor[order],
        consumers=nothing,
        **{name: values[order] for name, values in columns.items()},
    )


def _cut(manifest: Manifest, slices: SliceTable, files: FileTable, config: Config) -> Cut:
    """Extents as the planner makes them, for one consumer; short ones where there is little to share among threads."""
    chunk_bytes = files.chunk_bytes
    share_bytes = int((slices.run_bytes * slices.num_runs).sum()) // (4 * config.io.reads_in_flight(manifest.root))
    extent_bytes = min(max(config.io.extent_bytes, chunk_bytes), max(share_bytes, chunk_bytes))
    grid = Grid(
        files=manifest.files,
        chunk_bytes=chunk_bytes,
        extent_bytes=extent_bytes // chunk_bytes * chunk_bytes,
        max_gap_bytes=config.io.gap_bytes(manifest.root),
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
