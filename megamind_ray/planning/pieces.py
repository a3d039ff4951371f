"""Slices cut at the borders of extents."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from megamind_ray.core.demands import Int64Array, SliceTable
from megamind_ray.planning.columns import expand
from megamind_ray.planning.grid import Ranges, Rows, packed

__all__ = ["Pieces", "pieces_of"]

# Rows whose pieces are computed at a time: bounds the temporaries.
_BATCH_ROWS = 1 << 17


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs in extents; ``src`` is a global position, ``consumers`` a set of ranks."""

    extent: Int64Array
    consumers: Int64Array
    tensor: Int64Array
    disk_tensor: Int64Array
    src: Int64Array
    run: Int64Array
    num: Int64Array
    stride: Int64Array
    dst: Int64Array
    dst_stride: Int64Array


def pieces_of(rows: Rows, extents: Ranges, slices: SliceTable) -> Pieces:
    """Rows, cut at the borders of extents.

    Args:
        rows: ``rows_of`` the slices.
        extents: That cover them.
        slices: What is needed.
    """
    batches = [
        _clip(rows.part(begin, begin + _BATCH_ROWS), extents, slices)
        for begin in range(0, max(1, len(rows)), _BATCH_ROWS)
    ]
    names = [field.name for field in fields(Pieces)]
    return Pieces(*(np.concatenate([getattr(batch, name) for batch in batches]) for name in names))


def _clip(rows: Rows, extents: Ranges, slices: SliceTable) -> Pieces:
    """Cuts rows at extent borders.

    A position ``x`` relative to the begin of a row with runs ``r``, ``t`` apart, is the packed position
    ``(x // t) * r + min(x % t, r)``. So the window of an extent is a packed range, which is at most the end of a run,
    whole runs, and the begin of a run.
    """
    first = np.searchsorted(extents.end, rows.begin, side="right")
    owner, step = expand(np.searchsorted(extents.begin, rows.end, side="left") - first)
    extent = first[owner] + step
    begin, run, stride = rows.begin[owner], rows.run[owner], rows.stride[owner]
    low = np.maximum(extents.begin[extent], begin) - begin
    high = np.minimum(extents.end[extent], rows.end[owner]) - begin
    low_run, low_rest = np.divmod(packed(low, run, stride), run)
    high_run, high_rest = np.divmod(packed(high, run, stride), run)
    same = low_run == high_run
    zero = np.zeros_like(run)
    # Three columns: the end of a run, whole runs, the begin of a run. Those that are empty are dropped below.
    head = np.where(same, high_rest - low_rest, np.where(low_rest > 0, run - low_rest, 0))
    body_run = low_run + (low_rest > 0)
    body_num = np.where(same, 0, high_run - body_run)
    tail = np.where(same, 0, high_rest)
    index = np.stack([low_run, body_run, high_run], axis=1)
    within = np.stack([low_rest, zero, zero], axis=1)
    length = np.stack([head, run, tail], axis=1)
    num = np.stack([zero + 1, body_num, zero + 1], axis=1)
    keep = (length > 0) & (num > 0)
    owner3 = np.broadcast_to(owner[:, None], keep.shape)[keep]
    index, within, length, num = index[keep], within[keep], length[keep], num[keep]
    source = rows.source[owner3]
    several = num > 1
    return Pieces(
        extent=np.broadcast_to(extent[:, None], keep.shape)[keep],
        consumers=rows.consumers[owner3],
        tensor=slices.tensor[source],
        disk_tensor=slices.disk_tensor[source],
        src=rows.begin[owner3] + index * rows.stride[owner3] + within,
        run=length,
        num=num,
        stride=np.where(several, rows.stride[owner3], length),
        dst=rows.dst[owner3] + index * rows.dst_stride[owner3] + within,
        dst_stride=np.where(several, rows.dst_stride[owner3], length),
    )
