"""From a box of a row-major tensor to strided rows of bytes.

A *row* is ``num_runs`` runs of ``run_bytes``, equally far apart in the source and in the destination: what one strided
copy moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megamind_ray.core.demands import Int64Array
from megamind_ray.errors import RequestError

__all__ = ["Box", "BoxRows", "box_rows"]

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BoxRows:
    """Strided rows, one entry per row in each column; with one run the strides are ``run_bytes``."""

    src_offset: Int64Array
    run_bytes: Int64Array
    num_runs: Int64Array
    src_stride_bytes: Int64Array
    dst_offset: Int64Array
    dst_stride_bytes: Int64Array

    def __len__(self) -> int:
        return len(self.src_offset)


@dataclass(slots=True)
class _Loop:
    """``count`` steps of so many bits in source and destination."""

    count: int
    src_bits: int
    dst_bits: int


def box_rows(
    shape: Sequence[int],
    itemsize_bits: int,
    begin: int,
    box: Sequence[tuple[int, int]],
    *,
    dst_shape: Sequence[int] | None = None,
    dst_corner: Sequence[int] | None = None,
    what: str = "tensor",
) -> BoxRows:
    """Cuts a box out of a row-major tensor, into the fewest strided rows.

    Args:
        shape: Elements per dim of the source; ``()`` is a scalar.
        itemsize_bits: Bits of an element; fewer than 8 for packed types.
        begin: Byte offset of the source's first element, for example in a file.
        box: First index and one past the last, per dim.
        dst_shape: Shape of the row-major destination; default is the box's own.
        dst_corner: Where the box lands in the destination; default is its first element.
        what: The tensor, for the error message.

    Returns:
        Rows that are disjoint and cover the box; none where it is empty.

    Raises:
        RequestError: The box begins or ends inside a byte.
    """
    extent = [stop - start for start, stop in box]
    target = extent if dst_shape is None else list(dst_shape)
    corner = [0] * len(extent) if dst_corner is None else list(dst_corner)
    assert all(
        0 <= start <= stop <= size and 0 <= at <= at + stop - start <= room
        for (start, stop), size, at, room in zip(box, shape, corner, target, strict=True)
    ), f"{what}: box {box} of {tuple(shape)} into {target} at {corner}"
    if not math.prod(extent):
        return _rows([], [], 0, None)
    src_strides, dst_strides = _strides(shape, itemsize_bits), _strides(target, itemsize_bits)
    src_bits = sum(start * stride for (start, _), stride in zip(box, src_strides, strict=True))
    dst_bits = sum(at * stride for at, stride in zip(corner, dst_strides, strict=True))
    run_bits, loops = _merge(extent, src_strides, dst_strides, itemsize_bits)
    _require_whole_bytes([src_bits, dst_bits, run_bits], loops, itemsize_bits, what)
    axis = max(loops, key=lambda loop: loop.count) if loops else None
    src = np.array([begin + src_bits // 8], dtype=np.int64)
    dst = np.array([dst_bits // 8], dtype=np.int64)
    for loop in reversed(loops):
        if loop is not axis:
            steps = np.arange(loop.count, dtype=np.int64)
            src = (src[:, None] + steps * (loop.src_bits // 8)).ravel()
            dst = (dst[:, None] + steps * (loop.dst_bits // 8)).ravel()
    return _rows(src, dst, run_bits // 8, axis)


def _strides(shape: Sequence[int], itemsize_bits: int) -> list[int]:
    strides, step = [], itemsize_bits
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def _merge(
    extent: Sequence[int], src_strides: Sequence[int], dst_strides: Sequence[int], itemsize_bits: int
) -> tuple[int, list[_Loop]]:
    """Bits that are contiguous on both sides, and the loops around them, innermost first."""
    run_bits, loops = itemsize_bits, list[_Loop]()
    for count, src, dst in zip(reversed(extent), reversed(src_strides), reversed(dst_strides), strict=True):
        if count == 1:
            continue
        if not loops and src == dst == run_bits:
            run_bits *= count
        elif loops and src == loops[-1].count * loops[-1].src_bits and dst == loops[-1].count * loops[-1].dst_bits:
            loops[-1].count *= count
        else:
            loops.append(_Loop(count, src, dst))
    return run_bits, loops


def _require_whole_bytes(bits: Sequence[int], loops: Sequence[_Loop], itemsize_bits: int, what: str) -> None:
    steps = [step for loop in loops for step in (loop.src_bits, loop.dst_bits)]
    if any(value % 8 for value in (*bits, *steps)):
        raise RequestError(
            f"{what}: its elements have {itemsize_bits} bits and the slice would begin or end inside a byte; "
            f"split it in units of {8 // math.gcd(8, itemsize_bits)} elements, or replicate it"
        )


def _rows(
    src: Sequence[int] | Int64Array, dst: Sequence[int] | Int64Array, run_bytes: int, axis: _Loop | None
) -> BoxRows:
    num_rows = len(src)

    def constant(value: int) -> Int64Array:
        return np.full(num_rows, value, dtype=np.int64)

    return BoxRows(
        src_offset=np.asarray(src, dtype=np.int64),
        run_bytes=constant(run_bytes),
        num_runs=constant(axis.count if axis else 1),
        src_stride_bytes=constant(axis.src_bits // 8 if axis else run_bytes),
        dst_offset=np.asarray(dst, dtype=np.int64),
        dst_stride_bytes=constant(axis.dst_bits // 8 if axis else run_bytes),
    )
