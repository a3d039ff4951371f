"""A tensor that a checkpoint would have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megamind_ray.core.tensor import DType

__all__ = ["TensorShape"]


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Name on disk, dtype and shape of a tensor; no bytes and no place."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = self.dtype.nbytes(math.prod(self.shape))
        assert size is not None, f"{self.name}: formats here have whole bytes only"
        return size
