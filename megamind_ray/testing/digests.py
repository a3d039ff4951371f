"""Tensors as short values that can be compared across processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

__all__ = ["TensorDigest", "digest", "digest_all", "rank_digests"]


class TensorDigest(NamedTuple):
    """Equal digests: equal dtype, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class _HasStateDict(Protocol):
    @property
    def state_dict(self) -> Mapping[str, torch.Tensor]: ...


def digest(tensor: torch.Tensor) -> TensorDigest:
    """The digest of a CPU tensor, whatever its strides; NaNs count by their bits."""
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    return TensorDigest(str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).hexdigest())


def digest_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorDigest]:
    """Digests by name."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def rank_digests(ctx: _HasStateDict) -> dict[str, TensorDigest]:
    """For ``model.run``: what a rank holds."""
    return digest_all(ctx.state_dict)
