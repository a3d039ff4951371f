"""mixtral: every layer is a mixture of experts, which keep a tensor each on disk."""

from __future__ import annotations

from collections.abc import Iterator

from megamind_ray.planning.shapes.fields import EXPERTS, Fields
from megamind_ray.planning.shapes.formats import Weights
from megamind_ray.planning.shapes.llama import attention, decoder, layer_norms
from megamind_ray.planning.shapes.tensors import TensorShape

__all__ = ["mixtral_tensors"]


def mixtral_tensors(fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    """``w1`` is the gate, ``w3`` the up and ``w2`` the down projection."""
    hidden, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    num_experts, head_dim = fields.count("num_local_experts", "num_experts", most=EXPERTS), fields.head_dim()

    def layer(_index: int, at: str) -> Iterator[TensorShape]:
        yield from attention(at, fields, weights, head_dim=head_dim)
        moe = f"{at}.block_sparse_moe"
        yield weights.plain(f"{moe}.gate.weight", num_experts, hidden)
        for expert in range(num_experts):
            yield from weights.linear(f"{moe}.experts.{expert}.w1", inner, hidden)
            yield from weights.linear(f"{moe}.experts.{expert}.w2", hidden, inner)
            yield from weights.linear(f"{moe}.experts.{expert}.w3", inner, hidden)
        yield from layer_norms(at, fields, weights)

    return decoder(fields, weights, layer)
