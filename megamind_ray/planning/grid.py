"""Which bytes of a file are read together: chunk grid, demanded ranges, chunk classes, extents (docs/design/0005).

Inside the planner positions are *global*: the data of all files one after the other, each beginning on a chunk
boundary. A chunk of any file is then ``position // chunk_bytes``, and a range of bytes never crosses files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from megamind_ray.core.demands import Int64Array, SliceTable
from megamind_ray.core.manifest import FileInfo
from megamind_ray.planning.columns import Grouped, expand, group_sets
from megamind_ray.units import MIB

__all__ = [
    "STRIDED_GAP_BYTES",
    "ChunkUse",
    "Grid",
    "Ranges",
    "Rows",
    "Sets",
    "chunk_use",
    "demanded_ranges",
    "extents_of",
    "packed",
    "rows_of",
    "sets_of",
]

# A strided slice with smaller gaps is read in one piece: another read costs about as much as this many bytes do.
STRIDED_GAP_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The chunk grid of all files and what may be read together.

    Attributes:
        files: Data files.
        chunk_bytes: Size of a chunk.
        extent_bytes: Longest extent; a multiple of ``chunk_bytes``.
        max_gap_bytes: Gaps up to this size are read over.
        whole_chunks: Read every touched chunk whole, because only a whole chunk can be checked.
        own_extent_bytes: Longest extent of chunks that are kept apart for one rank; None: ``extent_bytes``.
    """

    files: Sequence[FileInfo]
    chunk_bytes: int
    extent_bytes: int
    max_gap_bytes: int
    whole_chunks: bool = False
    own_extent_bytes: int | None = None

    def bases(self) -> tuple[Int64Array, Int64Array]:
        """By file, its global position, and the shift from global to file offsets."""
        data_begin = np.array([file.data_begin for file in self.files], np.int64)
        size = np.array([file.size_bytes for file in self.files], np.int64) - data_begin
        # Two chunks of distance: no gap between files is ever small enough to be read over.
        padded = (-(-size // self.chunk_bytes) + 2) * self.chunk_bytes
        base = np.cumsum(padded) - padded
        return base, data_begin - base

    def ends(self) -> Int64Array:
        """By file, the global position of its end."""
        _, shift = self.bases()
        return np.array([file.size_bytes for file in self.files], np.int64) - shift


@dataclass(frozen=True, slots=True)
class Rows:
    """Slices at global positions: runs of ``run`` bytes, ``stride`` apart, from ``begin`` to ``end``."""

    begin: Int64Array
    end: Int64Array
    run: Int64Array
    stride: Int64Array
    dst: Int64Array
    dst_stride: Int64Array
    consumers: Int64Array
    source: Int64Array  # row of the slice table

    def __len__(self) -> int:
        return len(self.begin)

    def part(self, begin: int, end: int) -> Rows:
        """Some of the rows."""
        return Rows(*(getattr(self, item.name)[begin:end] for item in fields(self)))


@dataclass(frozen=True, slots=True)
class Sets:
    """By consumer set, its lowest and highest rank and the nodes of its ranks."""

    lowest: Int64Array
    highest: Int64Array
    nodes: Grouped


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """Which sets of ranks need how much of the chunks that somebody needs.

    Attributes:
        chunk: Those chunks, ascending.
        kind: By chunk; chunks that the same sets need are of one kind.
        sets: By kind, the sets.
        nbytes: By entry of ``sets``, the bytes that the set needs of all chunks of the kind together.
    """

    chunk: Int64Array
    kind: Int64Array
    sets: Grouped
    nbytes: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Disjoint ascending ranges at global positions."""

    begin: Int64Array
    end: Int64Array

    def __len__(self) -> int:
        return len(self.begin)


def extents_of(rows: Rows, use: ChunkUse, sets: Sets, grid: Grid, *, apart: bool) -> Ranges:
    """Extents: runs of consecutive chunks of one class, no longer than the grid says.

    Args:
        rows: What is needed.
        use: The same, by chunk.
        sets: By whom.
        grid: Files and sizes.
        apart: Give chunks that one rank alone needs extents of their own.
    """
    demanded = demanded_ranges(rows, grid)
    first = demanded.begin // grid.chunk_bytes
    owner, step = expand((demanded.end - 1) // grid.chunk_bytes - first + 1)
    chunk = first[owner] + step
    # A gap that was read over may hold a whole chunk that nobody needs.
    needed = np.isin(chunk, use.chunk)
    owner, chunk = owner[needed], chunk[needed]
    if not len(chunk):
        return Ranges(chunk, chunk)
    key = _class_keys(use, sets, apart=apart)[use.kind[np.searchsorted(use.chunk, chunk)]]
    fresh = (np.diff(owner) != 0) | (np.diff(chunk) != 1) | (np.diff(key) != 0)
    run_start = np.concatenate([[0], np.flatnonzero(fresh) + 1])
    position = np.arange(len(chunk)) - np.repeat(run_start, np.diff(np.append(run_start, len(chunk))))
    own_bytes = grid.extent_bytes if grid.own_extent_bytes is None else grid.own_extent_bytes
    longest = np.where(key >= 0, own_bytes, grid.extent_bytes) // grid.chunk_bytes
    start = np.flatnonzero(position % longest == 0)
    last = np.append(start[1:], len(chunk)) - 1
    begin = np.maximum(demanded.begin[owner[start]], chunk[start] * grid.chunk_bytes)
    return Ranges(begin, np.minimum(demanded.end[owner[last]], (chunk[last] + 1) * grid.chunk_bytes))


def sets_of(consumer_sets: Sequence[tuple[int, ...]], node_of_rank: Int64Array) -> Sets:
    """Columns about sets of ranks, each ascending."""
    members = group_sets(consumer_sets)
    owner, rank = members.explode(np.arange(len(members), dtype=np.int64))
    nodes = Grouped.from_pairs(owner, node_of_rank[rank], len(members))
    # Sets are ascending, so their ends are their extremes.
    return Sets(members.values[members.first[:-1]], members.values[members.first[1:] - 1], nodes)


def rows_of(slices: SliceTable, grid: Grid) -> Rows:
    """The slice table at global positions; slices with wide gaps become one row per run."""
    source = np.flatnonzero((slices.run_bytes > 0) & (slices.num_runs > 0))
    run, num, stride = slices.run_bytes[source], slices.num_runs[source], slices.src_stride_bytes[source]
    wide = (num > 1) & (stride - run >= min(STRIDED_GAP_BYTES, grid.chunk_bytes))
    owner, step = expand(np.where(wide, num, 1))
    source, run, num, stride = source[owner], run[owner], np.where(wide, 1, num)[owner], stride[owner]
    dst_stride = slices.dst_stride_bytes[source]
    # Runs that touch on both sides are one run.
    whole = (num > 1) & (stride == run) & (dst_stride == run)
    run, num = np.where(whole, run * num, run), np.where(whole, 1, num)
    _, shift = grid.bases()
    begin = slices.src_offset[source] - shift[slices.file[source]] + step * stride
    stride, dst = np.where(num > 1, stride, run), slices.dst_offset[source] + step * dst_stride
    end = begin + (num - 1) * stride + run
    return Rows(begin, end, run, stride, dst, dst_stride, slices.consumers[source], source)


def demanded_ranges(rows: Rows, grid: Grid) -> Ranges:
    """Disjoint ascending ranges that cover all rows; gaps of at most ``max_gap_bytes`` are inside."""
    begin, end, gap = rows.begin, rows.end, grid.max_gap_bytes
    if grid.whole_chunks:
        file_end = grid.ends()
        file = np.searchsorted(file_end, begin, side="right")
        begin = begin // grid.chunk_bytes * grid.chunk_bytes
        end, gap = np.minimum(-(-end // grid.chunk_bytes) * grid.chunk_bytes, file_end[file]), 0
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    starts = np.flatnonzero(np.concatenate([[True], begin[1:] > reach[:-1] + gap])) if len(begin) else order
    ends = np.append(starts[1:], len(begin)) - 1 if len(begin) else order
    return Ranges(begin[starts], reach[ends])


def chunk_use(rows: Rows, num_sets: int, grid: Grid) -> ChunkUse:
    """Who needs how much of which chunk. Says nothing of nodes: it is the same for every placement."""
    size, num_sets = grid.chunk_bytes, max(1, num_sets)
    first = rows.begin // size
    owner, step = expand((rows.end - 1) // size - first + 1)
    chunk = first[owner] + step
    begin, run, stride = rows.begin[owner], rows.run[owner], rows.stride[owner]
    low = np.maximum(chunk * size, begin) - begin
    high = np.minimum((chunk + 1) * size, rows.end[owner]) - begin
    nbytes = packed(high, run, stride) - packed(low, run, stride)
    keys = chunk * num_sets + rows.consumers[owner]
    order = np.argsort(keys)
    keys, nbytes = keys[order], nbytes[order]
    start = _starts(keys)
    chunk, consumers = np.divmod(keys[start], num_sets)
    needed = np.add.reduceat(nbytes, start).astype(np.float64) if len(start) else np.zeros(0)
    first = _starts(chunk)
    # Chunks with the same sets have the same sum of marks. A collision would only join two kinds of chunks in one
    # extent, which is correct, if not the best.
    marks = np.add.reduceat(_mark(consumers), first) if len(first) else np.zeros(0, np.uint64)
    _, kind = np.unique(marks, return_inverse=True)
    num_kinds = int(kind.max(initial=-1)) + 1
    kind_of_pair = np.repeat(kind, np.diff(np.append(first, len(chunk))))
    sets = Grouped.from_pairs(kind_of_pair, consumers, num_kinds)
    listed = np.repeat(np.arange(num_kinds, dtype=np.int64), sets.counts) * num_sets + sets.values
    part = np.searchsorted(listed, kind_of_pair * num_sets + consumers)
    of_part = np.asarray(np.bincount(part, weights=needed, minlength=len(listed)), np.float64)
    return ChunkUse(chunk[first], kind, sets, of_part)


def packed(position: Int64Array, run: Int64Array, stride: Int64Array) -> Int64Array:
    """How many bytes of runs lie before a position of a strided slice."""
    index, rest = np.divmod(position, stride)
    return index * run + np.minimum(rest, run)


def _starts(ordered: Int64Array) -> Int64Array:
    """Where equal values begin."""
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)])


def _class_keys(use: ChunkUse, sets: Sets, *, apart: bool) -> Int64Array:
    """By kind of chunk, its class: its only rank, or else a fingerprint of its consumer nodes, which is negative.

    Consecutive chunks of one class may share an extent.
    """
    if not len(use.sets):
        return np.zeros(0, np.int64)
    lowest = np.minimum.reduceat(sets.lowest[use.sets.values], use.sets.first[:-1])
    highest = np.maximum.reduceat(sets.highest[use.sets.values], use.sets.first[:-1])
    of_pair, node = sets.nodes.explode(use.sets.values)
    kind = np.searchsorted(use.sets.first, of_pair, side="right") - 1
    nodes = Grouped.from_pairs(kind, node, len(use.sets))
    marks = np.add.reduceat(_mark(nodes.values), nodes.first[:-1])
    return np.where((lowest == highest) & apart, lowest, -1 - (marks >> 1).astype(np.int64))


def _mark(number: Int64Array) -> npt.NDArray[np.uint64]:
    """A well-mixed 64-bit number for each (splitmix64); sums of them tell sets apart."""
    mixed = (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result
