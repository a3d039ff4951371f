"""Small real checkpoints of the built-in families, written by the safetensors library; for tests, demos and benchmarks.

Every function writes a folder with ``config.json`` and one or more data files, and returns the folder. Bytes are
seeded random bits, so all patterns occur, NaNs with payloads among them; nobody can run such a model, but every wrong
byte shows. Shapes are chosen to hurt: 12 heads (tp = 1, 2, 3, 4 work), vocabularies and inner sizes that split
unevenly, block scales with a partial last block. ``CHECKPOINTS`` lists variants of each, a few MB at most.

    >>> folder = llama_checkpoint(tmp_path / "llama", kv_heads=4)
    >>> big = llama_checkpoint(tmp_path / "demo", total_bytes=1 << 30, num_files=4)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from megamind_ray.errors import RequestError
from megamind_ray.testing.architectures import (
    TensorSpec,
    bert_specs,
    deepseek_v3_specs,
    gpt2_specs,
    gpt_neox_specs,
    gpt_oss_specs,
    llama_specs,
    mixtral_specs,
    packed_llama_specs,
    qwen3_moe_specs,
    switch_specs,
)

__all__ = [
    "CHECKPOINTS",
    "bert_checkpoint",
    "deepseek_v3_checkpoint",
    "gpt2_checkpoint",
    "gpt_neox_checkpoint",
    "gpt_oss_checkpoint",
    "llama_checkpoint",
    "llama_fp8_checkpoint",
    "mixtral_checkpoint",
    "packed_llama_checkpoint",
    "qwen3_moe_checkpoint",
    "switch_checkpoint",
    "write_checkpoint",
]

_FP8: Mapping[str, object] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    specs: tuple[TensorSpec, ...]


def write_checkpoint(
    folder: Path, specs: Sequence[TensorSpec], config: Mapping[str, object], *, num_files: int = 1, seed: int = 0
) -> Path:
    """Writes a checkpoint of random bits.

    Args:
        folder: Where; it is created.
        specs: The tensors, in the order in which they go to files.
        config: Content of ``config.json``.
        num_files: With more than one, there is an index as transformers writes it.
        seed: Equal seeds give equal bytes.

    Returns:
        The folder.

    Raises:
        RequestError: More files than tensors.
    """
    if not 1 <= num_files <= len(specs):
        raise RequestError(f"num_files={num_files}: take 1 to {len(specs)}, the number of tensors")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    files = list(_files(specs, num_files))
    for file in files:
        save_file({spec.name: _fill(spec, generator) for spec in file.specs}, folder / file.name, {"format": "pt"})
    if num_files > 1:
        weight_map = {spec.name: file.name for file in files for spec in file.specs}
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder


def _files(specs: Sequence[TensorSpec], num_files: int) -> Iterator[_File]:
    """Cuts the list into files of about equal size, none of them empty."""
    if num_files == 1:
        yield _File("model.safetensors", tuple(specs))
        return
    total, done, begin = sum(spec.nbytes for spec in specs), 0, 0
    for number in range(1, num_files + 1):
        end = begin
        last = len(specs) - (num_files - number)
        while end < last and (end == begin or number == num_files or done < total * number / num_files):
            done += specs[end].nbytes
            end += 1
        yield _File(f"model-{number:05d}-of-{num_files:05d}.safetensors", tuple(specs[begin:end]))
        begin = end


def _fill(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    if spec.values is not None:
        return spec.values.clone()
    num_words = math.ceil(spec.nbytes / 8)
    words = torch.empty(num_words, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[: spec.nbytes].clone().view(spec.dtype).reshape(spec.shape)


def llama_checkpoint(
    folder: Path,
    *,
    kv_heads: int = 4,
    tied: bool = True,
    num_layers: int = 3,
    total_bytes: int | None = None,
    num_files: int = 1,
    seed: int = 0,
    model_type: str = "llama",
) -> Path:
    """Llama in bf16: grouped-query attention with 12 heads, tied embeddings.

    Args:
        folder: Where to write.
        kv_heads: Key and value heads, a divisor of 12.
        tied: Whether ``lm_head.weight`` is absent and shares the embedding.
        num_layers: Layers; not used with ``total_bytes``.
        total_bytes: About this size in all, of layers of 39 MB and an embedding of 98 MB. None: a small one of 1 MB.
        num_files: Data files.
        seed: Of the bytes.
        model_type: ``llama``, ``mistral``, ``qwen2`` (biases) or ``qwen3`` (norms of heads).
    """
    sizes = {"hidden_size": 192, "intermediate_size": 500, "vocab_size": 1003, "head_dim": 16}
    if total_bytes is not None:
        sizes = {"hidden_size": 1536, "intermediate_size": 2816, "vocab_size": 32000, "head_dim": 128}
        one, two = (_llama_config(model_type, sizes, kv_heads, tied, num) for num in (1, 2))
        first, second = (sum(spec.nbytes for spec in llama_specs(config)) for config in (one, two))
        num_layers = max(1, 1 + round((total_bytes - first) / (second - first)))
    config = _llama_config(model_type, sizes, kv_heads, tied, num_layers)
    return write_checkpoint(folder, llama_specs(config), config, num_files=num_files, seed=seed)


def _llama_config(
    model_type: str, sizes: Mapping[str, int], kv_heads: int, tied: bool, num_layers: int
) -> dict[str, object]:
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type]
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        **sizes,
        "num_attention_heads": 12,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": num_layers,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def llama_fp8_checkpoint(folder: Path, *, kv_heads: int = 12, num_files: int = 1, seed: int = 0) -> Path:
    """Llama in FP8 with 128 x 128 block scales; inner and hidden size end in a partial block. Heads are 128 wide."""
    sizes = {"hidden_size": 204, "intermediate_size": 600, "vocab_size": 503, "head_dim": 128}
    config = {**_llama_config("llama", sizes, kv_heads, False, 2), "quantization_config": dict(_FP8)}
    return write_checkpoint(folder, llama_specs(config), config, num_files=num_files, seed=seed)


def packed_llama_checkpoint(
    folder: Path, *, method: str = "gptq", desc_act: bool = False, group_size: int = 32, seed: int = 0
) -> Path:
    """Llama in four bits, as GPTQ (``qweight [in/8, out]``) or AWQ (``qweight [in, out/8]``) packs it."""
    sizes = {"hidden_size": 96, "intermediate_size": 224, "vocab_size": 503, "head_dim": 32}
    scheme: dict[str, object] = {"quant_method": method, "bits": 4, "group_size": group_size}
    if method == "gptq":
        scheme["desc_act"] = desc_act
    config = {**_llama_config("llama", sizes, 12, False, 2), "quantization_config": scheme}
    return write_checkpoint(folder, packed_llama_specs(config), config, seed=seed)


def mixtral_checkpoint(
    folder: Path, *, num_experts: int = 4, kv_heads: int = 4, num_files: int = 1, seed: int = 0
) -> Path:
    """Mixtral as on the hub: one tensor per expert, ``block_sparse_moe.experts.E.w1|w2|w3``."""
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 96,
        "intermediate_size": 74,
        "vocab_size": 301,
        "num_attention_heads": 12,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 3,
        "num_local_experts": num_experts,
        "tie_word_embeddings": False,
    }
    return write_checkpoint(folder, mixtral_specs(config), config, num_files=num_files, seed=seed)


def qwen3_moe_checkpoint(folder: Path, *, num_experts: int = 8, fp8: bool = False, seed: int = 0) -> Path:
    """Qwen3-MoE: a dense first layer, then per-expert tensors; FP8 scales beside them where asked for."""
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 96,
        "intermediate_size": 300,
        "moe_intermediate_size": 200 if fp8 else 50,
        "vocab_size": 301,
        "head_dim": 128 if fp8 else 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 12 if fp8 else 4,
        "num_hidden_layers": 3,
        "num_experts": num_experts,
        "mlp_only_layers": [0],
        "tie_word_embeddings": False,
        **({"quantization_config": dict(_FP8)} if fp8 else {}),
    }
    return write_checkpoint(folder, qwen3_moe_specs(config), config, seed=seed)


def deepseek_v3_checkpoint(folder: Path, *, num_experts: int = 8, fp8: bool = False, seed: int = 0) -> Path:
    """DeepSeek-V3: latent attention, a dense first layer, routed and shared experts, and the extra last layer."""
    width = 128 if fp8 else 16
    config: dict[str, object] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 300,
        "moe_intermediate_size": 200 if fp8 else 50,
        "vocab_size": 301,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": width,
        "qk_rope_head_dim": width if fp8 else 8,
        "v_head_dim": width,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "tie_word_embeddings": False,
        **({"quantization_config": dict(_FP8)} if fp8 else {}),
    }
    return write_checkpoint(folder, deepseek_v3_specs(config), config, seed=seed)


def gpt_oss_checkpoint(
    folder: Path, *, num_experts: int = 4, kv_heads: int = 4, mxfp4: bool = True, seed: int = 0
) -> Path:
    """gpt_oss: attention sinks, fused experts in MXFP4; five blocks inside, so with tp = 4 one rank gets none."""
    config: dict[str, object] = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 96,
        "intermediate_size": 160,
        "vocab_size": 301,
        "head_dim": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 2,
        "num_local_experts": num_experts,
        "tie_word_embeddings": False,
        **({"quantization_config": {"quant_method": "mxfp4"}} if mxfp4 else {}),
    }
    return write_checkpoint(folder, gpt_oss_specs(config), config, seed=seed)


def gpt_neox_checkpoint(folder: Path, *, seed: int = 0) -> Path:
    """gpt_neox (Pythia): query, key and value of a head side by side; untied ``embed_out``."""
    config = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": 96,
        "intermediate_size": 202,
        "vocab_size": 301,
        "num_attention_heads": 12,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    }
    return write_checkpoint(folder, gpt_neox_specs(config), config, seed=seed)


def gpt2_checkpoint(folder: Path, *, prefix: str = "", seed: int = 0) -> Path:
    """gpt2: ``Conv1D`` weights, tied head; ``prefix`` is empty (as on the hub) or ``transformer.``."""
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 96,
        "n_head": 12,
        "n_layer": 2,
        "n_positions": 16,
        "vocab_size": 301,
        "tie_word_embeddings": True,
    }
    return write_checkpoint(folder, gpt2_specs(config, prefix), config, seed=seed)


def bert_checkpoint(folder: Path, *, prefix: str = "", seed: int = 0) -> Path:
    """bert: the bare encoder; with ``prefix="bert."`` a masked language model with tied head and old norm names."""
    config = {
        "architectures": ["BertForMaskedLM" if prefix else "BertModel"],
        "model_type": "bert",
        "hidden_size": 96,
        "intermediate_size": 202,
        "max_position_embeddings": 16,
        "vocab_size": 301,
        "num_attention_heads": 12,
        "num_hidden_layers": 2,
        "tie_word_embeddings": bool(prefix),
    }
    return write_checkpoint(folder, bert_specs(config, prefix), config, seed=seed)


def switch_checkpoint(folder: Path, *, num_experts: int = 4, seed: int = 0) -> Path:
    """switch_transformers: encoder and decoder, every other layer sparse, a tensor per expert; embeddings tied."""
    config = {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "model_type": "switch_transformers",
        "d_model": 48,
        "d_ff": 74,
        "d_kv": 8,
        "num_heads": 12,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_experts": num_experts,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "relative_attention_num_buckets": 8,
        "vocab_size": 301,
        "tie_word_embeddings": True,
    }
    return write_checkpoint(folder, switch_specs(config), config, seed=seed)


CHECKPOINTS: Mapping[str, Callable[[Path], Path]] = {
    "llama": llama_checkpoint,
    "llama-kv12-untied-3files": partial(llama_checkpoint, kv_heads=12, tied=False, num_files=3),
    "llama-kv2": partial(llama_checkpoint, kv_heads=2),
    "qwen2": partial(llama_checkpoint, model_type="qwen2", kv_heads=12),
    "qwen3": partial(llama_checkpoint, model_type="qwen3", kv_heads=12),
    "mistral": partial(llama_checkpoint, model_type="mistral"),
    "llama-fp8": llama_fp8_checkpoint,
    "llama-gptq": packed_llama_checkpoint,
    "llama-awq": partial(packed_llama_checkpoint, method="awq"),
    "mixtral": mixtral_checkpoint,
    "mixtral-8-3files": partial(mixtral_checkpoint, num_experts=8, kv_heads=12, num_files=3),
    "qwen3_moe": qwen3_moe_checkpoint,
    "qwen3_moe-fp8": partial(qwen3_moe_checkpoint, num_experts=4, fp8=True),
    "deepseek_v3": deepseek_v3_checkpoint,
    "deepseek_v3-fp8": partial(deepseek_v3_checkpoint, num_experts=4, fp8=True),
    "gpt_oss": gpt_oss_checkpoint,
    "gpt_oss-bf16": partial(gpt_oss_checkpoint, mxfp4=False, kv_heads=12),
    "gpt_neox": gpt_neox_checkpoint,
    "gpt2": gpt2_checkpoint,
    "gpt2-prefix": partial(gpt2_checkpoint, prefix="transformer."),
    "bert": bert_checkpoint,
    "bert-prefix": partial(bert_checkpoint, prefix="bert."),
    "switch_transformers": switch_checkpoint,
}
