"""What each rank must hold, said the slow way: whole tensors by the safetensors library, then torch.

This restates docs/design/0002 and the facts of the families without sharing code with ``planning``, so that one can be
held against the other bit for bit. It covers what ``testing.checkpoints`` writes, in memory, for small checkpoints.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megamind_ray.core.parallel import Parallel

__all__ = ["expected_module_tensors", "expected_state_dict"]

Config = Mapping[str, Any]

# Layers that split their out features, and those that split their in features.
_COLUMN = [
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "q_b_proj",
    "kv_b_proj",
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "intermediate.dense",
    "query_key_value",
    "dense_h_to_4h",
    "attn.c_attn",
    "mlp.c_fc",
    "wi",
    "Attention.q",
    "Attention.k",
    "Attention.v",
]
_ROW = [
    "o_proj",
    "down_proj",
    "attention.output.dense",
    "output.dense",
    "attention.dense",
    "dense_4h_to_h",
    "attn.c_proj",
    "mlp.c_proj",
    "wo",
    "Attention.o",
]
_VOCABULARY = [
    "embed_tokens.weight",
    "lm_head.weight",
    "shared_head.head.weight",
    "wte.weight",
    "embed_in.weight",
    "embed_out.weight",
    "word_embeddings.weight",
    "shared.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.bias",
    "cls.predictions.decoder.bias",
]
_FIRST = ("embed_tokens.", "wte.", "wpe.", "embed_in.", "embeddings.")
_ALL = ("shared.", "encoder.embed_tokens.", "decoder.embed_tokens.", "encoder.final_layer_norm.")
# Absent name: the name whose bytes it shares where tie_word_embeddings is true.
_TIES = (
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "wte.weight"),
    ("lm_head.weight", "transformer.wte.weight"),
    ("encoder.embed_tokens.weight", "shared.weight"),
    ("decoder.embed_tokens.weight", "shared.weight"),
    ("lm_head.weight", "shared.weight"),
    ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
)


def expected_state_dict(path: str | Path, parallel: Parallel, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of one rank, by name in the module; tied names are both there where their stage has them.

    Args:
        path: Folder of a checkpoint that ``testing.checkpoints`` wrote.
        parallel: The mesh.
        rank: Rank in it.
    """
    config = _read_config(path)
    tensors = expected_module_tensors(path)
    ties = _ties(config, tensors)
    stages = _stages(config, tensors, ties, parallel.pp)
    pp, within = divmod(rank, parallel.dp * parallel.tp)
    tp_rank = within % parallel.tp
    local: dict[str, torch.Tensor] = {}
    for name in (*tensors, *ties):
        if pp not in stages[name]:
            continue
        tensor = tensors[ties.get(name, name)]
        if parallel.ep > 1 and ".experts." in name:
            group = within // (parallel.dp * parallel.tp // parallel.ep)
            piece = _experts_of(name, tensor, parallel.ep, group, config)
        else:
            piece = _local(name, tensor, parallel.tp, tp_rank, config)
        if piece is not None:
            local[name] = piece.contiguous()
    return local


def expected_module_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """All tensors whole, by name in the module: experts stacked, gate before up. Absent tied names are left out."""
    config = _read_config(path)
    disk: dict[str, torch.Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        disk.update(load_file(file))
    if config["model_type"] == "bert":
        old = {"gamma": "weight", "beta": "bias"}
        return {re.sub(r"LayerNorm\.(gamma|beta)", lambda m: f"LayerNorm.{old[m[1]]}", n): t for n, t in disk.items()}
    if config["model_type"] == "gpt2" and config["architectures"] != ["GPT2Model"]:
        return {name if name.startswith("transformer.") else f"transformer.{name}": t for name, t in disk.items()}
    if config["model_type"] == "gpt_neox":
        return {name.replace("embed_out", "lm_head"): tensor for name, tensor in disk.items()}
    if config["model_type"] == "mixtral":
        disk = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in disk.items()}
        return _stack(disk, "w1", "w3", "w2")
    if config["model_type"] in ("qwen3_moe", "deepseek_v3"):
        return _stack(disk, "gate_proj", "up_proj", "down_proj")
    return disk


def _stack(disk: dict[str, torch.Tensor], gate: str, up: str, down: str) -> dict[str, torch.Tensor]:
    module, layers = {}, set()
    for name, tensor in disk.items():
        match = re.fullmatch(r"(.*\.mlp\.experts)\.\d+\..*", name)
        if match:
            layers.add(match[1])
        else:
            module[name] = tensor
    for layer in sorted(layers):
        count = 1 + max(int(n[len(layer) + 1 :].split(".")[0]) for n in disk if n.startswith(layer + "."))
        for leaf, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            if f"{layer}.0.{gate}.{leaf}" not in disk:
                continue
            both = [
                _cat([disk[f"{layer}.{e}.{gate}.{leaf}"], disk[f"{layer}.{e}.{up}.{leaf}"]], 0) for e in range(count)
            ]
            module[f"{layer}.gate_up_proj{suffix}"] = _cat([pair[None] for pair in both], 0)
            downs = [disk[f"{layer}.{e}.{down}.{leaf}"][None] for e in range(count)]
            module[f"{layer}.down_proj{suffix}"] = _cat(downs, 0)
    return module


def _read_config(path: str | Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    return config


def _ties(config: Config, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    if not config["tie_word_embeddings"]:
        return {}
    return {absent: there for absent, there in _TIES if there in tensors and absent not in tensors}


def _cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """``torch.cat`` that moves bits only: float8 goes through as bytes."""
    dtype = tensors[0].dtype
    if dtype.itemsize == 1:
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors], dim).view(dtype)
    return torch.cat(tensors, dim)


def _units(tensor: torch.Tensor, dim: int, unit: int, parts: int, index: int) -> torch.Tensor:
    """Part ``index`` of ``parts``: whole units, as many for each part as ``torch.chunk`` would give."""
    units = list(torch.split(tensor, unit, dim))
    step = math.ceil(len(units) / parts)
    mine = units[index * step : (index + 1) * step]
    return _cat(mine, dim) if mine else tensor.narrow(dim, 0, 0)


def _experts_of(name: str, tensor: torch.Tensor, ep: int, group: int, config: Config) -> torch.Tensor | None:
    single = re.search(r"\.experts\.expert_(\d+)\.", name)
    if single:
        mine = torch.arange(config["num_experts"]).chunk(ep)
        return tensor if group < len(mine) and int(single[1]) in mine[group].tolist() else None
    chunks = tensor.chunk(ep, 0)
    return chunks[group] if group < len(chunks) else tensor.narrow(0, 0, 0)


def _local(name: str, tensor: torch.Tensor, tp: int, index: int, config: Config) -> torch.Tensor:
    """The part of tp rank ``index``, for whatever is not split by ep."""
    if tp == 1:
        return tensor
    if config["model_type"] == "gpt_oss" and ".experts." in name:
        return _gpt_oss_experts(name.rsplit(".", 1)[1], tensor, tp, index, config)
    if ".mlp.experts." in name and ".expert_" not in name:
        return _fused_experts(name, tensor, tp, index, config)
    if any(name == ending or name.endswith("." + ending) for ending in _VOCABULARY):
        return _units(tensor, 0, 1, tp, index)
    if name.endswith(".sinks"):
        return tensor.chunk(tp)[index]
    if name.endswith("relative_attention_bias.weight"):
        return tensor.chunk(tp, 1)[index]
    layer, _, leaf = name.rpartition(".")
    if any(layer.endswith(ending) for ending in _ROW):
        return _row(layer, leaf, tensor, tp, index, config)
    if any(layer.endswith(ending) for ending in _COLUMN):
        return _column(layer, leaf, tensor, tp, index, config)
    return tensor


def _scheme(config: Config) -> tuple[str, int, int]:
    """Name, features that an MLP's inside is cut in, features per group."""
    scheme = config.get("quantization_config") or {}
    method = scheme.get("quant_method", "none")
    if method == "fp8":
        return method, 128, 128
    if method in ("gptq", "awq"):
        return method, math.lcm(8, scheme["group_size"]), scheme["group_size"]
    return method, 1, 1


def _by_heads(layer: str) -> bool:
    return bool(re.search(r"attn|ttention", layer)) and "mlp" not in layer


def _column(layer: str, leaf: str, tensor: torch.Tensor, tp: int, index: int, config: Config) -> torch.Tensor:
    method, inner, _ = _scheme(config)
    if leaf in ("g_idx", "input_scale"):
        return tensor
    dim = 1 if leaf in ("qweight", "qzeros", "scales") else 0
    if config["model_type"] == "gpt2" and leaf == "weight":
        dim = 1
    if layer.endswith("c_attn"):
        return _cat([block.chunk(tp, dim)[index] for block in tensor.chunk(3, dim)], dim)
    keys: int | None = config.get("num_key_value_heads")
    if layer.endswith(("k_proj", "v_proj")) and keys is not None and keys % tp:
        heads = torch.chunk(tensor, keys, dim)
        return heads[index * keys // tp]
    if _by_heads(layer):
        return tensor.chunk(tp, dim)[index]
    per_index = {"weight_scale_inv": 128, "qzeros": 8}.get(leaf, 8 if (method, leaf) == ("awq", "qweight") else 1)
    return _units(tensor, dim, inner // per_index, tp, index)


def _row(layer: str, leaf: str, tensor: torch.Tensor, tp: int, index: int, config: Config) -> torch.Tensor:
    method, inner, group = _scheme(config)
    if leaf in ("bias", "input_scale"):
        return tensor
    dim = 0 if leaf in ("qweight", "qzeros", "scales", "g_idx") or config["model_type"] == "gpt2" else 1
    if _by_heads(layer):
        return tensor.chunk(tp, dim)[index]
    per_index = {"weight_scale_inv": 128, "qzeros": group, "scales": group}.get(
        leaf, 8 if (method, leaf) == ("gptq", "qweight") else 1
    )
    return _units(tensor, dim, inner // per_index, tp, index)


def _fused_experts(name: str, tensor: torch.Tensor, tp: int, index: int, config: Config) -> torch.Tensor:
    _, inner, _ = _scheme(config)
    unit = 1 if name.endswith("_scale_inv") else inner
    if "gate_up_proj" in name:
        return _cat([_units(half, 1, unit, tp, index) for half in tensor.chunk(2, 1)], 1)
    return _units(tensor, 2, unit, tp, index)


def _gpt_oss_experts(leaf: str, tensor: torch.Tensor, tp: int, index: int, config: Config) -> torch.Tensor:
    """Gate and up features alternate; 32 features of the inside stay together in MXFP4."""
    inside = 32 if "quantization_config" in config else 1
    if leaf == "down_proj_bias":
        return tensor
    if leaf in ("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"):
        return _units(tensor, 1, 2 * inside, tp, index)
    if leaf == "gate_up_proj":
        return _units(tensor, 2, 2 * inside, tp, index)
    return _units(tensor, 1, inside, tp, index) if leaf == "down_proj" else _units(tensor, 2, 1, tp, index)


def _stages(
    config: Config, tensors: Mapping[str, torch.Tensor], ties: Mapping[str, str], pp: int
) -> dict[str, tuple[int, ...]]:
    """For each name the stages that hold it."""
    names = (*tensors, *ties)
    layers = {name: _layer(name, config) for name in names}
    number = {layer: i for i, layer in enumerate(sorted({layer for layer in layers.values() if layer is not None}))}
    load: dict[Any, int] = defaultdict(int)
    ends: dict[str, str] = {}
    for name in names:
        if layers[name] is None:
            ends[name] = _end(name)
    for tensor_name, tensor in tensors.items():
        same = (tensor_name, *(absent for absent, there in ties.items() if there == tensor_name))
        for home in {ends.get(name, layers[name]) for name in same}:
            load[home] += tensor.numel() * tensor.itemsize
    sizes = [load[layer] for layer in number]
    sizes[0] += load["first"]
    sizes[-1] += load["last"]
    cuts = _best_cuts(sizes, pp)
    stage_of = [sum(layer >= cut for cut in cuts) for layer in range(len(sizes))]
    held = {"first": (0,), "last": (pp - 1,), "all": tuple(range(pp))}
    stages: dict[str, tuple[int, ...]] = {}
    for name, layer in layers.items():
        stages[name] = held[ends[name]] if layer is None else (stage_of[number[layer]],)
    return stages


def _layer(name: str, config: Config) -> tuple[int, int] | None:
    """(stack, layer); the encoder is stack 0, the decoder behind it stack 1."""
    if config["model_type"] == "switch_transformers":
        match = re.match(r"(encoder|decoder)\.block\.(\d+)\.", name)
        return (int(match[1] == "decoder"), int(match[2])) if match else None
    match = re.search(r"(?:^|\.)(?:model\.layers|gpt_neox\.layers|h|encoder\.layer)\.(\d+)\.", name)
    return (0, int(match[1])) if match else None


def _end(name: str) -> str:
    if name.startswith(_ALL):
        return "all"
    return "first" if any(re.search(rf"(?:^|\.){re.escape(part)}", name) for part in _FIRST) else "last"


def _best_cuts(sizes: list[int], pp: int) -> tuple[int, ...]:
    """First layers of the stages after the first: of all ways with the smallest largest stage, the latest cuts."""

    def largest(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, len(sizes))
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise(edges))

    return min(
        itertools.combinations(range(1, len(sizes)), pp - 1), key=lambda cuts: (largest(cuts), [-c for c in cuts])
    )
