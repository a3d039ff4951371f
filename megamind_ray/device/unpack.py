"""Weights made ready on the device: cast, dequantised, cut out of wider rows, transposed and summed in one pass.

``unpack`` runs the Triton kernel on a CUDA device, and the reference of this file everywhere else, also where Triton
is not installed. Both give the same bits, NaNs apart: a NaN stays a NaN, its payload may differ.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from megamind_ray.core.tensor import DType
from megamind_ray.device.dtypes import torch_dtype
from megamind_ray.device.unpack_spec import MX_GROUP, Scaling, Unpacked, UnpackSpec
from megamind_ray.device.word_sum import word_sum
from megamind_ray.errors import RequestError

if TYPE_CHECKING:
    import torch

__all__ = ["has_triton", "reference_unpack", "unpack"]

# Values of E2M1 by their three low bits; the fourth is the sign.
_F4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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
