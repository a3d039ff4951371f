"""What a tensor on disk is: dtype, shape, place. No bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

__all__ = ["DType", "TensorInfo"]


class DType(Enum):
    """The dtypes of the safetensors format, with their size in bits (1 byte = 8 bits, sub-byte types are packed)."""

    BOOL = ("BOOL", 8)
    F4 = ("F4", 4)
    F6_E2M3 = ("F6_E2M3", 6)
    F6_E3M2 = ("F6_E3M2", 6)
    U8 = ("U8", 8)
    I8 = ("I8", 8)
    F8_E5M2 = ("F8_E5M2", 8)
    F8_E4M3 = ("F8_E4M3", 8)
    F8_E8M0 = ("F8_E8M0", 8)
    F8_E4M3FNUZ = ("F8_E4M3FNUZ", 8)
    F8_E5M2FNUZ = ("F8_E5M2FNUZ", 8)
    I16 = ("I16", 16)
    U16 = ("U16", 16)
    F16 = ("F16", 16)
    BF16 = ("BF16", 16)
    I32 = ("I32", 32)
    U32 = ("U32", 32)
    F32 = ("F32", 32)
    C64 = ("C64", 64)
    F64 = ("F64", 64)
    I64 = ("I64", 64)
    U64 = ("U64", 64)

    def __init__(self, label: str, bits: int) -> None:
        self.label = label
        self.bits = bits

    @classmethod
    def parse(cls, label: str) -> DType | None:
        """The dtype with this name in a safetensors header, or None."""
        return cls.__members__.get(label)

    def nbytes(self, num_elements: int) -> int | None:
        """Size of that many elements, or None where they do not fill whole bytes."""
        whole, rest = divmod(num_elements * self.bits, 8)
        return None if rest else whole


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor on disk.

    Attributes:
        name: Name on disk.
        dtype: Element type.
        shape: Elements per dim; ``()`` is a scalar.
        file: Index into ``Manifest.files``.
        begin: Absolute offset of the first byte in the file.
        end: One past the last byte.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)
