"""A configuration that cannot be right is refused, and the message names the field."""

from __future__ import annotations

from typing import Any

import pytest

from megamind_ray.errors import RequestError
from megamind_ray.planning.shapes import ready_config, shape_manifest


def changed(name: str, **fields: Any) -> dict[str, object]:
    return {field: value for field, value in {**ready_config(name), **fields}.items() if value is not ...}


WRONG = [
    ("llama-3-8b", {"hidden_size": "4096"}, "hidden_size='4096'; it must be an integer"),
    ("llama-3-8b", {"hidden_size": True}, "hidden_size=True; it must be an integer"),
    ("llama-3-8b", {"hidden_size": 4096.0}, r"hidden_size=4096\.0; it must be an integer"),
    ("llama-3-8b", {"hidden_size": ...}, "'hidden_size' is missing"),
    ("llama-3-8b", {"hidden_size": None}, "'hidden_size' is missing"),
    ("llama-3-8b", {"num_attention_heads": 0}, "num_attention_heads=0; it must be from 1 to 65536"),
    ("llama-3-8b", {"num_attention_heads": -32}, "num_attention_heads=-32; it must be from 1"),
    ("llama-3-8b", {"num_attention_heads": 33}, "hidden_size=4096 is no multiple of num_attention_heads=33"),
    ("llama-3-8b", {"num_key_value_heads": 5}, "num_attention_heads=32 is no multiple of num_key_value_heads=5"),
    ("llama-3-8b", {"vocab_size": 10**12}, "vocab_size=1000000000000; it must be from 1 to 16777216"),
    ("llama-3-8b", {"vocab_size": 10**9000}, "vocab_size=a number of 29898 bits"),
    ("llama-3-8b", {"num_hidden_layers": 5000}, "num_hidden_layers=5000; it must be from 1 to 4096"),
    ("llama-3-8b", {"head_dim": "128"}, "head_dim='128'; it must be an integer"),
    ("llama-3-8b", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no'; it must be true or false"),
    ("llama-3-8b", {"torch_dtype": "int3"}, "torch_dtype='int3'; it must be one of bfloat16, float16, float32"),
    ("llama-3-8b", {"torch_dtype": 16}, "torch_dtype=16; it must be one of"),
    ("qwen3-30b-a3b", {"num_experts": ...}, "'num_experts' is missing"),
    ("qwen3-30b-a3b", {"num_experts": []}, r"num_experts=\[\]; it must be an integer"),
    ("qwen3-30b-a3b", {"mlp_only_layers": 3}, "mlp_only_layers=3; it must be a list of integers"),
    ("qwen3-30b-a3b", {"mlp_only_layers": ["a"]}, r"mlp_only_layers=\['a'\]; it must be a list of integers"),
    ("qwen3-30b-a3b", {"decoder_sparse_step": 0}, "decoder_sparse_step=0; it must be from 1"),
    ("mixtral-8x7b", {"num_local_experts": 0}, "num_local_experts=0; it must be from 1"),
    ("deepseek-v3", {"kv_lora_rank": ...}, "'kv_lora_rank' is missing"),
    ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1; it must be from 0"),
    ("gpt-oss-20b", {"intermediate_size": 2881}, "down_proj: its 2881 in features are no multiple of 32"),
]


@pytest.mark.parametrize(
    ("name", "fields", "message"), WRONG, ids=[f"{n}-{next(iter(f))}-{i}" for i, (n, f, _) in enumerate(WRONG)]
)
def test_the_field_is_named(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        shape_manifest(changed(name, **fields), uri="x")


@pytest.mark.parametrize("model_type", ["bert", "gpt9", None, 7, ["llama"]])
def test_an_unknown_family_lists_the_known_ones(model_type: object) -> None:
    with pytest.raises(RequestError, match=r"model_type=.*deepseek_v3, gpt_oss, llama, .*give the checkpoint itself"):
        shape_manifest({"model_type": model_type}, uri="x")


def test_more_tensors_than_any_model_has_are_refused_with_the_sizes() -> None:
    config = changed("qwen3-30b-a3b", num_hidden_layers=4096, num_experts=65536)

    with pytest.raises(RequestError, match=r"1,048,576 tensors; .*num_hidden_layers=4096, .*num_experts=65536"):
        shape_manifest(config, uri="x")


def test_more_bytes_than_any_model_has_are_refused_with_the_sizes() -> None:
    config = changed("llama-3-8b", hidden_size=1 << 24, vocab_size=1 << 24)

    with pytest.raises(RequestError, match=r"more than .*; correct its sizes: .*hidden_size=16777216"):
        shape_manifest(config, uri="x")
