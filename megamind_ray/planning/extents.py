"""From demands to extents, blocks and segments (docs/design/0004, details in 0005)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megamind_ray.core.demands import Demands, Int64Array
from megamind_ray.planning.blocks import Segments, gather
from megamind_ray.planning.columns import Grouped, expand, group_sets
from megamind_ray.planning.grid import ChunkUse, Grid, Rows, chunk_use, extents_of, rows_of, sets_of
from megamind_ray.planning.pieces import pieces_of
from megamind_ray.policies.costs import Float64Array

__all__ = ["Cut", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Extents, blocks and segments. Offsets are in files again.

    Attributes:
        file: By extent.
        begin: By extent.
        end: By extent.
        only_rank: By extent, the rank that alone needs it, -1 where several do.
        nodes: By extent, the nodes of its consumers (indices, as in ``node_of_rank``).
        need: By entry of ``nodes``, about which share of the extent the node needs.
        sets: Sets of ranks: the demands' consumer sets, then those that blocks add.
        set_nodes: By set, the nodes of its ranks.
        block_extent: By block, ascending.
        block_consumers: By block, index into ``sets``: all ranks that take some of it.
        block_nbytes: By block.
        segments: See ``Segments``.
    """

    file: Int64Array
    begin: Int64Array
    end: Int64Array
    only_rank: Int64Array
    nodes: Grouped
    need: Float64Array
    sets: tuple[tuple[int, ...], ...]
    set_nodes: Grouped
    block_extent: Int64Array
    block_consumers: Int64Array
    block_nbytes: Int64Array
    segments: Segments


def cut(
    demands: Demands,
    grid: Grid,
    node_of_rank: Int64Array,
    *,
    apart: bool = True,
    by_chunk: tuple[Rows, ChunkUse] | None = None,
) -> Cut:
    """Cuts the demanded bytes into extents, and these into blocks and segments.

    Args:
        demands: What the ranks need.
        grid: Files and sizes.
        node_of_rank: By rank, the index of its node.
        apart: Give chunks that one rank alone needs extents of their own, which that rank may then read itself.
        by_chunk: The demands' ``rows_of`` and ``chunk_use`` on the grid, where they are known; extents may be longer.
    """
    rows = rows_of(demands.slices, grid) if by_chunk is None else by_chunk[0]
    use = chunk_use(rows, len(demands.consumer_sets), grid) if by_chunk is None else by_chunk[1]
    sets = sets_of(demands.consumer_sets, node_of_rank)
    extents = extents_of(rows, use, sets, grid, apart=apart)
    base, shift = grid.bases()
    file = np.searchsorted(base, extents.begin, side="right") - 1
    blocks = gather(pieces_of(rows, extents, demands.slices), demands.consumer_sets, sets.nodes, shift[file])
    sets = sets_of(blocks.sets, node_of_rank)
    start = np.searchsorted(blocks.extent, np.arange(len(extents) + 1))
    assert (np.diff(start) > 0).all(), "an extent without a consumer"
    only_rank = np.full(len(extents), -1, np.int64)
    if len(extents):
        lowest = np.minimum.reduceat(sets.lowest[blocks.consumers], start[:-1])
        only_rank = np.where(lowest == np.maximum.reduceat(sets.highest[blocks.consumers], start[:-1]), lowest, -1)
    nodes, need = _nodes(Grouped(start, blocks.consumers), sets.nodes, blocks.nbytes)
    return Cut(
        file=file,
        begin=extents.begin + shift[file],
        end=extents.end + shift[file],
        only_rank=only_rank,
        nodes=nodes,
        need=need,
        sets=blocks.sets,
        set_nodes=sets.nodes,
        block_extent=blocks.extent,
        block_consumers=blocks.consumers,
        block_nbytes=blocks.nbytes,
        segments=blocks.segments,
    )


def _nodes(sets_of_extent: Grouped, nodes_of_set: Grouped, block_nbytes: Int64Array) -> tuple[Grouped, Float64Array]:
    """By extent, the nodes of its sets, and of its bytes the share that each needs.

    Worked out once for all extents with the same sets, the share as their mean: there are few such kinds, while the
    sets of a wide mesh have many nodes each.
    """
    kinds: dict[bytes, int] = {}
    first = sets_of_extent.first.tolist()
    members = [sets_of_extent.values[begin:end].tobytes() for begin, end in pairwise(first)]
    kind = np.array([kinds.setdefault(key, len(kinds)) for key in members], np.int64)
    listed = group_sets([tuple(np.frombuffer(key, np.int64).tolist()) for key in kinds])
    of_extent, within = expand(sets_of_extent.counts)
    nbytes = np.bincount(listed.first[kind[of_extent]] + within, weights=block_nbytes, minlength=len(listed.values))
    owner = np.repeat(np.arange(len(listed), dtype=np.int64), listed.counts)
    position, node = nodes_of_set.explode(listed.values)
    of_kind = Grouped.from_pairs(owner[position], node, len(listed))
    width = int(node.max(initial=0)) + 1
    keys = np.repeat(np.arange(len(listed), dtype=np.int64), of_kind.counts) * width + of_kind.values
    row = np.searchsorted(keys, owner[position] * width + node)
    needed = np.bincount(row, weights=nbytes[position], minlength=len(keys))
    total = np.bincount(owner, weights=nbytes, minlength=len(listed))
    share = needed / np.maximum(total, 1.0)[np.repeat(np.arange(len(listed)), of_kind.counts)]
    of_row, step = expand(of_kind.counts[kind])
    rows = of_kind.first[kind][of_row] + step
    nodes = Grouped(np.concatenate([[0], np.cumsum(of_kind.counts[kind])]).astype(np.int64), of_kind.values[rows])
    return nodes, share[rows]
