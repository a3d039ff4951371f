"""Placement rules from the tensor-parallel plans of transformers, for families without built-in rules.

A plan, ``base_model_tp_plan`` of a configuration class, maps modules (``layers.*.self_attn.q_proj``) to styles
(``colwise``). Here each entry becomes rules for all tensors of the layer: weight, bias, scales, packed values. What a
plan leaves out stays without a rule, but for the two ends of a decoder, which are split as in the built-in families.

transformers is an extra. Without it there are no rules, and the refusal that follows says how to get them.
"""

from __future__ import annotations

import fnmatch
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megamind_ray.core.parallel import ExpertShard, Heads, PackedShard, Replicate, Rule, Shard
from megamind_ray.planning.fallback import Fallback
from megamind_ray.planning.families import FAMILIES
from megamind_ray.planning.families.linear import (
    colwise,
    experts,
    fused_experts,
    packed_colwise,
    replicated,
    rowwise,
    vocabulary,
)
from megamind_ray.planning.families.llama import ends
from megamind_ray.planning.quantization import Quantization, quantization

__all__ = ["fallback_rules", "tp_plan_rules"]

_ORIGIN = "transformers"
_EXTRA = "pip install 'megamind-ray[transformers]'"
# Modules with no tensors of their own, or whose tensors have entries of their own.
_NO_TENSORS = frozenset(
    {"moe_tp_experts", "moe_identity_expert", "local_params", "all_reduce", "gather", "local", "isolated"}
)
_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "sequence_parallel", "mla_kv_a_proj", "ep_router"})
# The same style under the names of other releases.
_SYNONYMS = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
    "local_packed_rowwise": "packed_rowwise",
    "local_packed_colwise": "packed_colwise",
}
# Where base models sit in models with a head, and language models in those that see.
_BASES = ("", "model.", "transformer.", "backbone.")
_LANGUAGE_BASES = ("language_model.", "language_model.model.", "model.language_model.")
_ATTENTION = re.compile(r"att(n|ention)")
_NUM_PACKED = 2  # gate and up: the only packing that plans know

Shapes = Mapping[str, tuple[int, ...]]


def fallback_rules(config: Mapping[str, object], shapes: Shapes) -> Fallback:
    """What transformers knows about splitting a model; a ``planning.RuleSource``.

    Args:
        config: The model's ``config.json``.
        shapes: Shape of each kind of module tensor, by its name with 0 for each number.

    Returns:
        The rules; or none, and a hint. It does not fail: a model can be loaded without these rules.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return Fallback(hint="config.json names no model_type, so no rules are known for it")
    try:
        library = importlib.import_module("transformers")
    except ImportError:
        return Fallback(hint=f"{_lacking(model_type)}; transformers may have a tensor-parallel plan for it: {_EXTRA}")
    named = f"transformers {library.__version__}"
    if model_type not in library.CONFIG_MAPPING:
        return Fallback(hint=f"{_lacking(model_type)}, nor does {named} know it")
    settings = _settings(library, model_type, config)
    if isinstance(settings, str):
        return Fallback(hint=f"{named} does not accept config.json of model_type={model_type!r}: {settings}")
    rules = _translate(settings, quantization(config), shapes)
    if not rules:
        return Fallback(hint=f"{named} has no tensor-parallel plan for model_type={model_type!r}")
    return Fallback(rules=rules)


def _lacking(model_type: str) -> str:
    """Why there are tensors without a built-in rule."""
    if model_type in FAMILIES:
        return f"no built-in rule for model_type={model_type!r} matches the names of these tensors"
    return f"there are no built-in rules for model_type={model_type!r}"


def tp_plan_rules(config: Mapping[str, object], shapes: Shapes | None = None) -> tuple[Rule, ...]:
    """The rules alone; see ``fallback_rules``. Without shapes, packed tensors get none."""
    return fallback_rules(config, shapes or {}).rules


@dataclass(frozen=True, slots=True)
class _Settings:
    """What of a configuration of transformers is needed.

    Attributes:
        tp_plan: Module of the base model -> style.
        pp_plan: The modules of the base model, in the order in which they run.
        bases: Prefixes that the base model's names may have.
        query: Attention heads; None where they differ from layer to layer.
        keys: Key and value heads.
    """

    tp_plan: Mapping[str, str]
    pp_plan: tuple[str, ...]
    bases: tuple[str, ...]
    query: Heads | None
    keys: Heads | None


def _settings(library: Any, model_type: str, config: Mapping[str, object]) -> _Settings | str:
    """The settings, or why there are none. The class fills in what config.json leaves to its defaults."""
    errors = importlib.import_module("huggingface_hub.errors")
    known = {name: value for name, value in config.items() if name != "quantization_config"}
    try:
        model = library.CONFIG_MAPPING[model_type].from_dict(known)
        text = model.get_text_config(decoder=True)
    except (errors.StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        return str(error).strip().splitlines()[-1].strip() if str(error).strip() else type(error).__name__
    query = getattr(text, "num_attention_heads", None)
    keys = getattr(text, "num_key_value_heads", None) or query
    grouped = keys != query
    return _Settings(
        tp_plan=dict(text.base_model_tp_plan or {}),
        pp_plan=tuple(text.base_model_pp_plan or ()),
        bases=_BASES if text is model else _LANGUAGE_BASES,
        query=Heads(count=query, setting="num_attention_heads") if type(query) is int else None,
        keys=Heads(count=keys, setting="num_key_value_heads" if grouped else "num_attention_heads", kv=grouped)
        if type(keys) is int
        else None,
    )


def _translate(settings: _Settings, quant: Quantization, shapes: Shapes) -> tuple[Rule, ...]:
    if not settings.tp_plan:
        return ()
    rules: list[Rule] = []
    # Longer names first: ``experts.gate_up_proj`` before what is said of ``experts``.
    for module in sorted(settings.tp_plan, key=lambda name: -name.count(".")):
        style = _SYNONYMS.get(settings.tp_plan[module], settings.tp_plan[module])
        for pattern in _patterns(module, settings):
            rules.extend(_layer_rules(pattern, style, settings, quant, shapes))
    placed = [replace(rule, origin=_ORIGIN) for rule in rules]
    heads = [vocabulary(f"*language_model.{name}", "last") for name in ("lm_head.weight", "lm_head.bias")]
    filled = [replace(rule, origin="built-in ends") for rule in (*ends(), *heads)]
    return (*placed, *_stages(settings), *filled)


def _patterns(module: str, settings: _Settings) -> tuple[str, ...]:
    """Globs on a module of the base model. Any prefix will do, but not the other half of a model that also sees."""
    if settings.bases is _LANGUAGE_BASES:
        return (f"*language_model.{module}", f"*language_model.model.{module}")
    return (module, f"*.{module}")


def _layer_rules(layer: str, style: str, settings: _Settings, quant: Quantization, shapes: Shapes) -> tuple[Rule, ...]:
    parent, _, leaf = layer.rpartition(".")
    if style in _NO_TENSORS:
        return ()
    if style in _WHOLE:
        return replicated(f"{layer}.*"), replicated(layer)
    if style == "grouped_gemm":
        return (Rule(pattern=layer, placement=ExpertShard(inner=Replicate())),)
    if parent.rpartition(".")[2] == "experts":
        return _expert_rules(parent, leaf, style, quant, shapes)
    heads = _heads(layer, style, settings, shapes)
    rules = _linear_rules(layer, style, heads, quant, shapes)
    return experts(rules) if ".experts.*." in layer else rules


def _linear_rules(layer: str, style: str, heads: Heads | None, quant: Quantization, shapes: Shapes) -> tuple[Rule, ...]:
    """A linear layer, an embedding, or a parameter that stands by itself (attention sinks)."""
    # What one layer puts out split, the next takes in: both are cut in steps that either can express.
    unit = quant.inner_unit
    match style:
        case "colwise":
            alone = Rule(pattern=layer, placement=Shard(dim=_out_dim(layer, shapes), heads=heads))
            return (*colwise(layer, quant, heads=heads, unit=None if heads else unit), alone)
        case "rowwise":
            return rowwise(layer, quant, heads=heads, unit=None if heads else unit)
        case "colwise_gather_output":
            return colwise(layer, quant)
        case "rowwise_split_input":
            return rowwise(layer, quant)
        case "packed_colwise":
            sizes = _halves(f"{layer}.weight", 0, shapes)
            return packed_colwise(layer, quant, sizes) if sizes else ()
        case "embedding_rowwise":
            return (Rule(pattern=f"{layer}.weight", placement=Shard(dim=0)),)
        case "embedding_colwise":
            return (Rule(pattern=f"{layer}.weight", placement=Shard(dim=1)),)
    return ()


def _expert_rules(layer: str, leaf: str, style: str, quant: Quantization, shapes: Shapes) -> tuple[Rule, ...]:
    """A parameter ``[experts, ...]``: what is linear's dim 0 is its dim 1."""
    name, unit = f"{layer}.{leaf}", quant.inner_unit
    if style == "packed_colwise" and leaf == "gate_up_proj":
        sizes = _halves(name, 1, shapes)
        rules = fused_experts(layer, quant, sizes[0] if sizes else 1)
        # Without the fused tensor each expert may have its own, whose rules need no sizes.
        return tuple(rule for rule in rules if sizes or _is_separate(rule))
    if style == "packed_rowwise":
        sizes = _halves(name, 2, shapes)
        blocks = (Shard(dim=2, unit=unit),) * _NUM_PACKED
        packed = PackedShard(dim=2, sizes=sizes, blocks=blocks)
        return (Rule(pattern=name, placement=ExpertShard(inner=packed)),) if sizes else ()
    if style not in ("colwise", "rowwise"):
        return ()
    dim, per_index = (1, quant.block_out) if style == "colwise" else (2, quant.block_in)
    return (
        Rule(pattern=name, placement=ExpertShard(inner=Shard(dim=dim, unit=unit))),
        Rule(
            pattern=f"{name}_scale_inv",
            placement=ExpertShard(inner=Shard(dim=dim, unit=unit, features_per_index=per_index)),
        ),
    )


def _is_separate(rule: Rule) -> bool:
    return isinstance(rule.placement, ExpertShard) and rule.placement.separate


def _heads(layer: str, style: str, settings: _Settings, shapes: Shapes) -> Heads | None:
    """The heads that the split features consist of. Where an output is gathered, they may be cut."""
    if style not in ("colwise", "rowwise") or not _ATTENTION.search(layer):
        return None
    is_keys = style == "colwise" and re.search(r"\.[kv]_proj(\.|$)", layer)
    heads = settings.keys if is_keys else settings.query
    dim = 0 if style == "colwise" else -1
    sizes = [shapes[name][dim] for name in _found(f"{layer}.weight", shapes)]
    return heads if heads and not any(size % heads.count for size in sizes) else None


def _halves(pattern: str, dim: int, shapes: Shapes) -> tuple[int, ...]:
    """Sizes of gate and up in a dim that holds both; none if there is no such tensor."""
    sizes = {shapes[name][dim] for name in _found(pattern, shapes) if dim < len(shapes[name])}
    if len(sizes) != 1 or min(sizes) % _NUM_PACKED:
        return ()
    return (sizes.pop() // _NUM_PACKED,) * _NUM_PACKED


def _out_dim(pattern: str, shapes: Shapes) -> int:
    """Dim of the out features of a parameter that stands by itself."""
    return max(0, max((len(shapes[name]) for name in _found(pattern, shapes)), default=0) - 2)


def _found(pattern: str, shapes: Shapes) -> list[str]:
    return fnmatch.filter(shapes, pattern)


def _stages(settings: _Settings) -> tuple[Rule, ...]:
    """Modules that run before the layers are on the first stage, those behind them on the last."""
    order = list(settings.pp_plan)
    if "layers" not in order:
        return ()
    at = order.index("layers")
    return tuple(
        Rule(pattern=f"{base}{module}.*", stage="first" if index < at else "last", origin=_ORIGIN)
        for index, module in enumerate(order)
        if index != at
        for base in settings.bases
    )
