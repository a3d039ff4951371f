"""Decoders with the attention of llama and a router over fused experts: mixtral, qwen3_moe."""

from __future__ import annotations

from collections.abc import Mapping

from megamind_ray.core.parallel import Rule
from megamind_ray.planning.families.linear import fused_experts, replicated
from megamind_ray.planning.families.llama import attention, ends, gated_mlp
from megamind_ray.planning.families.settings import integer
from megamind_ray.planning.quantization import quantization

__all__ = ["mixtral_rules", "qwen3_moe_rules"]


def mixtral_rules(config: Mapping[str, object]) -> tuple[Rule, ...]:
    """Every layer is a mixture of ``num_local_experts``."""
    quant = quantization(config)
    return (
        *attention(config, quant),
        *fused_experts("*.mlp.experts", quant, integer(config, "intermediate_size")),
        replicated("*.mlp.gate.weight"),
        *ends(),
    )


def qwen3_moe_rules(config: Mapping[str, object]) -> tuple[Rule, ...]:
    """Layers of ``mlp_only_layers``, and those that ``decoder_sparse_step`` leaves out, are dense."""
    quant = quantization(config)
    return (
        *attention(config, quant),
        *fused_experts("*.mlp.experts", quant, integer(config, "moe_intermediate_size")),
        replicated("*.mlp.gate.weight"),
        *gated_mlp("*.mlp", quant),
        *ends(),
    )
