"""Where each view lies in the arena of its rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megamind_ray.core.demands import Int64Array, ViewTable

__all__ = ["ArenaLayout", "lay_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaLayout:
    """The layout of all arenas.

    Attributes:
        order: Rows of the view table, grouped by rank, in their order within a rank.
        offset: By row of the view table, its offset in the arena; aliases have that of the row they repeat.
        arena_bytes: By rank.
    """

    order: Int64Array
    offset: Int64Array
    arena_bytes: Int64Array


def lay_out(views: ViewTable, num_ranks: int, alignment_bytes: int) -> ArenaLayout:
    """Puts the views of each rank one after the other, each at a multiple of ``alignment_bytes``."""
    order = np.argsort(views.rank, kind="stable")
    rank = views.rank[order]
    size = np.where(views.alias[order] != 0, 0, -(-views.nbytes[order] // alignment_bytes) * alignment_bytes)
    end = np.cumsum(size)
    # Bytes of all earlier ranks, to be taken off the running sum.
    ends_of_ranks = np.concatenate([[0], end])[np.searchsorted(rank, np.arange(num_ranks + 1))]
    offset = np.empty(len(order), np.int64)
    offset[order] = end - size - ends_of_ranks[rank]
    _share_aliases(views, order, offset)
    return ArenaLayout(order=order, offset=offset, arena_bytes=np.diff(ends_of_ranks))


def _share_aliases(views: ViewTable, order: Int64Array, offset: Int64Array) -> None:
    """Gives every alias the offset of the first row of its (rank, tensor)."""
    if not views.alias.any():
        return
    key = views.rank[order] * (int(views.tensor.max()) + 1) + views.tensor[order]
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    offset[order] = offset[order][first][group]
