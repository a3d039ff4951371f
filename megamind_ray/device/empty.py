"""Fresh tensors, and our error where there is no memory for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megamind_ray.device.memory import cuda_memory, host_memory
from megamind_ray.errors import CapacityError
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["empty_tensor"]


def empty_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As ``torch.empty``.

    Raises:
        CapacityError: The device, or this process, has not as much memory.
    """
    import torch

    try:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    except RuntimeError as error:
        # On the host torch raises no kind of its own.
        if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
            raise
        needed_bytes = math.prod(shape) * dtype.itemsize
        raise CapacityError(
            f"{device}: a tensor of {format_bytes(needed_bytes)} does not fit; load less at a time, end what else runs "
            "there, or raise the limits of this process (ulimit -v)",
            where=str(device),
            needed_bytes=needed_bytes,
            free_bytes=(cuda_memory(device.index or 0) if device.type == "cuda" else host_memory()).free_bytes,
        ) from error
