"""The dtypes of checkpoints as torch has them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from megamind_ray.core.tensor import DType
from megamind_ray.errors import RequestError

if TYPE_CHECKING:
    import torch

__all__ = ["torch_dtype", "torch_layout"]

_TORCH_NAMES = {
    DType.BOOL: "bool",
    DType.F4: "float4_e2m1fn_x2",
    DType.U8: "uint8",
    DType.I8: "int8",
    DType.F8_E5M2: "float8_e5m2",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E8M0: "float8_e8m0fnu",
    DType.F8_E4M3FNUZ: "float8_e4m3fnuz",
    DType.F8_E5M2FNUZ: "float8_e5m2fnuz",
    DType.I16: "int16",
    DType.U16: "uint16",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.I32: "int32",
    DType.U32: "uint32",
    DType.F32: "float32",
    DType.C64: "complex64",
    DType.F64: "float64",
    DType.I64: "int64",
    DType.U64: "uint64",
}


@cache
def torch_dtype(dtype: DType) -> torch.dtype | None:
    """The torch dtype with the same bytes, or None where the installed torch has none (always for F6)."""
    import torch

    found = getattr(torch, _TORCH_NAMES.get(dtype, ""), None)
    return found if isinstance(found, torch.dtype) else None


def torch_layout(name: str, dtype: DType, shape: tuple[int, ...], *, raw: bool) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape that a tensor has in torch.

    F4 values lie two in a byte, and torch counts the pairs: the last dim is halved, as the safetensors library does.

    Args:
        name: Name of the tensor, for the message.
        dtype: As stored.
        shape: As stored, in elements.
        raw: Hand out a dtype that torch lacks as packed ``uint8``: the last dim in bytes where its elements fill whole
            bytes, else all bytes in one dim.

    Raises:
        RequestError: Torch lacks the dtype and ``raw`` is off, or an F4 tensor has an odd last dim.
    """
    import torch

    found = torch_dtype(dtype)
    if found is None:
        if not raw:
            raise RequestError(
                f"tensor {name!r}: torch {torch.__version__} has no dtype for {dtype.label}; "
                "leave the tensor out, or take its packed bytes with raw=True"
            )
        return torch.uint8, _packed_shape(dtype, shape)
    if dtype is not DType.F4:
        return found, shape
    if not shape or shape[-1] % 2:
        raise RequestError(f"tensor {name!r}: F4 with shape {list(shape)} has an odd last dim, which torch cannot hold")
    return found, (*shape[:-1], shape[-1] // 2)


def _packed_shape(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    last_bytes, rest = divmod((shape[-1] if shape else 1) * dtype.bits, 8)
    return (*shape[:-1], last_bytes) if not rest else (-1,)
