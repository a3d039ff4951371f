"""Llama and the dense families of the same shape: mistral, qwen2, qwen3. Also the attention of their MoE siblings."""

from __future__ import annotations

from collections.abc import Mapping

from megamind_ray.core.parallel import Rule
from megamind_ray.planning.families.linear import colwise, replicated, rowwise, vocabulary
from megamind_ray.planning.families.settings import kv_heads, query_heads
from megamind_ray.planning.quantization import Quantization, quantization

__all__ = ["attention", "ends", "gated_mlp", "llama_rules"]


def llama_rules(config: Mapping[str, object]) -> tuple[Rule, ...]:
    """Rules of a decoder with ``self_attn.{q,k,v,o}_proj`` and ``mlp.{gate,up,down}_proj``."""
    quant = quantization(config)
    return (*attention(config, quant), *gated_mlp("*.mlp", quant), *ends())


def attention(config: Mapping[str, object], quant: Quantization) -> tuple[Rule, ...]:
    """Attention by heads; q and k norms work on single heads and are whole."""
    query, keys = query_heads(config), kv_heads(config)
    return (
        *colwise("*.self_attn.q_proj", quant, heads=query),
        *colwise("*.self_attn.k_proj", quant, heads=keys),
        *colwise("*.self_attn.v_proj", quant, heads=keys),
        *rowwise("*.self_attn.o_proj", quant, heads=query),
        replicated("*.self_attn.q_norm.weight"),
        replicated("*.self_attn.k_norm.weight"),
    )


def gated_mlp(module: str, quant: Quantization) -> tuple[Rule, ...]:
    """``gate_proj`` and ``up_proj`` are cut where ``down_proj`` is."""
    unit = quant.inner_unit
    return (
        *colwise(f"{module}.gate_proj", quant, unit=unit),
        *colwise(f"{module}.up_proj", quant, unit=unit),
        *rowwise(f"{module}.down_proj", quant, unit=unit),
    )


def ends() -> tuple[Rule, ...]:
    """Embedding, norms and head."""
    return (
        vocabulary("*embed_tokens.weight", "first"),
        vocabulary("lm_head.weight", "last"),
        vocabulary("lm_head.bias", "last"),
        replicated("*.input_layernorm.weight"),
        replicated("*.post_attention_layernorm.weight"),
        replicated("*.self_attn.rotary_emb.inv_freq"),
        replicated("model.norm.weight", "last"),
        replicated("norm.weight", "last"),
    )
