"""llama and the dense families of the same shape: mistral, qwen2, qwen3. Also the attention of their MoE siblings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from megamind_ray.planning.shapes.fields import HEADS, LAYERS, Fields
from megamind_ray.planning.shapes.formats import Weights
from megamind_ray.planning.shapes.tensors import TensorShape

__all__ = [
    "attention",
    "decoder",
    "gated_mlp",
    "layer_norms",
    "llama_tensors",
    "mistral_tensors",
    "qwen2_tensors",
    "qwen3_tensors",
]

# What qwen3 takes where config.json does not say.
_QWEN3_HEAD_DIM: Final = 128


def llama_tensors(fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    """Biases where the configuration asks for them."""
    bias = fields.flag("attention_bias")
    return _dense(fields, weights, fields.head_dim(), qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def mistral_tensors(fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    """Without biases."""
    return _dense(fields, weights, fields.head_dim())


def qwen2_tensors(fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    """Query, key and value have biases, the output has none."""
    return _dense(fields, weights, fields.head_dim(), qkv_bias=True)


def qwen3_tensors(fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    """Queries and keys of each head are normalised."""
    bias = fields.flag("attention_bias")
    return _dense(fields, weights, fields.head_dim(_QWEN3_HEAD_DIM), qkv_bias=bias, out_bias=bias, norms=True)


def _dense(
    fields: Fields,
    weights: Weights,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    norms: bool = False,
) -> Iterator[TensorShape]:
    inner = fields.count("intermediate_size")

    def layer(_index: int, at: str) -> Iterator[TensorShape]:
        yield from attention(at, fields, weights, head_dim=head_dim, qkv_bias=qkv_bias, out_bias=out_bias, norms=norms)
        yield from gated_mlp(f"{at}.mlp", inner, fields, weights, bias=mlp_bias)
        yield from layer_norms(at, fields, weights)

    return decoder(fields, weights, layer)


def decoder(
    fields: Fields, weights: Weights, layer: Callable[[int, str], Iterator[TensorShape]]
) -> Iterator[TensorShape]:
    """Embedding, layers, norm and head; a head that is tied to the embedding is not on disk.

    Args:
        fields: The configuration.
        weights: The format.
        layer: From number and name of a layer to its tensors.
    """
    hidden, vocabulary = fields.count("hidden_size"), fields.count("vocab_size")
    yield weights.plain("model.embed_tokens.weight", vocabulary, hidden)
    for index in range(fields.count("num_hidden_layers", most=LAYERS)):
        yield from layer(index, f"model.layers.{index}")
    yield weights.plain("model.norm.weight", hidden)
    if not fields.flag("tie_word_embeddings"):
        yield weights.plain("lm_head.weight", vocabulary, hidden)


def attention(
    layer: str,
    fields: Fields,
    weights: Weights,
    *,
    head_dim: int,
    qkv_bias: bool = False,
    out_bias: bool = False,
    norms: bool = False,
) -> Iterator[TensorShape]:
    """``self_attn`` of a layer, with grouped key and value heads."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads", most=HEADS)
    keys, at = fields.key_value_heads(), f"{layer}.self_attn"
    yield from weights.linear(f"{at}.q_proj", heads * head_dim, hidden, bias=qkv_bias)
    yield from weights.linear(f"{at}.k_proj", keys * head_dim, hidden, bias=qkv_bias)
    yield from weights.linear(f"{at}.v_proj", keys * head_dim, hidden, bias=qkv_bias)
    yield from weights.linear(f"{at}.o_proj", hidden, heads * head_dim, bias=out_bias)
    if norms:
        yield weights.plain(f"{at}.q_norm.weight", head_dim)
        yield weights.plain(f"{at}.k_norm.weight", head_dim)


def gated_mlp(
    module: str, inner: int, fields: Fields, weights: Weights, *, bias: bool = False
) -> Iterator[TensorShape]:
    """``gate_proj``, ``up_proj`` and ``down_proj``."""
    hidden = fields.count("hidden_size")
    yield from weights.linear(f"{module}.gate_proj", inner, hidden, bias=bias)
    yield from weights.linear(f"{module}.up_proj", inner, hidden, bias=bias)
    yield from weights.linear(f"{module}.down_proj", hidden, inner, bias=bias)


def layer_norms(layer: str, fields: Fields, weights: Weights) -> Iterator[TensorShape]:
    """The two norms of a layer."""
    hidden = fields.count("hidden_size")
    yield weights.plain(f"{layer}.input_layernorm.weight", hidden)
    yield weights.plain(f"{layer}.post_attention_layernorm.weight", hidden)
