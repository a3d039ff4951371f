"""The kernel behind ``unpack``. Imports Triton, which only CUDA builds of torch bring: import it where it is used.

Not yet run on a GPU. It is tested in Triton's interpreter, and compiled for compute capability 8.0 and 9.0.
"""

# Triton reads the kernel's annotations, and knows no others; constants are in capitals, as in its own code.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import triton
import triton.language as tl

from megamind_ray.core.tensor import DType
from megamind_ray.device.unpack_spec import MX_GROUP, Scaling, Unpacked, UnpackSpec
from megamind_ray.device.word_sum import WORD_MASK

if TYPE_CHECKING:
    import torch

__all__ = ["COMPILE_OPTIONS", "SHARED_BYTES", "kernel_constants", "tile_of", "triton_unpack", "unpack_kernel"]

SHARED_BYTES: Final = 48 << 10
# A product is never fused with what is added to it: the results are the reference's to the bit.
COMPILE_OPTIONS: Final = {"num_warps": 4, "enable_fp_fusion": False}
# What the compiler may add to a tile in shared memory, so that threads do not meet in one bank, and the sum's scratch.
_PADDED: Final = 1.25
_TILE_UNITS: Final = 64

_RAW: Final = "raw"
_KINDS: Final = {
    DType.F32: "f32",
    DType.F16: "f16",
    DType.BF16: "bf16",
    DType.F8_E4M3: "e4m3",
    DType.F8_E5M2: "e5m2",
    DType.I8: "i8",
    DType.F4: "f4",
}


@triton.jit
def _decode(raw, KIND: tl.constexpr):
    """Bits, zero-extended to uint32, as float32. By hand for 8-bit floats: older devices lack the instructions."""
    if KIND == "f32":
        value = raw.to(tl.float32, bitcast=True)
    elif KIND == "bf16":
        value = (raw << 16).to(tl.float32, bitcast=True)
    elif KIND == "f16":
        value = raw.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "e5m2":  # the upper half of an f16
        value = (raw << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "i8":
        value = raw.to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "e4m3":
        magnitude = raw & 0x7F
        bits = (magnitude << 20) + (120 << 23)
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
        normal = bits.to(tl.uint32).to(tl.float32, bitcast=True)
        value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        value = tl.where(raw >= 0x80, -value, value)
    else:
        tl.static_assert(KIND == "f4")
        magnitude = raw & 7
        # Exponent bias 1, one bit of mantissa: 126 << 23 is 0.5, and 1 is 0.5 instead of a normal number.
        bits = (magnitude << 22) + (126 << 23)
        normal = bits.to(tl.uint32).to(tl.float32, bitcast=True)
        value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
        value = tl.where(raw >= 8, -value, value)
    return value


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    """To the nearest, ties to even. By hand for bfloat16: the interpreter cuts the low bits off."""
    if dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, near)
        result = near.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(dtype)
    return result


@triton.jit
def unpack_kernel(
    src,
    scales,
    dst,
    sums,
    rows,
    units,
    src_stride,
    dst_row,
    dst_col,
    KIND: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    SCALING: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLS: tl.constexpr,
    WITH_SUM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):
    """One tile of values a program. Units are what ``src`` points to: values, or two values of F4."""
    PER_UNIT: tl.constexpr = 2 if KIND == "f4" else 1
    pid = tl.program_id(0)
    num_across = tl.cdiv(units * PER_UNIT, TILE_COLS)
    row = ((pid // num_across).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    first = (pid % num_across).to(tl.int64) * TILE_COLS
    unit = (first // PER_UNIT + tl.arange(0, TILE_COLS // PER_UNIT))[None, :]
    raw = tl.load(src + row * src_stride + unit, mask=(row < rows) & (unit < units), other=0)
    if WITH_SUM:
        shift = ((row * units + unit) * UNIT_BYTES % 4 * 8).to(tl.uint32)
        words = raw.to(tl.uint32) << shift
        tl.store(sums + pid, tl.sum(tl.sum(words.to(tl.int32, bitcast=True), axis=1), axis=0))
    col = (first + tl.arange(0, TILE_COLS))[None, :]
    inside = (row < rows) & (col < units * PER_UNIT)
    place = dst + row * dst_row + col * dst_col
    if KIND == "raw":
        tl.store(place, raw, mask=inside)
    else:
        if KIND == "f4":
            wide = raw.to(tl.uint32)
            value = _decode(tl.interleave(wide & 15, wide >> 4), KIND)
        else:
            value = _decode(raw.to(tl.uint32), KIND)
        if SCALING == "block":
            across = tl.cdiv(units, GROUP_COLS)
            if GROUP_ROWS % TILE_ROWS == 0 and GROUP_COLS % TILE_COLS == 0:  # the tile lies in one block
                at = pid // num_across * TILE_ROWS // GROUP_ROWS * across + first // GROUP_COLS
                value = value * tl.load(scales + at)
            else:
                at = row // GROUP_ROWS * across + col // GROUP_COLS
                value = value * tl.load(scales + at, mask=inside, other=0.0)
        elif SCALING == "row":
            value = value * tl.load(scales + row, mask=row < rows, other=0.0)
        elif SCALING == "mx":  # a load for each group, not for each value
            NUM_GROUPS: tl.constexpr = TILE_COLS // GROUP_COLS
            across = units * PER_UNIT // GROUP_COLS
            group = (first // GROUP_COLS + tl.arange(0, NUM_GROUPS))[None, :]
            there = (row < rows) & (group < across)
            exponent = tl.load(scales + row * across + group, mask=there, other=0).to(tl.uint32)
            bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is subnormal
            bits = tl.where(exponent == 255, 0x7FC00000, bits)
            power = bits.to(tl.uint32).to(tl.float32, bitcast=True)
            grouped = tl.reshape(value, (TILE_ROWS, NUM_GROUPS, GROUP_COLS)) * power[:, :, None]
            value = tl.reshape(grouped, (TILE_ROWS, TILE_COLS))
        tl.store(place, _rounded(value, dst.dtype.element_ty), mask=inside)


def triton_unpack(
    flat: torch.Tensor, spec: UnpackSpec, scales: torch.Tensor | None, out: torch.Tensor, *, with_sum: bool
) -> Unpacked:
    """As ``reference_unpack``, by the kernel."""
    import torch

    constants = kernel_constants(spec, with_sum=with_sum)
    tile_rows, tile_cols = constants["TILE_ROWS"], constants["TILE_COLS"]
    num_tiles = -(-spec.rows // tile_rows) * -(-spec.cols // tile_cols)
    sums = torch.zeros(num_tiles if with_sum else 1, dtype=torch.int32, device=flat.device)
    if num_tiles:
        bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[spec.unit_bytes]
        source = flat[: spec.src_bytes].view(bits)
        row, col = (out.stride(1), out.stride(0)) if spec.transpose else out.stride()
        # A pointer is asked for, and never followed, where there are no scales.
        factors = source if scales is None else scales.view(torch.uint8) if spec.scaling is Scaling.MX else scales
        with torch.cuda.device_of(flat):  # Triton launches on the current device, wherever the pointers lead
            unpack_kernel[(num_tiles,)](
                source,
                factors,
                out.view(bits) if spec.raw else out,
                sums,
                spec.rows,
                spec.units,
                spec.stride_units,
                row,
                col,
                **constants,
                **COMPILE_OPTIONS,
            )
    total = sums.sum(dtype=torch.int64) & WORD_MASK if with_sum else None
    return Unpacked(out, total)


def kernel_constants(spec: UnpackSpec, *, with_sum: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    tile_rows, tile_cols = tile_of(spec)
    group_rows, group_cols = {
        Scaling.BLOCK: (spec.block_rows, spec.block_cols),
        Scaling.MX: (1, MX_GROUP),
    }.get(spec.scaling, (1, 1))
    return {
        "KIND": _RAW if spec.raw else _KINDS[spec.src],
        "UNIT_BYTES": spec.unit_bytes,
        "SCALING": spec.scaling.value,
        "GROUP_ROWS": group_rows,
        "GROUP_COLS": group_cols,
        "WITH_SUM": with_sum,
        "TILE_ROWS": tile_rows,
        "TILE_COLS": tile_cols,
    }


def tile_of(spec: UnpackSpec) -> tuple[int, int]:
    """Rows and columns of a tile: 64 units of the source each way, so that both sides move whole cache lines.

    A transposed tile is loaded along rows and stored along columns, so all of it lies in shared memory once, as stored
    bits or as what they become, which is float32 before the last cast. Larger tiles fit as well, and leave a
    multiprocessor fewer programs: for 9.0, 64 x 128 values of FP8 take 160 registers a thread, 64 x 64 take 64.
    """
    rows, cols = _TILE_UNITS, _TILE_UNITS * (8 * spec.unit_bytes // spec.src.bits)
    widest_bytes = spec.unit_bytes if spec.raw else 4
    assert rows * cols * widest_bytes * _PADDED <= SHARED_BYTES, (spec, rows, cols)
    return rows, cols
