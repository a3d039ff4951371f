"""All tensors of a linear layer are cut at the same features, or the layout is refused (docs/design/0002)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megamind_ray.core.parallel import ExpertShard, PackedShard, Parallel, Placement, Replicate, Shard
from megamind_ray.errors import RequestError
from megamind_ray.planning.naming import ModuleEntry
from megamind_ray.planning.quantization import Quantization, layer_and_suffix
from megamind_ray.planning.rules import Decision
from megamind_ray.planning.splits import Bounds, feature_bounds, split_dim

__all__ = ["aligned_placements"]

# One value for all features, or one per feature: a dim of one index belongs to every rank.
_BROADCAST = frozenset({".weight_scale", ".weight_scale_inv", ".input_scale"})
_SCALES = frozenset(
    {".weight_scale_inv", ".weight_scale", ".weight_zero_point", ".qzeros", ".scales", "_scale_inv", "_scales"}
)
_REPLICATE = Replicate()


@dataclass(frozen=True, slots=True)
class _Member:
    """A tensor of a linear layer."""

    name: str
    shape: tuple[int, ...]
    placement: Placement | None


def aligned_placements(
    entries: Sequence[ModuleEntry], decisions: Sequence[Decision], parallel: Parallel, quant: Quantization
) -> list[Placement]:
    """The placement of each entry, with units raised to what all tensors of its layer can express.

    Equal placements are the same object.

    Args:
        entries: All module tensors.
        decisions: What the rules say about each.
        parallel: The mesh.
        quant: Scheme of the checkpoint.

    Raises:
        RequestError: Tensors of one layer would be cut apart from each other; both are named.
    """
    layers: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    parts = {template: layer_and_suffix(template) for template in {entry.template for entry in entries}}
    for index, entry in enumerate(entries):
        layers[parts[entry.template][0], entry.numbers].append(index)
    placements: list[Placement] = [_REPLICATE] * len(entries)
    # Layers repeat: what was found for one combination of rules and shapes holds for the next.
    known: dict[tuple[object, ...], list[Placement]] = {}
    for indices in layers.values():
        key = tuple((entries[i].template, id(decisions[i]), entries[i].shape) for i in indices)
        found = known.get(key)
        if found is None:
            members = [
                _Member(entries[i].names[0], entries[i].shape, _broadcast(entries[i], decisions[i].placement))
                for i in indices
            ]
            found = known[key] = _align(members, parallel, quant)
        for i, placement in zip(indices, found, strict=True):
            placements[i] = placement
    return _interned(placements)


def _interned(placements: list[Placement]) -> list[Placement]:
    by_id: dict[int, Placement] = {}
    by_value: dict[Placement, Placement] = {}
    for placement in placements:
        if id(placement) not in by_id:
            by_id[id(placement)] = by_value.setdefault(placement, placement)
    return [by_id[id(placement)] for placement in placements]


def _broadcast(entry: ModuleEntry, placement: Placement | None) -> Placement | None:
    inner = placement.inner if isinstance(placement, ExpertShard) and placement.separate else placement
    if isinstance(inner, Shard) and inner.features_per_index == 1 and layer_and_suffix(entry.names[0])[1] in _BROADCAST:
        ndim = len(entry.shape)
        if not -ndim <= inner.dim < ndim or entry.shape[inner.dim] == 1:
            return replace(placement, inner=_REPLICATE) if isinstance(placement, ExpertShard) else _REPLICATE
    return placement


def _align(members: list[_Member], parallel: Parallel, quant: Quantization) -> list[Placement]:
    wanted = [member.placement or _REPLICATE for member in members]
    if parallel.tp == 1 or len(members) < 2:
        return wanted
    unit = math.lcm(*(grain for placement in wanted for grain in _grains(_over_tp(placement, parallel))))
    aligned = [_with_unit(placement, unit) for placement in wanted]
    cut = [
        (member, inner)
        for member, placement in zip(members, aligned, strict=True)
        if not isinstance(inner := _over_tp(placement, parallel), Replicate)
    ]
    if not cut:
        return aligned
    reference, how = min(cut, key=lambda item: item[1].features_per_index)
    _require_rules(members, reference)
    _require_order(cut, quant)
    cuts = _cuts(reference, how, parallel.tp)
    for member, inner in cut:
        if member is not reference:
            _require_expressible(member, inner, reference, cuts)
            _require_equal(member, _cuts(member, inner, parallel.tp), reference, cuts)
    return aligned


def _over_tp(placement: Placement, parallel: Parallel) -> Shard | PackedShard | Replicate:
    if isinstance(placement, ExpertShard):
        return placement.inner if parallel.ep == 1 else _REPLICATE
    return placement


def _grains(placement: Shard | PackedShard | Replicate) -> list[int]:
    if isinstance(placement, Replicate):
        return []
    blocks = placement.blocks if isinstance(placement, PackedShard) else (placement,)
    return [math.lcm(block.unit, placement.features_per_index) if block.heads is None else 1 for block in blocks]


def _with_unit(placement: Placement, unit: int) -> Placement:
    match placement:
        case Shard() if placement.heads is None:
            return replace(placement, unit=unit)
        case PackedShard():
            blocks = tuple(block if block.heads else replace(block, unit=unit) for block in placement.blocks)
            return replace(placement, blocks=blocks)
        case ExpertShard():
            inner = _with_unit(placement.inner, unit)
            assert not isinstance(inner, ExpertShard)
            return replace(placement, inner=inner)
    return placement


def _cuts(member: _Member, placement: Shard | PackedShard, tp: int) -> list[tuple[int, Bounds]]:
    """Features and boundaries of each block of the split dim."""
    if isinstance(placement, PackedShard):
        return [
            (size, feature_bounds(block, size, tp, what=member.name))
            for size, block in zip(placement.sizes, placement.blocks, strict=False)
        ]
    size = member.shape[split_dim(placement, member.shape, member.name)] * placement.features_per_index
    return [(size, feature_bounds(placement, size, tp, what=member.name))]


def _require_rules(members: list[_Member], reference: _Member) -> None:
    for member in members:
        if member.placement is None and layer_and_suffix(member.name)[1] in _SCALES and math.prod(member.shape) > 1:
            raise RequestError(
                f"{reference.name} is split over tp, but no rule says how to split {member.name}, which scales it; "
                f"add a rule for it"
            )


def _require_order(cut: list[tuple[_Member, Shard | PackedShard]], quant: Quantization) -> None:
    for member, _ in cut:
        if quant.act_order and member.name.endswith(".g_idx"):
            raise RequestError(
                f"{member.name}: the checkpoint was quantised by GPTQ with desc_act=true, so its groups are "
                f"scattered and a row split would need all scales; take tp=1, or replicate the layer by a rule"
            )


def _require_expressible(
    member: _Member, placement: Shard | PackedShard, reference: _Member, cuts: list[tuple[int, Bounds]]
) -> None:
    grain = placement.features_per_index
    for size, bounds in cuts:
        for boundary in sorted({edge for pair in bounds for edge in pair}):
            if boundary % grain and boundary != size:
                raise RequestError(
                    f"{reference.name} would be split at feature {boundary}, which {member.name} cannot express: "
                    f"one of its indices stands for {grain} features; choose another tp, or replicate the layer"
                )


def _require_equal(
    member: _Member, cuts: list[tuple[int, Bounds]], reference: _Member, wanted: list[tuple[int, Bounds]]
) -> None:
    # The last index of a companion may stand for features that the weight does not have.
    clipped = [
        tuple((min(begin, size), min(end, size)) for begin, end in bounds)
        for (_, bounds), (size, _) in zip(cuts, wanted, strict=False)
    ]
    if len(cuts) != len(wanted) or clipped != [bounds for _, bounds in wanted]:
        raise RequestError(
            f"the rules split {reference.name} and {member.name} at different features, but they belong to one layer; "
            f"correct the rule of one of them"
        )
