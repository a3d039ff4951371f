"""Weights made ready on the device: cast, dequantised, cut out of wider rows, transposed and summed in one pass.

``unpack`` runs the Triton kernel on a CUDA device, and the reference of this file everywhere else, also where Triton
is not installed. Both give the same bits, NaNs apart: a NaN stays a NaN, its payload may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import numpy as np

from megamind_ray.core.tensor import DType
from megamind_ray.device.dtypes import torch_dtype
from megamind_ray.device.strided import Bytes
from megamind_ray.errors import RequestError

if TYPE_CHECKING:
    import torch

__all__ = ["MX_GROUP", "Scaling", "UnpackSpec", "Unpacked", "host_word_sum", "reference_unpack", "unpack", "word_sum"]

MX_GROUP: Final = 32
_WORD_MASK: Final = 0xFFFFFFFF
_FLOATS: Final = frozenset({DType.F32, DType.F16, DType.BF16})
_SMALL_FLOATS: Final = frozenset({DType.F8_E4M3, DType.F8_E5M2})
# Values of E2M1 by their three low bits; the fourth is the sign.
_F4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Scaling(StrEnum):
    """What a source value is multiplied with."""

    NONE = "none"
    BLOCK = "block"  # float32 [ceil(rows / block_rows), ceil(cols / block_cols)]: DeepSeek's weight_scale_inv
    ROW = "row"  # float32 [rows]
    MX = "mx"  # E8M0 uint8 [rows, cols / 32], for F4 two in a byte, the low half first


_SOURCES: Final = {
    Scaling.NONE: _FLOATS | _SMALL_FLOATS,
    Scaling.BLOCK: _SMALL_FLOATS | {DType.I8},
    Scaling.ROW: _SMALL_FLOATS | {DType.I8},
    Scaling.MX: frozenset({DType.F4}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackSpec:
    """A 2-D slice as it lies in memory, and what is to be made of it.

    Attributes:
        rows: Rows of the slice.
        cols: Values in a row of the slice.
        src: Dtype as stored.
        dst: F32, F16 or BF16; or ``src`` itself without scaling: then bytes move as they are.
        row_stride: Values from the start of a row to that of the next one; None: ``cols``.
        scaling: Which scales there are. A slice begins where a scale's block begins.
        block_rows: Rows that share a block scale.
        block_cols: Columns that share a block scale.
        transpose: The result is ``[cols, rows]``.

    Raises:
        RequestError: The dtypes and the scaling do not go together, or F4 is cut inside a group.
    """

    rows: int
    cols: int
    src: DType
    dst: DType
    row_stride: int | None = None
    scaling: Scaling = Scaling.NONE
    block_rows: int = 128
    block_cols: int = 128
    transpose: bool = False

    def __post_init__(self) -> None:
        assert self.rows >= 0, self
        assert self.cols >= 0, self
        assert self.stride >= self.cols, self
        if self.raw:
            if self.src.bits not in (8, 16, 32):
                raise RequestError(
                    f"unpacking {self.src.label} as it is: values have 1, 2 or 4 bytes; take a plain copy"
                )
        elif self.src not in _SOURCES[self.scaling] or self.dst not in _FLOATS:
            raise RequestError(
                f"unpacking {self.src.label} to {self.dst.label} with scaling {self.scaling.value!r} is not known; "
                f"this scaling takes {', '.join(sorted(dtype.label for dtype in _SOURCES[self.scaling]))} "
                "and gives F32, F16 or BF16"
            )
        if self.src is DType.F4 and (self.cols % MX_GROUP or self.stride % MX_GROUP):
            raise RequestError(
                f"unpacking F4: {self.cols} columns, {self.stride} apart; both must be multiples of {MX_GROUP}"
            )

    @property
    def raw(self) -> bool:
        """Whether bytes move as they are."""
        return self.src is self.dst and self.scaling is Scaling.NONE

    @property
    def stride(self) -> int:
        """Values from row to row."""
        return self.cols if self.row_stride is None else self.row_stride

    @property
    def unit_bytes(self) -> int:
        """Bytes of what the source is addressed by: a value, or two of F4."""
        return max(1, self.src.bits // 8)

    @property
    def units(self) -> int:
        """Such units in a row."""
        return self.cols * self.src.bits // (8 * self.unit_bytes)

    @property
    def stride_units(self) -> int:
        """Such units from row to row."""
        return self.stride * self.src.bits // (8 * self.unit_bytes)

    @property
    def src_bytes(self) -> int:
        """Bytes from the first to the last of the slice, gaps included."""
        return ((self.rows - 1) * self.stride_units + self.units) * self.unit_bytes if self.rows * self.cols else 0

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        return (self.cols, self.rows) if self.transpose else (self.rows, self.cols)

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Of the scales, or None without."""
        match self.scaling:
            case Scaling.BLOCK:
                return -(-self.rows // self.block_rows), -(-self.cols // self.block_cols)
            case Scaling.ROW:
                return (self.rows,)
            case Scaling.MX:
                return self.rows, self.cols // MX_GROUP
            case _:
                return None


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The result.

    Attributes:
        tensor: ``spec.shape``, of ``spec.dst``.
        word_sum: 0-d int64 on the device: the ``word_sum`` of the slice's source bytes; None unless asked for. Looking
            at its value waits for the device.
    """

    tensor: torch.Tensor
    word_sum: torch.Tensor | None


def unpack(
    flat: torch.Tensor,
    spec: UnpackSpec,
    *,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    with_sum: bool = False,
) -> Unpacked:
    """Makes a slice ready, on the stream that is current.

    Args:
        flat: ``uint8 [n]``, the source from the first byte of the slice on.
        spec: What lies there.
        scales: As ``spec.scaling`` says, contiguous, on the same device.
        out: Where to write: ``spec.shape``, of ``spec.dst``, any strides, apart from ``flat``. By default new memory.
        with_sum: Sum the source's words in the same pass.

    Raises:
        RequestError: Shapes, dtypes, devices or alignment do not fit the spec.
    """
    import torch

    _check(flat, spec, scales)
    dtype = torch_dtype(spec.dst)
    assert dtype is not None, spec
    if out is None:
        out = torch.empty(spec.shape, dtype=dtype, device=flat.device)
    elif tuple(out.shape) != spec.shape or out.dtype != dtype or out.device != flat.device:
        raise RequestError(
            f"unpack: out is {out.dtype} {list(out.shape)} on {out.device}, "
            f"{dtype} {list(spec.shape)} on {flat.device} is needed"
        )
    if flat.device.type == "cuda" and has_triton():
        from megamind_ray.device.unpack_triton import triton_unpack

        return triton_unpack(flat, spec, scales, out, with_sum=with_sum)
    return reference_unpack(flat, spec, scales, out, with_sum=with_sum)


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it comes with the CUDA builds of torch."""
    return find_spec("triton") is not None


def reference_unpack(
    flat: torch.Tensor, spec: UnpackSpec, scales: torch.Tensor | None, out: torch.Tensor, *, with_sum: bool
) -> Unpacked:
    """What ``unpack`` does, in operations of torch, a temporary for each; arguments as checked by ``unpack``."""
    packed = _packed(flat, spec)
    total = word_sum(packed.reshape(-1)) if with_sum else None
    values = packed.view(out.dtype) if spec.raw else _scaled(_decoded(packed, spec.src), spec, scales)
    out.copy_(values.t() if spec.transpose else values)
    return Unpacked(out, total)


def word_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum modulo 2^32 of the little-endian 32-bit words of ``uint8 [n]``, zeros behind its end: 0-d int64.

    It finds every change within one word, and any damage at random but for one in 2^32. Unlike CRC-32 it does not see
    words that changed places, nor changes of several words that cancel out.
    """
    import torch

    whole = flat.numel() // 4 * 4
    words = flat[:whole]
    if words.data_ptr() % 4 or words.storage_offset() % 4:
        words = words.clone()
    total = words.view(torch.int32).sum(dtype=torch.int64)
    for index in range(whole, flat.numel()):
        total = total + (flat[index].to(torch.int64) << (8 * (index - whole)))
    return total & _WORD_MASK


def host_word_sum(data: Bytes) -> int:
    """``word_sum`` of bytes on the host."""
    whole = data.nbytes // 4 * 4
    total = int(np.add.reduce(data[:whole].view("<u4"), dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) & _WORD_MASK


def _check(flat: torch.Tensor, spec: UnpackSpec, scales: torch.Tensor | None) -> None:
    import torch

    if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous() or flat.numel() < spec.src_bytes:
        raise RequestError(
            f"unpack: the source is {flat.dtype} {list(flat.shape)}; contiguous uint8 [n] with n of at least "
            f"{spec.src_bytes} is needed"
        )
    if flat.data_ptr() % spec.unit_bytes or flat.storage_offset() % spec.unit_bytes:
        raise RequestError(
            f"unpack: {spec.src.label} values begin at address {flat.data_ptr():#x}, which is no multiple of "
            f"{spec.unit_bytes}; copy them to aligned memory first"
        )
    wanted = spec.scale_shape
    if wanted is None:
        if scales is not None:
            raise RequestError("unpack: scales were given, and the spec has no scaling; leave them out")
        return
    dtypes = {torch.uint8, torch_dtype(DType.F8_E8M0)} if spec.scaling is Scaling.MX else {torch.float32}
    if (
        scales is None
        or tuple(scales.shape) != wanted
        or scales.dtype not in dtypes
        or scales.device != flat.device
        or not scales.is_contiguous()
    ):
        got = "none" if scales is None else f"{scales.dtype} {list(scales.shape)} on {scales.device}"
        kind = "E8M0" if spec.scaling is Scaling.MX else "float32"
        raise RequestError(f"unpack: scales are {got}; contiguous {kind} {list(wanted)} on {flat.device} are needed")


def _packed(flat: torch.Tensor, spec: UnpackSpec) -> torch.Tensor:
    """The bytes of the slice without gaps: ``uint8 [rows, bytes of a row]``."""
    row_bytes = spec.units * spec.unit_bytes
    rows = flat.as_strided((spec.rows, row_bytes), (spec.stride_units * spec.unit_bytes, 1))
    return rows.contiguous()


def _decoded(packed: torch.Tensor, dtype: DType) -> torch.Tensor:
    import torch

    if dtype is not DType.F4:
        found = torch_dtype(dtype)
        assert found is not None, dtype
        return packed.view(found).to(torch.float32)
    table = torch.tensor((*_F4_VALUES, *(-value for value in _F4_VALUES)), device=packed.device)
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).to(torch.int32)
    return table[halves].reshape(packed.shape[0], -1)


def _scaled(values: torch.Tensor, spec: UnpackSpec, scales: torch.Tensor | None) -> torch.Tensor:
    import torch

    if scales is None:
        return values
    match spec.scaling:
        case Scaling.BLOCK:
            wide = scales.repeat_interleave(spec.block_rows, 0)[: spec.rows]
            return values * wide.repeat_interleave(spec.block_cols, 1)[:, : spec.cols]
        case Scaling.ROW:
            return values * scales[:, None]
        case _:
            return values * _powers(scales.view(torch.uint8)).repeat_interleave(MX_GROUP, 1)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """E8M0 as float32: 2^(e - 127), and NaN for 255."""
    import torch

    bits = exponents.to(torch.int32) << 23
    bits = torch.where(exponents == 0, 0x00400000, bits)  # 2^-127 is subnormal
    return torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)
