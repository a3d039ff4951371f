"""switch_transformers: T5's encoder and decoder, with one tensor per expert in the module too."""

from __future__ import annotations

from collections.abc import Mapping

from megamind_ray.core.parallel import Rule, Shard
from megamind_ray.planning.families.linear import colwise, experts, replicated, rowwise, vocabulary
from megamind_ray.planning.families.settings import query_heads
from megamind_ray.planning.quantization import quantization

__all__ = ["switch_transformers_rules"]


def switch_transformers_rules(config: Mapping[str, object]) -> tuple[Rule, ...]:
    """Encoder layers come before decoder layers; the decoder reads the shared embedding too."""
    quant = quantization(config)
    heads = query_heads(config, "num_heads")
    unit = quant.inner_unit
    return (
        *(rule for name in "qkv" for rule in colwise(f"*Attention.{name}", quant, heads=heads)),
        *rowwise("*Attention.o", quant, heads=heads),
        Rule(pattern="*.relative_attention_bias.weight", placement=Shard(dim=1, heads=heads)),
        *experts(colwise("*.mlp.experts.*.wi", quant, unit=unit)),
        *experts(rowwise("*.mlp.experts.*.wo", quant, unit=unit)),
        *colwise("*.mlp.wi", quant, unit=unit),
        *rowwise("*.mlp.wo", quant, unit=unit),
        replicated("*.mlp.router.*"),
        vocabulary("shared.weight", "all"),
        vocabulary("encoder.embed_tokens.weight", "all"),
        vocabulary("decoder.embed_tokens.weight", "all"),
        vocabulary("lm_head.weight", "last"),
        replicated("*.layer_norm.weight"),
        # Cross-attention reads the encoder's output, which its final norm makes; so does whoever runs the decoder.
        replicated("encoder.final_layer_norm.weight", "all"),
        replicated("decoder.final_layer_norm.weight", "last"),
    )
