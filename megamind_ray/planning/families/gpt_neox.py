"""gpt_neox: query, key and value of a head lie side by side in one matrix, so a split by heads keeps them together."""

from __future__ import annotations

from collections.abc import Mapping

from megamind_ray.core.parallel import Rule
from megamind_ray.planning.families.linear import colwise, replicated, rowwise, vocabulary
from megamind_ray.planning.families.settings import query_heads
from megamind_ray.planning.quantization import quantization

__all__ = ["gpt_neox_rules"]


def gpt_neox_rules(config: Mapping[str, object]) -> tuple[Rule, ...]:
    """``query_key_value [heads * 3 * head_dim, H]``."""
    quant, heads = quantization(config), query_heads(config)
    unit = quant.inner_unit
    return (
        *colwise("*attention.query_key_value", quant, heads=heads),
        *rowwise("*attention.dense", quant, heads=heads),
        *colwise("*mlp.dense_h_to_4h", quant, unit=unit),
        *rowwise("*mlp.dense_4h_to_h", quant, unit=unit),
        vocabulary("*embed_in.weight", "first"),
        vocabulary("embed_out.weight", "last"),
        vocabulary("lm_head.weight", "last"),
        replicated("*final_layer_norm.*", "last"),
        replicated("*layernorm.*"),
        replicated("*attention.bias"),
        replicated("*attention.masked_bias"),
        replicated("*rotary_emb.inv_freq"),
    )
