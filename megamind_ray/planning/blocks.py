"""Pieces of extents gathered into blocks: one for each extent and set of nodes (docs/design/0004, 0021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megamind_ray.core.demands import Int64Array
from megamind_ray.planning.columns import Grouped
from megamind_ray.planning.pieces import Pieces

__all__ = ["Blocks", "Segments", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Rows of the plan's ``segments`` table, sorted by block, then by the place in the file."""

    block: Int64Array
    tensor: Int64Array
    disk_tensor: Int64Array
    consumers: Int64Array
    block_offset: Int64Array
    src_offset: Int64Array
    run_bytes: Int64Array
    num_runs: Int64Array
    src_stride_bytes: Int64Array
    dst_offset: Int64Array
    dst_stride_bytes: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What pieces were gathered into.

    Attributes:
        extent: By block, ascending.
        consumers: By block, index into ``sets``: all ranks that take some of it.
        nbytes: By block.
        sets: The sets of ranks that were given, then those that blocks add.
        segments: See ``Segments``.
    """

    extent: Int64Array
    consumers: Int64Array
    nbytes: Int64Array
    sets: tuple[tuple[int, ...], ...]
    segments: Segments


def gather(pieces: Pieces, sets: Sequence[tuple[int, ...]], nodes: Grouped, shift_of_extent: Int64Array) -> Blocks:
    """Gathers pieces whose ranks live on the same nodes.

    What goes to a node goes there once for all its ranks, each of which takes its own segments: a block of its own for
    each rank would be as many more objects to put, announce and let go. Segments lie in the order of the file, so that
    what ranks take side by side needs no copy to become a block.

    Args:
        pieces: Of all extents.
        sets: The sets of ranks that the pieces name.
        nodes: By set, the nodes of its ranks.
        shift_of_extent: What makes a global position one in the extent's file.
    """
    group, num_groups = _groups(nodes)
    key = pieces.extent * num_groups + group[pieces.consumers]
    order = np.lexsort((pieces.src, key))
    key, consumers = key[order], pieces.consumers[order]
    fresh = np.concatenate([[True], key[1:] != key[:-1]])[: len(key)]
    start, block = np.flatnonzero(fresh), np.cumsum(fresh) - 1
    extent = key[start] // num_groups
    nbytes = (pieces.run * pieces.num)[order]
    offset = np.cumsum(nbytes) - nbytes
    of_block, all_sets = _unions(block, consumers, len(start), sets)
    return Blocks(
        extent=extent,
        consumers=of_block,
        nbytes=np.add.reduceat(nbytes, start) if len(start) else start,
        sets=all_sets,
        segments=Segments(
            block=block,
            tensor=pieces.tensor[order],
            disk_tensor=pieces.disk_tensor[order],
            consumers=consumers,
            block_offset=offset - offset[start][block],
            src_offset=pieces.src[order] + shift_of_extent[extent][block],
            run_bytes=pieces.run[order],
            num_runs=pieces.num[order],
            src_stride_bytes=pieces.stride[order],
            dst_offset=pieces.dst[order],
            dst_stride_bytes=pieces.dst_stride[order],
        ),
    )


def _groups(nodes: Grouped) -> tuple[Int64Array, int]:
    """By set, a number that sets on the same nodes share, and how many numbers there are."""
    numbers: dict[bytes, int] = {}
    found = [
        numbers.setdefault(nodes.values[begin:end].tobytes(), len(numbers))
        for begin, end in pairwise(nodes.first.tolist())
    ]
    return np.array(found, np.int64), max(1, len(numbers))


def _unions(
    block: Int64Array, consumers: Int64Array, num_blocks: int, sets: Sequence[tuple[int, ...]]
) -> tuple[Int64Array, tuple[tuple[int, ...], ...]]:
    """By block, the set of all its ranks, and the sets with those that this adds."""
    parts = Grouped.from_pairs(block, consumers, num_blocks)
    numbers = {members: number for number, members in enumerate(sets)}
    assert len(numbers) == len(sets), "a set of ranks is listed twice"
    by_parts: dict[bytes, int] = {}  # few, while blocks are many
    found = np.zeros(num_blocks, np.int64)
    for number, (begin, end) in enumerate(pairwise(parts.first.tolist())):
        key = parts.values[begin:end].tobytes()
        if key not in by_parts:
            ranks = {rank for part in parts.values[begin:end].tolist() for rank in sets[part]}
            by_parts[key] = numbers.setdefault(tuple(sorted(ranks)), len(numbers))
        found[number] = by_parts[key]
    return found, tuple(numbers)
