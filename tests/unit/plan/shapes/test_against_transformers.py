"""Checkpoints that transformers writes for small random models, against what their config.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.io import open_manifest
from megamind_ray.planning import build_demands
from megamind_ray.planning.shapes import FAMILIES, shape_manifest
from megamind_ray.planning.shapes.build import Family
from megamind_ray.planning.shapes.fields import Fields
from megamind_ray.planning.shapes.files import lay_out
from megamind_ray.planning.shapes.formats import chosen_weights

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 97,
    "pad_token_id": None,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_DEEPSEEK: dict[str, Any] = {
    **_MOE,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "n_group": 1,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_key_value_heads": 6,
    "num_mtp_layers": 0,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "topk_group": 1,
    "v_head_dim": 10,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases-head_dim": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "mistral-head_dim": ("mistral", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3": ("qwen3", {"head_dim": 10}),
    "qwen3-default-head_dim": ("qwen3", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "num_experts": 4, "head_dim": 10}),
    "qwen3_moe-dense-layers": ("qwen3_moe", {**_MOE, "num_experts": 3, "head_dim": 8, "mlp_only_layers": [1]}),
    "qwen3_moe-sparse-step": (
        "qwen3_moe", {**_MOE, "num_experts": 3, "head_dim": 8, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 3}),
    "mixtral-tied": ("mixtral", {"num_local_experts": 2, "head_dim": 12, "tie_word_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3-plain-queries": ("deepseek_v3", {**_DEEPSEEK, "q_lora_rank": None, "attention_bias": True}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}),
    "gpt_oss-no-biases": ("gpt_oss", {"num_local_experts": 3, "head_dim": 10, "attention_bias": False}),
}  # fmt: skip


def configured(name: str) -> Any:
    model_type, settings = CASES[name]
    return transformers.AutoConfig.for_model(model_type, **{**_SIZES, **settings})


def saved(name: str, folder: Path, dtype: torch.dtype, file_bytes: int = 10**9) -> tuple[Manifest, dict[str, Any]]:
    """A checkpoint of random weights as transformers writes it, and its config.json."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(configured(name), dtype=dtype).save_pretrained(
        folder, max_shard_size=file_bytes
    )
    return open_manifest(folder), json.loads((folder / "config.json").read_text())


def shapes(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    # transformers computes scores of experts in single precision, and since its fifth release stores this router so;
    # the published checkpoints do not.
    return {
        name: ("BF16" if name.endswith(".mlp.gate.weight") else tensor.dtype.label, tensor.shape)
        for name, tensor in manifest.tensors.items()
    }


def test_every_family_is_compared() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_names_shapes_and_dtypes_are_those_that_transformers_writes(name: str, tmp_path: Path) -> None:
    written, config = saved(name, tmp_path, torch.bfloat16)

    shaped = shape_manifest(config, uri=str(tmp_path))

    assert shapes(shaped) == shapes(written)
    assert (shaped.tied, shaped.config, shaped.root) == (written.tied, written.config, written.root)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_dtype_is_that_of_the_configuration(dtype: torch.dtype, tmp_path: Path) -> None:
    written, config = saved("llama", tmp_path, dtype)

    assert shapes(shape_manifest(config, uri="x")) == shapes(written)


# transformers 5 saves experts, which its modules hold stacked, in another order than checkpoints have them.
DENSE = [name for name in CASES if not name.startswith(("qwen3_moe", "mixtral", "deepseek"))]
ONE_FILE = [name for name in CASES if not name.startswith("deepseek")]


@pytest.mark.parametrize(
    ("name", "file_bytes"),
    [*((name, 10**9) for name in ONE_FILE), *((name, size) for name in DENSE for size in (30_000, 6_000))],
)
def test_files_and_places_are_those_that_transformers_writes(name: str, file_bytes: int, tmp_path: Path) -> None:
    written, config = saved(name, tmp_path, torch.bfloat16, file_bytes)
    stored, _ = chosen_weights(config, None, FAMILIES[config["model_type"]].weights)

    files, tensors = lay_out(family(config).tensors(Fields(config), stored), file_bytes)

    assert [(file.path, file.size_bytes, file.data_begin) for file in files] == [
        (file.path, file.size_bytes, file.data_begin) for file in written.files
    ]
    assert tensors == written.tensors


def family(config: dict[str, Any]) -> Family:
    return FAMILIES[config["model_type"]]


@pytest.mark.parametrize("name", [name for name in CASES if "fp8" in FAMILIES[CASES[name][0]].weights])
def test_fp8_is_what_the_modules_of_transformers_take(name: str) -> None:
    config = configured(name)
    raw = {**config.to_dict(), "architectures": ["ForCausalLM"], "model_type": config.model_type}
    manifest = shape_manifest(raw, weights="fp8", uri="x")
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    scheme = AutoQuantizationConfig.from_dict(dict(manifest.config["quantization_config"]))  # type: ignore[call-overload]
    AutoHfQuantizer.from_config(scheme, pre_quantized=True)._process_model_before_weight_loading(model)

    demands = build_demands(manifest, Parallel())
    ours = {
        demands.names[name]: demands.shapes[shape]
        for name, shape in zip(demands.views.name.tolist(), demands.views.shape.tolist(), strict=True)
    }

    assert ours == {key: tuple(value.shape) for key, value in model.state_dict().items()}
