"""qwen3_moe: the attention of qwen3, layers of experts and, where the configuration says so, dense ones."""

from __future__ import annotations

from collections.abc import Iterator

from megamind_ray.planning.shapes.fields import EXPERTS, LAYERS, Fields
from megamind_ray.planning.shapes.formats import Weights
from megamind_ray.planning.shapes.llama import attention, decoder, gated_mlp, layer_norms
from megamind_ray.planning.shapes.tensors import TensorShape

__all__ = ["qwen3_moe_tensors"]


def qwen3_moe_tensors(fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    """Layers of ``mlp_only_layers``, and those that ``decoder_sparse_step`` leaves out, are dense."""
    hidden, inner = fields.count("hidden_size"), fields.count("moe_intermediate_size")
    num_experts = fields.count("num_experts", "num_local_experts", most=EXPERTS)
    dense, step = fields.indices("mlp_only_layers"), fields.count("decoder_sparse_step", most=LAYERS, default=1)
    bias, head_dim = fields.flag("attention_bias"), fields.head_dim()

    def layer(index: int, at: str) -> Iterator[TensorShape]:
        yield from attention(at, fields, weights, head_dim=head_dim, qkv_bias=bias, out_bias=bias, norms=True)
        if index in dense or (index + 1) % step:
            yield from gated_mlp(f"{at}.mlp", fields.count("intermediate_size"), fields, weights)
        else:
            yield weights.plain(f"{at}.mlp.gate.weight", num_experts, hidden)
            for expert in range(num_experts):
                yield from gated_mlp(f"{at}.mlp.experts.{expert}", inner, fields, weights)
        yield from layer_norms(at, fields, weights)

    return decoder(fields, weights, layer)
