"""What ``unpack`` is asked for, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from megamind_ray.core.tensor import DType
from megamind_ray.errors import RequestError

if TYPE_CHECKING:
    import torch

__all__ = ["MX_GROUP", "Scaling", "UnpackSpec", "Unpacked"]

MX_GROUP: Final = 32
_FLOATS: Final = frozenset({DType.F32, DType.F16, DType.BF16})
_SMALL_FLOATS: Final = frozenset({DType.F8_E4M3, DType.F8_E5M2})


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
