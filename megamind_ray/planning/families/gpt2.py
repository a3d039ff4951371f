"""gpt2: weights are stored ``[in, out]`` (``Conv1D``); checkpoints come with and without ``transformer.`` in front."""

from __future__ import annotations

from collections.abc import Mapping

from megamind_ray.core.parallel import Rule
from megamind_ray.planning.families.linear import (
    packed_colwise,
    replicated,
    transposed_colwise,
    transposed_rowwise,
    vocabulary,
)
from megamind_ray.planning.families.settings import integer, query_heads
from megamind_ray.planning.quantization import Quantization

__all__ = ["gpt2_rules"]


def gpt2_rules(config: Mapping[str, object]) -> tuple[Rule, ...]:
    """``c_attn [H, 3H]`` is a concatenation of query, key and value, each split by heads."""
    heads = query_heads(config, "n_head" if "n_head" in config else "num_attention_heads")
    hidden = integer(config, "n_embd", "hidden_size")
    return (
        *packed_colwise("*attn.c_attn", Quantization(), (hidden,) * 3, (heads,) * 3, dim=1),
        *transposed_rowwise("*attn.c_proj", heads=heads),
        *transposed_colwise("*mlp.c_fc"),
        *transposed_rowwise("*mlp.c_proj"),
        vocabulary("*wte.weight", "first"),
        vocabulary("lm_head.weight", "last"),
        replicated("*wpe.weight", "first"),
        replicated("*ln_f.*", "last"),
        replicated("*ln_1.*"),
        replicated("*ln_2.*"),
        replicated("*attn.bias"),
        replicated("*attn.masked_bias"),
    )
