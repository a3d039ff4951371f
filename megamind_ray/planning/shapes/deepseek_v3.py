"""deepseek_v3: multi-head latent attention, routed and shared experts, and layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Iterator

from megamind_ray.core.tensor import DType
from megamind_ray.planning.shapes.fields import EXPERTS, HEADS, LAYERS, Fields
from megamind_ray.planning.shapes.formats import Weights
from megamind_ray.planning.shapes.llama import decoder, gated_mlp, layer_norms
from megamind_ray.planning.shapes.tensors import TensorShape

__all__ = ["deepseek_v3_tensors"]


def deepseek_v3_tensors(fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    """The extra layers follow the others on disk, behind the head; each brings an embedding and a head of its own."""
    num_layers = fields.count("num_hidden_layers", most=LAYERS)
    num_dense = fields.count("first_k_dense_replace", most=LAYERS, least=0, default=0)
    step = fields.count("moe_layer_freq", most=LAYERS, default=1)
    extra = fields.count("num_nextn_predict_layers", "num_mtp_layers", most=LAYERS, least=0, default=0)

    def layer(index: int, at: str) -> Iterator[TensorShape]:
        yield from _latent_attention(f"{at}.self_attn", fields, weights)
        yield from layer_norms(at, fields, weights)
        if index < num_dense or index % step:
            yield from gated_mlp(f"{at}.mlp", fields.count("intermediate_size"), fields, weights)
        else:
            yield from _mixture(f"{at}.mlp", fields, weights)

    yield from decoder(fields, weights, layer)
    for index in range(num_layers, num_layers + extra):
        at = f"model.layers.{index}"
        yield from layer(index, at)
        yield from _next_token(at, fields, weights)


def _latent_attention(at: str, fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads", most=HEADS)
    latent, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim", most=HEADS)
    nope, value = fields.count("qk_nope_head_dim", most=HEADS), fields.count("v_head_dim", most=HEADS)
    bias = fields.flag("attention_bias")
    if fields.has("q_lora_rank"):
        query_latent = fields.count("q_lora_rank")
        yield from weights.linear(f"{at}.q_a_proj", query_latent, hidden, bias=bias)
        yield weights.plain(f"{at}.q_a_layernorm.weight", query_latent)
        yield from weights.linear(f"{at}.q_b_proj", heads * (nope + rope), query_latent)
    else:
        yield from weights.linear(f"{at}.q_proj", heads * (nope + rope), hidden)
    yield from weights.linear(f"{at}.kv_a_proj_with_mqa", latent + rope, hidden, bias=bias)
    yield weights.plain(f"{at}.kv_a_layernorm.weight", latent)
    yield from weights.linear(f"{at}.kv_b_proj", heads * (nope + value), latent)
    yield from weights.linear(f"{at}.o_proj", hidden, heads * value, bias=bias)


def _mixture(at: str, fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    num_experts = fields.count("n_routed_experts", "num_local_experts", most=EXPERTS)
    inner = fields.count("moe_intermediate_size")
    num_shared = fields.count("n_shared_experts", most=EXPERTS, least=0, default=0)
    yield weights.plain(f"{at}.gate.weight", num_experts, fields.count("hidden_size"))
    # Added to scores that are close to each other: never less than single precision.
    yield TensorShape(f"{at}.gate.e_score_correction_bias", DType.F32, (num_experts,))
    if num_shared:
        yield from gated_mlp(f"{at}.shared_experts", num_shared * inner, fields, weights)
    for expert in range(num_experts):
        yield from gated_mlp(f"{at}.experts.{expert}", inner, fields, weights)


def _next_token(at: str, fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    yield weights.plain(f"{at}.embed_tokens.weight", vocabulary, hidden)
    yield weights.plain(f"{at}.enorm.weight", hidden)
    yield weights.plain(f"{at}.hnorm.weight", hidden)
    yield weights.plain(f"{at}.eh_proj.weight", hidden, 2 * hidden)
    yield weights.plain(f"{at}.shared_head.norm.weight", hidden)
    yield weights.plain(f"{at}.shared_head.head.weight", vocabulary, hidden)
