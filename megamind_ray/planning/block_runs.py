"""What cutting the blocks of a plan costs depends on how their bytes lie in their extents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.plan import Plan

__all__ = ["block_runs"]


def block_runs(plan: Plan) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """By block, how many runs it is cut from, and whether it lies in its extent as it is: then it is only summed."""
    segments, num_blocks = plan.tables["segments"], len(plan.tables["blocks"])
    names = ("block", "num_runs", "run_bytes", "src_offset", "block_offset")
    block, runs, length, source, offset = (np.asarray(segments[name].to_numpy(), np.int64) for name in names)
    num_runs = np.bincount(block, weights=runs, minlength=num_blocks).astype(np.int64)
    origin = source - offset
    first = np.searchsorted(block, block)  # segments are grouped by block
    lies_so = ((runs == 1) | (length * runs == 0)) & (origin == origin[first])
    packed = np.bincount(block, weights=~lies_so, minlength=num_blocks) == 0
    return num_runs, packed
