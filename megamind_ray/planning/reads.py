"""What one reader reads for itself alone: no nodes, no blocks, nobody to share with (docs/design/0010)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megamind_ray.core.demands import Int64Array, SliceTable
from megamind_ray.planning.grid import Grid, Ranges, demanded_ranges, rows_of
from megamind_ray.planning.pieces import Pieces, pieces_of

__all__ = ["Pace", "Reads", "cut_reads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a team reads.

    Attributes:
        num_threads: Extents under way at a time.
        longest_bytes: Of an extent, at the begin.
        shortest_bytes: Of an extent, at the end.
    """

    num_threads: int
    longest_bytes: int
    shortest_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Extents, and what is taken from each. Offsets are in files.

    Attributes:
        file: By extent, ascending.
        begin: By extent.
        end: By extent.
        first: By extent, its first row of ``pieces``, and at last their number.
        pieces: Ordered by extent; ``src`` is an offset in the file.
    """

    file: Int64Array
    begin: Int64Array
    end: Int64Array
    first: Int64Array
    pieces: Pieces

    def __len__(self) -> int:
        return len(self.begin)


def cut_reads(slices: SliceTable, grid: Grid, pace: Pace) -> Reads:
    """Cuts the demanded bytes into extents, which end on the borders of chunks.

    Each extent has half of a thread's share of what is left, within the pace's bounds: long as long as there is much,
    since each costs the same work however long it is, and short at the end, so that all threads end together. This is
    the guided self-scheduling of Polychronopoulos and Kuck (IEEE Transactions on Computers, 1987), with half their
    share, as storage does not serve all threads equally fast.

    Args:
        slices: What is needed.
        grid: Files and sizes; ``pace`` bounds extents in place of ``extent_bytes``.
        pace: How they are read.
    """
    rows = rows_of(slices, grid)
    extents = _guided(demanded_ranges(rows, grid), grid.chunk_bytes, pace)
    base, shift = grid.bases()
    file = np.searchsorted(base, extents.begin, side="right") - 1
    pieces = pieces_of(rows, extents, slices)
    order = np.argsort(pieces.extent, kind="stable")
    columns = {name: getattr(pieces, name)[order] for name in Pieces.__slots__}
    columns["src"] = columns["src"] + shift[file[columns["extent"]]]
    return Reads(
        file=file,
        begin=extents.begin + shift[file],
        end=extents.end + shift[file],
        first=np.searchsorted(columns["extent"], np.arange(len(extents) + 1)),
        pieces=Pieces(**columns),
    )


def _guided(demanded: Ranges, chunk_bytes: int, pace: Pace) -> Ranges:
    begins, ends = list[int](), list[int]()
    left = int((demanded.end - demanded.begin).sum())
    for begin, last in zip(demanded.begin.tolist(), demanded.end.tolist(), strict=True):
        while begin < last:
            length = min(max(left // (2 * pace.num_threads), pace.shortest_bytes), pace.longest_bytes)
            end = min(last, max(begin // chunk_bytes + 1, (begin + length) // chunk_bytes) * chunk_bytes)
            begins.append(begin)
            ends.append(end)
            left -= end - begin
            begin = end
    return Ranges(np.array(begins, np.int64), np.array(ends, np.int64))
