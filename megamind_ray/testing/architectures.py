"""Names, dtypes and shapes of the tensors that checkpoints of a family have on disk, from their configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = [
    "TensorSpec",
    "bert_specs",
    "deepseek_v3_specs",
    "gpt2_specs",
    "gpt_neox_specs",
    "gpt_oss_specs",
    "llama_specs",
    "mixtral_specs",
    "packed_llama_specs",
    "qwen3_moe_specs",
    "switch_specs",
]

_BF16, _F32, _F8, _I32 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32
Config = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor on disk; random bits where it has no ``values``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _number(config: Config, name: str) -> int:
    value = config[name]
    assert isinstance(value, int)
    return value


def _linear(name: str, rows: int, cols: int, config: Config, *, bias: bool = False) -> list[TensorSpec]:
    """A linear layer ``[rows, cols]``: FP8 with block scales if the configuration says so, else bf16."""
    scheme = config.get("quantization_config")
    if isinstance(scheme, Mapping) and scheme.get("quant_method") == "fp8":
        blocks = (math.ceil(rows / 128), math.ceil(cols / 128))
        specs = [TensorSpec(f"{name}.weight", _F8, (rows, cols)), TensorSpec(f"{name}.weight_scale_inv", _F32, blocks)]
    else:
        specs = [TensorSpec(f"{name}.weight", _BF16, (rows, cols))]
    return specs + ([TensorSpec(f"{name}.bias", _BF16, (rows,))] if bias else [])


def _norms(*names: str, size: int) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.weight", _BF16, (size,)) for name in names]


def _ends(config: Config, layers: list[TensorSpec]) -> list[TensorSpec]:
    hidden, vocabulary = _number(config, "hidden_size"), _number(config, "vocab_size")
    specs = [TensorSpec("model.embed_tokens.weight", _BF16, (vocabulary, hidden)), *layers]
    specs += _norms("model.norm", size=hidden)
    if not config["tie_word_embeddings"]:
        specs.append(TensorSpec("lm_head.weight", _BF16, (vocabulary, hidden)))
    return specs


def _attention(layer: str, config: Config, *, bias: bool = False, norms: bool = False) -> list[TensorSpec]:
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    keys = _number(config, "num_key_value_heads")
    width = _number(config, "head_dim") if "head_dim" in config else hidden // heads
    at = f"{layer}.self_attn"
    return [
        *_linear(f"{at}.q_proj", heads * width, hidden, config, bias=bias),
        *_linear(f"{at}.k_proj", keys * width, hidden, config, bias=bias),
        *_linear(f"{at}.v_proj", keys * width, hidden, config, bias=bias),
        *_linear(f"{at}.o_proj", hidden, heads * width, config),
        *(_norms(f"{at}.q_norm", f"{at}.k_norm", size=width) if norms else ()),
        *_norms(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", size=hidden),
    ]


def _gated(module: str, inner: int, config: Config) -> list[TensorSpec]:
    hidden = _number(config, "hidden_size")
    return [
        *_linear(f"{module}.gate_proj", inner, hidden, config),
        *_linear(f"{module}.up_proj", inner, hidden, config),
        *_linear(f"{module}.down_proj", hidden, inner, config),
    ]


def llama_specs(config: Config) -> list[TensorSpec]:
    """Llama, mistral, qwen2 (biases) and qwen3 (norms of heads)."""
    specs: list[TensorSpec] = []
    for index in range(_number(config, "num_hidden_layers")):
        layer = f"model.layers.{index}"
        kind = config["model_type"]
        specs += _attention(layer, config, bias=kind == "qwen2", norms=kind == "qwen3")
        specs += _gated(f"{layer}.mlp", _number(config, "intermediate_size"), config)
    return _ends(config, specs)


def packed_llama_specs(config: Config) -> list[TensorSpec]:
    """Llama in GPTQ or AWQ."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    scheme = config["quantization_config"]
    assert isinstance(scheme, Mapping)
    specs: list[TensorSpec] = []
    for spec in llama_specs(plain):
        if spec.name.endswith("_proj.weight"):
            rows, cols = spec.shape
            specs += _packed(spec.name.removesuffix(".weight"), cols, rows, scheme)
        else:
            specs.append(spec)
    return specs


def _packed(name: str, num_in: int, num_out: int, scheme: Mapping[str, object]) -> list[TensorSpec]:
    group = scheme["group_size"]
    assert isinstance(group, int)
    groups = 1 if group < 0 else num_in // group
    shared = [
        TensorSpec(f"{name}.qzeros", _I32, (groups, num_out // 8)),
        TensorSpec(f"{name}.scales", torch.float16, (groups, num_out)),
    ]
    if scheme["quant_method"] == "awq":
        return [TensorSpec(f"{name}.qweight", _I32, (num_in, num_out // 8)), *shared]
    g_idx = torch.arange(num_in, dtype=_I32) // (num_in if group < 0 else group)
    return [
        TensorSpec(f"{name}.qweight", _I32, (num_in // 8, num_out)),
        *shared,
        TensorSpec(f"{name}.g_idx", _I32, (num_in,), g_idx),
    ]


def mixtral_specs(config: Config) -> list[TensorSpec]:
    hidden, inner = _number(config, "hidden_size"), _number(config, "intermediate_size")
    specs: list[TensorSpec] = []
    for index in range(_number(config, "num_hidden_layers")):
        layer = f"model.layers.{index}"
        moe = f"{layer}.block_sparse_moe"
        count = _number(config, "num_local_experts")
        specs += [*_attention(layer, config), TensorSpec(f"{moe}.gate.weight", _BF16, (count, hidden))]
        for expert in range(count):
            for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
                specs.append(TensorSpec(f"{moe}.experts.{expert}.{name}.weight", _BF16, shape))
    return _ends(config, specs)


def _routed(layer: str, count: int, config: Config) -> list[TensorSpec]:
    specs = [TensorSpec(f"{layer}.mlp.gate.weight", _BF16, (count, _number(config, "hidden_size")))]
    for expert in range(count):
        specs += _gated(f"{layer}.mlp.experts.{expert}", _number(config, "moe_intermediate_size"), config)
    return specs


def qwen3_moe_specs(config: Config) -> list[TensorSpec]:
    specs: list[TensorSpec] = []
    dense = config["mlp_only_layers"]
    assert isinstance(dense, list)
    for index in range(_number(config, "num_hidden_layers")):
        layer = f"model.layers.{index}"
        specs += _attention(layer, config, norms=True)
        if index in dense:
            specs += _gated(f"{layer}.mlp", _number(config, "intermediate_size"), config)
        else:
            specs += _routed(layer, _number(config, "num_experts"), config)
    return _ends(config, specs)


def deepseek_v3_specs(config: Config) -> list[TensorSpec]:
    """The extra layer that predicts one more token follows the others, with an embedding and a head of its own."""
    hidden, count = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    vocabulary = _number(config, "vocab_size")
    specs: list[TensorSpec] = []
    for index in range(count + _number(config, "num_nextn_predict_layers")):
        layer = f"model.layers.{index}"
        specs += _latent_attention(layer, config)
        if index < _number(config, "first_k_dense_replace"):
            specs += _gated(f"{layer}.mlp", _number(config, "intermediate_size"), config)
            continue
        experts = _number(config, "n_routed_experts")
        specs += _routed(layer, experts, config)
        specs.append(TensorSpec(f"{layer}.mlp.gate.e_score_correction_bias", _F32, (experts,)))
        specs += _gated(f"{layer}.mlp.shared_experts", _number(config, "moe_intermediate_size"), config)
        if index >= count:
            specs.append(TensorSpec(f"{layer}.embed_tokens.weight", _BF16, (vocabulary, hidden)))
            specs += _norms(f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.shared_head.norm", size=hidden)
            specs.append(TensorSpec(f"{layer}.eh_proj.weight", _BF16, (hidden, 2 * hidden)))
            specs.append(TensorSpec(f"{layer}.shared_head.head.weight", _BF16, (vocabulary, hidden)))
    return _ends(config, specs)


def _latent_attention(layer: str, config: Config) -> list[TensorSpec]:
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    queries, keys = _number(config, "q_lora_rank"), _number(config, "kv_lora_rank")
    nope, rope = _number(config, "qk_nope_head_dim"), _number(config, "qk_rope_head_dim")
    values = _number(config, "v_head_dim")
    at = f"{layer}.self_attn"
    return [
        *_linear(f"{at}.q_a_proj", queries, hidden, config),
        *_norms(f"{at}.q_a_layernorm", size=queries),
        *_linear(f"{at}.q_b_proj", heads * (nope + rope), queries, config),
        *_linear(f"{at}.kv_a_proj_with_mqa", keys + rope, hidden, config),
        *_norms(f"{at}.kv_a_layernorm", size=keys),
        *_linear(f"{at}.kv_b_proj", heads * (nope + values), keys, config),
        *_linear(f"{at}.o_proj", hidden, heads * values, config),
        *_norms(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", size=hidden),
    ]


def gpt_oss_specs(config: Config) -> list[TensorSpec]:
    hidden, inner = _number(config, "hidden_size"), _number(config, "intermediate_size")
    count = _number(config, "num_local_experts")
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    specs: list[TensorSpec] = []
    for index in range(_number(config, "num_hidden_layers")):
        layer = f"model.layers.{index}"
        experts = f"{layer}.mlp.experts"
        specs += _attention(layer, plain, bias=True)
        specs.append(TensorSpec(f"{layer}.self_attn.o_proj.bias", _BF16, (hidden,)))
        specs.append(TensorSpec(f"{layer}.self_attn.sinks", _BF16, (_number(config, "num_attention_heads"),)))
        specs.append(TensorSpec(f"{layer}.mlp.router.weight", _BF16, (count, hidden)))
        specs.append(TensorSpec(f"{layer}.mlp.router.bias", _BF16, (count,)))
        for name, rows, cols in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            specs.append(TensorSpec(f"{experts}.{name}_bias", _BF16, (count, rows)))
            if "quantization_config" in config:
                blocks = (count, rows, cols // 32)
                specs.append(TensorSpec(f"{experts}.{name}_blocks", torch.uint8, (*blocks, 16)))
                specs.append(TensorSpec(f"{experts}.{name}_scales", torch.uint8, blocks))
            else:
                specs.append(TensorSpec(f"{experts}.{name}", _BF16, (count, cols, rows)))
    return _ends(config, specs)


def _with_bias(name: str, shape: tuple[int, ...], size: int, dtype: torch.dtype) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.weight", dtype, shape), TensorSpec(f"{name}.bias", dtype, (size,))]


def gpt_neox_specs(config: Config) -> list[TensorSpec]:
    hidden, inner = _number(config, "hidden_size"), _number(config, "intermediate_size")
    half, vocabulary = torch.float16, _number(config, "vocab_size")
    specs = [TensorSpec("gpt_neox.embed_in.weight", half, (vocabulary, hidden))]
    for index in range(_number(config, "num_hidden_layers")):
        layer = f"gpt_neox.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            specs += _with_bias(f"{layer}.{name}", (hidden,), hidden, half)
        specs += _with_bias(f"{layer}.attention.query_key_value", (3 * hidden, hidden), 3 * hidden, half)
        specs += _with_bias(f"{layer}.attention.dense", (hidden, hidden), hidden, half)
        specs += _with_bias(f"{layer}.mlp.dense_h_to_4h", (inner, hidden), inner, half)
        specs += _with_bias(f"{layer}.mlp.dense_4h_to_h", (hidden, inner), hidden, half)
    specs += _with_bias("gpt_neox.final_layer_norm", (hidden,), hidden, half)
    return [*specs, TensorSpec("embed_out.weight", half, (vocabulary, hidden))]


def gpt2_specs(config: Config, prefix: str) -> list[TensorSpec]:
    hidden, positions = _number(config, "n_embd"), _number(config, "n_positions")
    specs = [
        TensorSpec(f"{prefix}wte.weight", _F32, (_number(config, "vocab_size"), hidden)),
        TensorSpec(f"{prefix}wpe.weight", _F32, (positions, hidden)),
    ]
    for index in range(_number(config, "n_layer")):
        layer = f"{prefix}h.{index}"
        specs += _with_bias(f"{layer}.ln_1", (hidden,), hidden, _F32)
        specs.append(TensorSpec(f"{layer}.attn.bias", _F32, (1, 1, positions, positions)))
        specs += _with_bias(f"{layer}.attn.c_attn", (hidden, 3 * hidden), 3 * hidden, _F32)
        specs += _with_bias(f"{layer}.attn.c_proj", (hidden, hidden), hidden, _F32)
        specs += _with_bias(f"{layer}.ln_2", (hidden,), hidden, _F32)
        specs += _with_bias(f"{layer}.mlp.c_fc", (hidden, 4 * hidden), 4 * hidden, _F32)
        specs += _with_bias(f"{layer}.mlp.c_proj", (4 * hidden, hidden), hidden, _F32)
    return specs + _with_bias(f"{prefix}ln_f", (hidden,), hidden, _F32)


def bert_specs(config: Config, prefix: str) -> list[TensorSpec]:
    """With a prefix: a masked language model of the time when norms had ``gamma`` and ``beta``."""
    hidden, inner = _number(config, "hidden_size"), _number(config, "intermediate_size")
    old = bool(prefix)
    embeddings = f"{prefix}embeddings"
    specs = [
        TensorSpec(f"{embeddings}.word_embeddings.weight", _F32, (_number(config, "vocab_size"), hidden)),
        TensorSpec(
            f"{embeddings}.position_embeddings.weight", _F32, (_number(config, "max_position_embeddings"), hidden)
        ),
        TensorSpec(f"{embeddings}.token_type_embeddings.weight", _F32, (2, hidden)),
        *_bert_norm(f"{embeddings}.LayerNorm", hidden, old=old),
    ]
    for index in range(_number(config, "num_hidden_layers")):
        layer = f"{prefix}encoder.layer.{index}"
        for name in ("query", "key", "value"):
            specs += _with_bias(f"{layer}.attention.self.{name}", (hidden, hidden), hidden, _F32)
        specs += _with_bias(f"{layer}.attention.output.dense", (hidden, hidden), hidden, _F32)
        specs += _bert_norm(f"{layer}.attention.output.LayerNorm", hidden, old=old)
        specs += _with_bias(f"{layer}.intermediate.dense", (inner, hidden), inner, _F32)
        specs += _with_bias(f"{layer}.output.dense", (hidden, inner), hidden, _F32)
        specs += _bert_norm(f"{layer}.output.LayerNorm", hidden, old=old)
    if not old:
        return specs + _with_bias("pooler.dense", (hidden, hidden), hidden, _F32)
    specs.append(TensorSpec("cls.predictions.bias", _F32, (_number(config, "vocab_size"),)))
    specs += _with_bias("cls.predictions.transform.dense", (hidden, hidden), hidden, _F32)
    return specs + _bert_norm("cls.predictions.transform.LayerNorm", hidden, old=True)


def _bert_norm(name: str, hidden: int, *, old: bool) -> list[TensorSpec]:
    leaves = ("gamma", "beta") if old else ("weight", "bias")
    return [TensorSpec(f"{name}.{leaf}", _F32, (hidden,)) for leaf in leaves]


def switch_specs(config: Config) -> list[TensorSpec]:
    """Odd layers are sparse, as ``*_sparse_step`` of 2 makes them."""
    model = _number(config, "d_model")
    specs = [TensorSpec("shared.weight", _BF16, (_number(config, "vocab_size"), model))]
    for stack, setting in (("encoder", "num_layers"), ("decoder", "num_decoder_layers")):
        for index in range(_number(config, setting)):
            specs += _switch_block(f"{stack}.block.{index}", config, index, decoder=stack == "decoder")
        specs += _norms(f"{stack}.final_layer_norm", size=model)
    return specs


def _switch_block(block: str, config: Config, index: int, *, decoder: bool) -> list[TensorSpec]:
    model, inner, heads = _number(config, "d_model"), _number(config, "d_ff"), _number(config, "num_heads")
    wide = heads * _number(config, "d_kv")
    specs: list[TensorSpec] = []
    kinds = ("SelfAttention", "EncDecAttention") if decoder else ("SelfAttention",)
    for at, kind in enumerate(kinds):
        layer = f"{block}.layer.{at}"
        for name, shape in (("q", (wide, model)), ("k", (wide, model)), ("v", (wide, model)), ("o", (model, wide))):
            specs.append(TensorSpec(f"{layer}.{kind}.{name}.weight", _BF16, shape))
        if index == 0 and kind == "SelfAttention":
            buckets = _number(config, "relative_attention_num_buckets")
            specs.append(TensorSpec(f"{layer}.{kind}.relative_attention_bias.weight", _BF16, (buckets, heads)))
        specs += _norms(f"{layer}.layer_norm", size=model)
    layer = f"{block}.layer.{len(kinds)}"
    places = [f"{layer}.mlp"]
    if index % 2:
        count = _number(config, "num_experts")
        specs.append(TensorSpec(f"{layer}.mlp.router.classifier.weight", _BF16, (count, model)))
        places = [f"{layer}.mlp.experts.expert_{expert}" for expert in range(count)]
    for place in places:
        specs.append(TensorSpec(f"{place}.wi.weight", _BF16, (inner, model)))
        specs.append(TensorSpec(f"{place}.wo.weight", _BF16, (model, inner)))
    return specs + _norms(f"{layer}.layer_norm", size=model)
