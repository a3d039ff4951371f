"""The sum of words: a check that a device makes in the pass in which it unpacks.

It finds every change within one word, and other damage but for one case in 2^32. Unlike CRC-32 it does not see words
that changed places, zeros that were added or lost, nor changes of several words that cancel out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from megamind_ray.device.strided import Bytes

if TYPE_CHECKING:
    import torch

__all__ = ["WORD_MASK", "host_word_sum", "word_sum"]

WORD_MASK: Final = 0xFFFFFFFF


def word_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum modulo 2^32 of the little-endian 32-bit words of ``uint8 [n]``, zeros behind its end: 0-d int64."""
    import torch

    whole = flat.numel() // 4 * 4
    words = flat[:whole]
    if words.data_ptr() % 4 or words.storage_offset() % 4:
        words = words.clone()
    total = words.view(torch.int32).sum(dtype=torch.int64)
    for index in range(whole, flat.numel()):
        total = total + (flat[index].to(torch.int64) << (8 * (index - whole)))
    return total & WORD_MASK


def host_word_sum(data: Bytes) -> int:
    """``word_sum`` of bytes on the host."""
    whole = data.nbytes // 4 * 4
    total = int(np.add.reduce(data[:whole].view("<u4"), dtype=np.uint32))  # wraps around, which is the modulus
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) & WORD_MASK
