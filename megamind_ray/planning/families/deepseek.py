"""DeepSeek-V3: multi-head latent attention, routed and shared experts, and a layer that predicts one more token."""

from __future__ import annotations

from collections.abc import Mapping

from megamind_ray.core.parallel import Rule
from megamind_ray.planning.families.linear import colwise, fused_experts, replicated, rowwise, vocabulary
from megamind_ray.planning.families.llama import ends, gated_mlp
from megamind_ray.planning.families.settings import integer, query_heads
from megamind_ray.planning.quantization import Quantization, quantization

__all__ = ["deepseek_v3_rules"]


def deepseek_v3_rules(config: Mapping[str, object]) -> tuple[Rule, ...]:
    """The extra layer is layer ``num_hidden_layers`` on disk; it brings an embedding and a head of its own."""
    quant = quantization(config)
    return (
        *_latent_attention(config, quant),
        *fused_experts("*.mlp.experts", quant, integer(config, "moe_intermediate_size")),
        *gated_mlp("*.mlp.shared_experts", quant),
        *gated_mlp("*.mlp", quant),
        replicated("*.mlp.gate.*"),
        vocabulary("*.layers.*.embed_tokens.weight", "layer"),
        vocabulary("*.layers.*.shared_head.head.weight", "layer"),
        replicated("*.layers.*.shared_head.norm.weight"),
        replicated("*.layers.*.eh_proj.*"),
        replicated("*.layers.*.enorm.weight"),
        replicated("*.layers.*.hnorm.weight"),
        *ends(),
    )


def _latent_attention(config: Mapping[str, object], quant: Quantization) -> tuple[Rule, ...]:
    """The down-projections to the latent are whole on every rank, all heads read all of it."""
    heads = query_heads(config)
    return (
        replicated("*.self_attn.q_a_proj.*"),
        replicated("*.self_attn.kv_a_proj_with_mqa.*"),
        replicated("*.self_attn.*a_layernorm.weight"),
        *colwise("*.self_attn.q_proj", quant, heads=heads),
        *colwise("*.self_attn.q_b_proj", quant, heads=heads),
        *colwise("*.self_attn.kv_b_proj", quant, heads=heads),
        *rowwise("*.self_attn.o_proj", quant, heads=heads),
    )
