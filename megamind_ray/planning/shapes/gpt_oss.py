"""gpt_oss: attention with sinks, and experts that are stacked on disk too."""

from __future__ import annotations

from collections.abc import Iterator

from megamind_ray.planning.shapes.fields import EXPERTS, HEADS, Fields
from megamind_ray.planning.shapes.formats import Weights
from megamind_ray.planning.shapes.llama import attention, decoder, layer_norms
from megamind_ray.planning.shapes.tensors import TensorShape

__all__ = ["gpt_oss_tensors"]

# What gpt_oss takes where config.json does not say.
_HEAD_DIM = 64


def gpt_oss_tensors(fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    """Rows of ``gate_up_proj`` alternate between gate and up."""
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    heads, head_dim = fields.count("num_attention_heads", most=HEADS), fields.head_dim(_HEAD_DIM)
    num_experts = fields.count("num_local_experts", "num_experts", most=EXPERTS)
    bias = fields.flag("attention_bias", default=True)

    def layer(_index: int, at: str) -> Iterator[TensorShape]:
        yield weights.plain(f"{at}.self_attn.sinks", heads)
        yield from attention(at, fields, weights, head_dim=head_dim, qkv_bias=bias, out_bias=bias)
        yield weights.plain(f"{at}.mlp.router.weight", num_experts, hidden)
        yield weights.plain(f"{at}.mlp.router.bias", num_experts)
        experts = f"{at}.mlp.experts"
        yield from weights.experts(f"{experts}.gate_up_proj", num_experts, 2 * inner, hidden)
        yield weights.plain(f"{experts}.gate_up_proj_bias", num_experts, 2 * inner)
        yield from weights.experts(f"{experts}.down_proj", num_experts, hidden, inner)
        yield weights.plain(f"{experts}.down_proj_bias", num_experts, hidden)
        yield from layer_norms(at, fields, weights)

    return decoder(fields, weights, layer)
