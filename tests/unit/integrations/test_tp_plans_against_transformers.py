"""What a rank holds, bit for bit, against transformers' own tensor parallelism on the same weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from megamind_ray.api.plan import plan
from megamind_ray.config import Config
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.local_load import load_plan
from megamind_ray.planning.families import FAMILIES

SavedModel = Callable[[str, Mapping[str, Any]], tuple[Any, Manifest]]
Shards = Callable[[Any, int, int], dict[str, torch.Tensor]]

TP = 2
DENSE = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "pad_token_id": 0,
}
MOE = {
    **DENSE,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT = {
    **MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": 61, "rotary_dim": 4}

BUILT_IN = {
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "gpt_neox": DENSE,
    "mixtral": MOE,
    "qwen3_moe": MOE,
    "gpt_oss": MOE,
    "deepseek_v3": LATENT,
}
# What transformers keeps whole and the built-in rules split. Its plans of these families cover a part of the model.
SPLIT_ONLY_HERE = {
    "deepseek_v3": {"self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight", "self_attn.o_proj.weight"},
    "gpt_oss": {
        "self_attn.q_proj.weight",
        "self_attn.q_proj.bias",
        "self_attn.k_proj.weight",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.weight",
        "self_attn.v_proj.bias",
        "self_attn.o_proj.weight",
        "self_attn.sinks",
        "mlp.experts.gate_up_proj",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj",
    },
}
# By what they show: biases and plain MLPs, norms between heads, fused q, k and v, embeddings of their own, experts
# packed along either dim, shared experts, latent attention, other layers than attention.
FROM_PLANS = {
    "codegen": GPT,
    "cohere": DENSE,
    "deepseek_v2": LATENT,
    "ernie4_5_moe": MOE,
    "gemma2": DENSE,
    "glm4": DENSE,
    "glm4_moe": MOE,
    "granitemoe": MOE,
    "llama4_text": {**MOE, "intermediate_size_mlp": 24},
    "minimax_m2": MOE,
    "nemotron": DENSE,
    "olmoe": MOE,
    "phi": DENSE,
    "phi3": DENSE,
    "qwen3_next": MOE,
    "starcoder2": DENSE,
}


def different_names(model_type: str, settings: Mapping[str, Any], saved_model: SavedModel, shards: Shards) -> set[str]:
    """Names within a layer of what a rank holds otherwise than under transformers' tensor parallelism."""
    model, manifest = saved_model(model_type, settings)
    planned = plan(manifest.root, Parallel(tp=TP))
    load = load_plan(planned, manifest, Config(), [HostArena(16 << 20) for _ in range(TP)])
    different: set[str] = set()
    for rank, session in enumerate(load.sessions):
        expected, held = shards(model, TP, rank), session.state_dict()
        assert held.keys() >= expected.keys()
        for name, part in expected.items():
            if held[name].shape != part.shape or not torch.equal(held[name], part):
                different.add(re.sub(r".*\.\d+\.", "", name))
    return different


@pytest.mark.parametrize("model_type", BUILT_IN)
def test_built_in_rules_split_as_transformers_does(
    model_type: str, saved_model: SavedModel, shards_of_transformers: Shards
) -> None:
    assert model_type in FAMILIES
    different = different_names(model_type, BUILT_IN[model_type], saved_model, shards_of_transformers)
    assert different == SPLIT_ONLY_HERE.get(model_type, set())


@pytest.mark.parametrize("model_type", FROM_PLANS)
def test_a_family_without_built_in_rules_is_split_by_its_plan(
    model_type: str, saved_model: SavedModel, shards_of_transformers: Shards
) -> None:
    assert model_type not in FAMILIES
    assert different_names(model_type, FROM_PLANS[model_type], saved_model, shards_of_transformers) == set()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss"])
def test_what_only_the_built_in_rules_split_is_whole_in_transformers(
    model_type: str, saved_model: SavedModel, shards_of_transformers: Shards
) -> None:
    model, _ = saved_model(model_type, BUILT_IN[model_type])
    local = shards_of_transformers(model, TP, 0)
    for name, parameter in model.named_parameters():
        if re.sub(r".*\.\d+\.", "", name) in SPLIT_ONLY_HERE[model_type]:
            assert local[name].shape == parameter.shape, name
