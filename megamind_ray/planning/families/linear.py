"""Building blocks of family rules: what splitting a linear layer means for each of its tensors.

Layers are named by a glob without the tensor's own name (``*.self_attn.q_proj``). Tensors of a layer that a checkpoint
lacks do no harm: their rules match nothing.
"""

from __future__ import annotations

from dataclasses import replace

from megamind_ray.core.parallel import ExpertShard, Heads, PackedShard, Placement, Replicate, Rule, Shard, Stage
from megamind_ray.planning.quantization import Quantization

__all__ = [
    "colwise",
    "experts",
    "fused_experts",
    "packed_colwise",
    "replicated",
    "rowwise",
    "transposed_colwise",
    "transposed_rowwise",
    "vocabulary",
]

_REPLICATE = Replicate()


def colwise(
    layer: str, quant: Quantization, *, heads: Heads | None = None, unit: int | None = None
) -> tuple[Rule, ...]:
    """Out features are split: each rank computes a part of the output.

    Args:
        layer: Glob of the layer.
        quant: Scheme of the checkpoint.
        heads: Where the output consists of attention heads.
        unit: Out features that stay together; default is what the scheme needs.
    """
    step = quant.out_unit if unit is None else unit

    def out(dim: int, per_index: int = 1) -> Shard:
        return Shard(dim=dim, unit=step, features_per_index=per_index, heads=heads)

    q_pack = quant.pack if quant.method == "awq" else 1
    return _rules(
        layer,
        {
            "weight": out(0),
            "bias": out(0),
            "weight_scale_inv": out(0, quant.block_out),
            "weight_scale": out(0),
            "input_scale": _REPLICATE,
            "qweight": out(1, q_pack),
            "qzeros": out(1, quant.pack),
            "scales": out(1),
            "g_idx": _REPLICATE,
            **_packed_by_rows(quant, out(0), out(0, quant.pack)),
        },
    )


def rowwise(
    layer: str, quant: Quantization, *, heads: Heads | None = None, unit: int | None = None
) -> tuple[Rule, ...]:
    """In features are split: each rank computes a summand of the output; biases are whole.

    Args:
        layer: Glob of the layer.
        quant: Scheme of the checkpoint.
        heads: Where the input consists of attention heads.
        unit: In features that stay together; default is what the scheme needs.
    """
    step = quant.in_unit if unit is None else unit

    def inp(dim: int, per_index: int = 1) -> Shard:
        return Shard(dim=dim, unit=step, features_per_index=per_index, heads=heads)

    q_pack = quant.pack if quant.method == "gptq" else 1
    # One group over all in features: its scale belongs to every part of them.
    grouped: Placement = inp(0, quant.group) if quant.group else _REPLICATE
    return _rules(
        layer,
        {
            "weight": inp(1),
            "bias": _REPLICATE,
            "weight_scale_inv": inp(1, quant.block_in),
            "weight_scale": inp(1, quant.group) if quant.packs_rows and quant.group else _REPLICATE,
            "input_scale": _REPLICATE,
            "qweight": inp(0, q_pack),
            "qzeros": grouped,
            "scales": grouped,
            "g_idx": inp(0),
            **_packed_by_rows(quant, inp(1, quant.pack), inp(1, quant.group) if quant.group else _REPLICATE),
        },
    )


def _packed_by_rows(quant: Quantization, weight: Placement, zero_point: Placement) -> dict[str, Placement]:
    """Tensors of compressed-tensors; other schemes use the same names for what is laid out in another way."""
    if not quant.packs_rows:
        return {}
    return {"weight_packed": weight, "weight_zero_point": zero_point, "weight_shape": _REPLICATE}


def packed_colwise(
    layer: str,
    quant: Quantization,
    sizes: tuple[int, ...],
    heads: tuple[Heads | None, ...] | None = None,
    *,
    dim: int = 0,
) -> tuple[Rule, ...]:
    """Out features are a concatenation of blocks, each split by itself; ``dim`` is 1 for weights ``[in, out]``."""
    blocks = tuple(Shard(dim=0, unit=quant.out_unit, heads=head) for head in heads or (None,) * len(sizes))

    def out(at: int, per_index: int = 1) -> PackedShard:
        return PackedShard(dim=at, sizes=sizes, blocks=blocks, features_per_index=per_index)

    return _rules(layer, {"weight": out(dim), "bias": out(0), "weight_scale_inv": out(dim, quant.block_out)})


def transposed_colwise(layer: str) -> tuple[Rule, ...]:
    """As ``colwise``, for weights stored ``[in, out]`` (GPT-2's ``Conv1D``)."""
    return _rules(layer, {"weight": Shard(dim=1), "bias": Shard(dim=0)})


def transposed_rowwise(layer: str, *, heads: Heads | None = None) -> tuple[Rule, ...]:
    """As ``rowwise``, for weights stored ``[in, out]``."""
    return _rules(layer, {"weight": Shard(dim=0, heads=heads), "bias": _REPLICATE})


def fused_experts(layer: str, quant: Quantization, intermediate: int) -> tuple[Rule, ...]:
    """``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]`` with their block scales; ``layer`` ends in ``experts``.

    Experts that keep a tensor each (packed formats) get the same by number.
    """
    unit = quant.inner_unit
    halves = (Shard(dim=0, unit=unit),) * 2

    def gate_up(per_index: int) -> ExpertShard:
        return ExpertShard(
            inner=PackedShard(dim=1, sizes=(intermediate,) * 2, blocks=halves, features_per_index=per_index)
        )

    def down(per_index: int) -> ExpertShard:
        return ExpertShard(inner=Shard(dim=2, unit=unit, features_per_index=per_index))

    return (
        Rule(pattern=f"{layer}.gate_up_proj", placement=gate_up(1)),
        Rule(pattern=f"{layer}.gate_up_proj_scale_inv", placement=gate_up(quant.block_out)),
        Rule(pattern=f"{layer}.down_proj", placement=down(1)),
        Rule(pattern=f"{layer}.down_proj_scale_inv", placement=down(quant.block_in)),
        *(
            rule
            for name in ("gate_proj", "up_proj", "w1", "w3")
            for rule in experts(colwise(f"{layer}.*.{name}", quant, unit=unit))
        ),
        *(rule for name in ("down_proj", "w2") for rule in experts(rowwise(f"{layer}.*.{name}", quant, unit=unit))),
    )


def experts(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same rules for layers that exist once per expert, with the expert's number in their names."""
    return tuple(
        replace(rule, placement=ExpertShard(inner=rule.placement, separate=True))
        for rule in rules
        if isinstance(rule.placement, Shard | PackedShard | Replicate)
    )


def vocabulary(pattern: str, stage: Stage) -> Rule:
    """An embedding or a head ``[vocabulary, H]`` (or its bias), split over the vocabulary."""
    return Rule(pattern=pattern, placement=Shard(dim=0), stage=stage)


def replicated(pattern: str, stage: Stage | None = None) -> Rule:
    """A small tensor that every rank needs whole."""
    return Rule(pattern=pattern, placement=_REPLICATE, stage=stage)


def _rules(layer: str, placements: dict[str, Placement]) -> tuple[Rule, ...]:
    return tuple(Rule(pattern=f"{layer}.{name}", placement=placement) for name, placement in placements.items())
