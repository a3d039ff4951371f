"""Reading slices of a checkpoint to wherever they belong in this process, each byte of storage once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from megamind_ray.config import Config, IoConfig
from megamind_ray.core.demands import Int64Array, SliceTable
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.program import FileTable
from megamind_ray.core.report import Fault, Verified
from megamind_ray.core.tensor import TensorInfo
from megamind_ray.device.arena import host_buffer
from megamind_ray.device.memory import usable_cores
from megamind_ray.device.strided import Bytes, Runs
from megamind_ray.engine.cut import Move
from megamind_ray.engine.direct import Sink, read_to_sink
from megamind_ray.engine.extent_reader import ExtentReader, SourceOpener
from megamind_ray.engine.staging import staging_ring
from megamind_ray.engine.team import run_team
from megamind_ray.io.counters import ReadTotals
from megamind_ray.planning.compile import file_table
from megamind_ray.planning.geometry import BoxRows
from megamind_ray.planning.grid import Grid
from megamind_ray.planning.pieces import Pieces
from megamind_ray.planning.reads import Pace, cut_reads
from megamind_ray.units import MIB

__all__ = ["ReadSummary", "SliceRows", "read_slices", "slice_table", "whole_tensors"]

# Looked up before a load: all of them in memory means that all is, or that few reads will have to wait.
_SAMPLED_SLICES: Final = 8
# Of an extent that is in memory: beyond, longer ones save nothing (docs/design/0010).
_LONGEST_IN_MEMORY_BYTES: Final = 128 * MIB
# Of the last extents: shorter ones would take longer to begin than to read.
_SHORTEST_BYTES: Final = 2 * MIB
_SHORTEST_IN_MEMORY_BYTES: Final = 8 * MIB


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
        file, begin, end = (int(column[extent]) for column in (reads.file, reads.begin, reads.end))
        first, last = reads.first[extent : extent + 2].tolist()
        checks.append(read_to_sink(reader, sink, file, begin, end, _moves(reads.pieces, first, last)))

    started_s = time.perf_counter()
    try:
        pace = _pace(reader, slices, config.io, manifest.root)
        reads = cut_reads(slices, _grid(manifest, files, config.io), pace)
        run_team(
            range(len(reads)),
            read,
            num_threads=max(1, min(pace.num_threads, len(reads))),
            name="slice-read",
            stop=stop,
            on_failure=reader.stop,
        )
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


def _pace(reader: ExtentReader, slices: SliceTable, io: IoConfig, root: str) -> Pace:
    """As storage wants it; for bytes in memory a thread for each core, with as many bytes in flight (0010).

    A read of the page cache takes a core's time. Further threads only wait for each other, and each extent costs the
    same work in Python however long it is.
    """
    num_threads, cores = io.reads_in_flight(root), usable_cores()
    longest_bytes, shortest_bytes = io.extent_bytes, _SHORTEST_BYTES
    if num_threads > cores and not io.is_remote(root) and _is_in_memory(reader, slices):
        longest_bytes = max(longest_bytes, min(longest_bytes * num_threads // cores, _LONGEST_IN_MEMORY_BYTES))
        shortest_bytes = _SHORTEST_IN_MEMORY_BYTES
        num_threads = cores
    # Where there is little to share among the threads, it is shared all the same.
    share_bytes = int((slices.run_bytes * slices.num_runs).sum()) // (4 * num_threads)
    if io.is_remote(root):  # each chunk is a request of its own: the length of extents does not matter
        longest_bytes = shortest_bytes = min(longest_bytes, share_bytes)
    else:
        shortest_bytes = min(shortest_bytes, share_bytes)
    return Pace(num_threads=num_threads, longest_bytes=longest_bytes, shortest_bytes=shortest_bytes)


def _is_in_memory(reader: ExtentReader, slices: SliceTable) -> bool:
    num_slices = len(slices.file)
    for row in np.linspace(0, num_slices - 1, min(_SAMPLED_SLICES, num_slices)).astype(np.int64):
        begin = int(slices.src_offset[row])
        if not reader.is_in_memory(int(slices.file[row]), begin, begin + int(slices.run_bytes[row])):
            return False
    return num_slices > 0


def _grid(manifest: Manifest, files: FileTable, io: IoConfig) -> Grid:
    """The grid that extents end on: of chunks only where chunks are checked or requested one by one."""
    by_chunk = manifest.reference is not None or io.is_remote(manifest.root)
    return Grid(
        files=manifest.files,
        chunk_bytes=files.chunk_bytes if by_chunk else min(files.chunk_bytes, _SHORTEST_BYTES),
        extent_bytes=io.extent_bytes,
        max_gap_bytes=io.gap_bytes(manifest.root),
        whole_chunks=manifest.reference is not None,
    )


def _moves(pieces: Pieces, begin: int, end: int) -> list[Move]:
    """Rows ``[begin, end)`` as objects."""
    columns = (
        pieces.tensor,
        pieces.src,
        pieces.run,
        pieces.num,
        pieces.stride,
        pieces.dst,
        pieces.dst_stride,
    )
    # Plain integers in one go: indexing numpy columns one by one costs ten times as much.
    return [
        Move(tensor, Runs(src, run, num, stride), Runs(dst, run, num, dst_stride))
        for tensor, src, run, num, stride, dst, dst_stride in zip(
            *(column[begin:end].tolist() for column in columns), strict=True
        )
    ]
