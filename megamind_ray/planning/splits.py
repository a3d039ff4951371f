"""How a placement cuts a tensor over the ranks of a stage: features, then indices, then boxes.

Boundaries are decided in features, so that all tensors of a linear layer agree; ``features_per_index`` maps them to
indices of each tensor (docs/design/0002).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megamind_ray.core.parallel import ExpertShard, Heads, PackedShard, Placement, Replicate, Shard
from megamind_ray.errors import RequestError
from megamind_ray.planning.geometry import Box

__all__ = [
    "Bounds",
    "Layout",
    "Piece",
    "chunk_bounds",
    "feature_bounds",
    "index_bounds",
    "layouts",
    "require_heads",
    "split_dim",
]

Bounds = tuple[tuple[int, int], ...]
# A configuration may claim any number of heads; a refusal lists only sizes that somebody could use.
_MAX_LISTED_TP: Final = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the module tensor and where its corner lands in the local tensor."""

    box: Box
    corner: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A local tensor: its shape and what it consists of. Ranks with equal layouts hold equal bytes."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def chunk_bounds(size: int, num_chunks: int, unit: int = 1) -> Bounds:
    """Begin and end of each chunk, as ``torch.chunk`` cuts ``ceil(size / unit)`` units; the last may be empty."""
    step = math.ceil(math.ceil(size / unit) / num_chunks) * unit
    return tuple((min(i * step, size), min((i + 1) * step, size)) for i in range(num_chunks))


def feature_bounds(shard: Shard, num_features: int, tp: int, *, what: str) -> Bounds:
    """Features of each tp rank.

    Raises:
        RequestError: tp does not divide the heads, or the heads do not divide the features.
    """
    if tp == 1:
        return ((0, num_features),)
    if shard.heads is None:
        return chunk_bounds(num_features, tp, math.lcm(shard.unit, shard.features_per_index))
    heads = shard.heads
    if num_features % heads.count:
        raise RequestError(
            f"{what}: its {num_features} features do not consist of {heads.setting}={heads.count} equal heads; "
            f"correct the model's config.json, or give a rule for this tensor"
        )
    per_head = num_features // heads.count
    if heads.count % tp == 0:
        step = heads.count // tp * per_head
        return tuple((i * step, (i + 1) * step) for i in range(tp))
    if heads.kv and tp % heads.count == 0:
        owned = [i * heads.count // tp for i in range(tp)]
        return tuple((head * per_head, (head + 1) * per_head) for head in owned)
    require_heads([(heads, what)], tp)
    raise AssertionError(f"{what}: tp={tp} fits {heads}")


def require_heads(used: Sequence[tuple[Heads, str]], tp: int) -> None:
    """Checks tp against all heads of a model.

    Args:
        used: Heads, and a tensor that is split by them.
        tp: Tensor-parallel size.

    Raises:
        RequestError: tp does not fit one of them; it says which tp fit all.
    """
    for heads, what in used:
        if _fits(heads, tp):
            continue
        limit = min(_MAX_LISTED_TP, max(heads.count for heads, _ in used))
        working = [size for size in range(1, limit + 1) if all(_fits(heads, size) for heads, _ in used)]
        multiple = " and is no multiple of it" if heads.kv else ""
        raise RequestError(
            f"tp={tp} does not divide {heads.setting}={heads.count}{multiple}; {what} is split by it; "
            f"tp may be {', '.join(map(str, working))}"
        )


def _fits(heads: Heads, tp: int) -> bool:
    return heads.count % tp == 0 or (heads.kv and tp % heads.count == 0)


def index_bounds(bounds: Bounds, features_per_index: int, num_features: int, *, what: str) -> Bounds:
    """Feature boundaries as indices; only the last index may stand for fewer features than the others.

    Raises:
        RequestError: A boundary falls inside an index.
    """
    if features_per_index == 1:
        return bounds
    for boundary in sorted({edge for pair in bounds for edge in pair}):
        if boundary % features_per_index and boundary != num_features:
            raise RequestError(
                f"{what}: a split at feature {boundary} falls inside one of its indices, which stand for "
                f"{features_per_index} features each; choose another tp, or replicate the layer by a rule"
            )
    return tuple((-(-begin // features_per_index), -(-stop // features_per_index)) for begin, stop in bounds)


def layouts(shape: tuple[int, ...], placement: Placement, tp: int, *, ep: int = 1, what: str) -> tuple[Layout, ...]:
    """The local tensor of each tp rank, or of each ep group for experts with ep > 1.

    Args:
        shape: Of the module tensor.
        placement: Where a dim is negative it counts from the end.
        tp: Tensor-parallel size.
        ep: Expert-parallel size.
        what: Name of the tensor, for messages.

    Raises:
        RequestError: The placement does not fit the tensor, or tp does not fit the placement.
    """
    if isinstance(placement, ExpertShard):
        if not shape and not placement.separate:
            raise RequestError(f"{what}: a rule splits it by experts, but it is a scalar; correct the rule")
        if ep == 1:
            return layouts(shape, placement.inner, tp, what=what)
        if placement.separate:
            return (_whole(shape),) * ep
        return tuple(_cut(shape, 0, (pair,)) for pair in chunk_bounds(shape[0], ep))
    if isinstance(placement, Replicate):
        return (_whole(shape),) * tp
    dim = split_dim(placement, shape, what)
    if isinstance(placement, PackedShard):
        return _packed(shape, dim, placement, tp, what)
    num_features = shape[dim] * placement.features_per_index
    bounds = feature_bounds(placement, num_features, tp, what=what)
    indices = index_bounds(bounds, placement.features_per_index, num_features, what=what)
    return tuple(_cut(shape, dim, (pair,)) for pair in indices)


def _packed(shape: tuple[int, ...], dim: int, placement: PackedShard, tp: int, what: str) -> tuple[Layout, ...]:
    per_index = placement.features_per_index
    lengths = [math.ceil(size / per_index) for size in placement.sizes]
    if sum(lengths) != shape[dim] or len(placement.blocks) != len(lengths):
        raise RequestError(
            f"{what}: dim {dim} has {shape[dim]} indices, but its packed blocks {placement.sizes} take {sum(lengths)}; "
            f"correct the model's config.json or the rule"
        )
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(tp)]
    start = 0
    for size, length, block in zip(placement.sizes, lengths, placement.blocks, strict=True):
        bounds = feature_bounds(block, size, tp, what=what)
        for rank, (begin, end) in enumerate(index_bounds(bounds, per_index, size, what=what)):
            ranges[rank].append((start + begin, start + end))
        start += length
    return tuple(_cut(shape, dim, tuple(pairs)) for pairs in ranges)


def split_dim(placement: Shard | PackedShard, shape: tuple[int, ...], what: str) -> int:
    """The dim that a placement splits, from 0."""
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise RequestError(
            f"{what}: a rule splits dim {placement.dim}, but its shape is {list(shape)}; correct the rule"
        )
    return dim


def _whole(shape: tuple[int, ...]) -> Layout:
    return Layout(shape, (Piece(tuple((0, size) for size in shape), (0,) * len(shape)),))


def _cut(shape: tuple[int, ...], dim: int, pairs: tuple[tuple[int, int], ...]) -> Layout:
    """The ranges of one dim, one behind the other."""
    pieces, at = [], 0
    for begin, end in _joined(pairs):
        box = tuple((begin, end) if axis == dim else (0, size) for axis, size in enumerate(shape))
        if begin < end:
            pieces.append(Piece(box, tuple(at if axis == dim else 0 for axis in range(len(shape)))))
        at += end - begin
    return Layout(tuple(at if axis == dim else size for axis, size in enumerate(shape)), tuple(pieces))


def _joined(pairs: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Ranges that follow each other made one: fewer and longer runs."""
    joined: list[tuple[int, int]] = []
    for begin, end in pairs:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
