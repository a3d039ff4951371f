"""Writes the DeepSeek-V3 checkpoint without its weights: headers, config and index are real, the data is a hole.

``python -m benchmarks.deepseek_shape OUT``: 163 sparse files of 688 GB together, a few MB on disk; 91,991 tensors,
FP8 weights with 128x128 block scales. Names and shapes follow the published model (61 layers, 671B parameters) with its
one multi-token-prediction layer (14B more), as on the hub.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CONFIG", "NUM_FILES", "tensors", "write_checkpoint"]

NUM_FILES = 163
_BLOCK = 128
_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [_BLOCK, _BLOCK],
    },
    "tie_word_embeddings": False,
    "topk_group": 4,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

_Tensor = tuple[str, str, tuple[int, ...]]
_HIDDEN, _VOCAB, _HEADS, _EXPERTS = 7168, 129280, 128, 256
_DENSE_LAYERS, _LAYERS = 3, 61


def tensors() -> Iterator[_Tensor]:
    """(name, dtype, shape) of every tensor, layer by layer."""
    yield "model.embed_tokens.weight", "BF16", (_VOCAB, _HIDDEN)
    for layer in range(_LAYERS):
        yield from _layer(f"model.layers.{layer}", dense=layer < _DENSE_LAYERS)
    yield "model.norm.weight", "BF16", (_HIDDEN,)
    yield "lm_head.weight", "BF16", (_VOCAB, _HIDDEN)
    extra = f"model.layers.{_LAYERS}"
    yield from _layer(extra, dense=False)
    yield f"{extra}.embed_tokens.weight", "BF16", (_VOCAB, _HIDDEN)
    yield f"{extra}.enorm.weight", "BF16", (_HIDDEN,)
    yield f"{extra}.hnorm.weight", "BF16", (_HIDDEN,)
    yield f"{extra}.eh_proj.weight", "BF16", (_HIDDEN, 2 * _HIDDEN)
    yield f"{extra}.shared_head.norm.weight", "BF16", (_HIDDEN,)
    yield f"{extra}.shared_head.head.weight", "BF16", (_VOCAB, _HIDDEN)


def _layer(prefix: str, *, dense: bool) -> Iterator[_Tensor]:
    yield from _attention(f"{prefix}.self_attn")
    yield f"{prefix}.input_layernorm.weight", "BF16", (_HIDDEN,)
    yield f"{prefix}.post_attention_layernorm.weight", "BF16", (_HIDDEN,)
    if dense:
        yield from _mlp(f"{prefix}.mlp", 18432)
        return
    yield f"{prefix}.mlp.gate.weight", "BF16", (_EXPERTS, _HIDDEN)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (_EXPERTS,)
    yield from _mlp(f"{prefix}.mlp.shared_experts", 2048)
    for expert in range(_EXPERTS):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", 2048)


def _attention(prefix: str) -> Iterator[_Tensor]:
    yield from _fp8(f"{prefix}.q_a_proj", 1536, _HIDDEN)
    yield f"{prefix}.q_a_layernorm.weight", "BF16", (1536,)
    yield from _fp8(f"{prefix}.q_b_proj", _HEADS * (128 + 64), 1536)
    yield from _fp8(f"{prefix}.kv_a_proj_with_mqa", 512 + 64, _HIDDEN)
    yield f"{prefix}.kv_a_layernorm.weight", "BF16", (512,)
    yield from _fp8(f"{prefix}.kv_b_proj", _HEADS * (128 + 128), 512)
    yield from _fp8(f"{prefix}.o_proj", _HIDDEN, _HEADS * 128)


def _mlp(prefix: str, inner: int) -> Iterator[_Tensor]:
    yield from _fp8(f"{prefix}.gate_proj", inner, _HIDDEN)
    yield from _fp8(f"{prefix}.up_proj", inner, _HIDDEN)
    yield from _fp8(f"{prefix}.down_proj", _HIDDEN, inner)


def _fp8(prefix: str, rows: int, cols: int) -> Iterator[_Tensor]:
    yield f"{prefix}.weight", "F8_E4M3", (rows, cols)
    yield f"{prefix}.weight_scale_inv", "F32", (-(-rows // _BLOCK), -(-cols // _BLOCK))


def write_checkpoint(folder: Path) -> None:
    """Writes the checkpoint into a new or empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty; give a new folder")
    everything = list(tensors())
    total = sum(_nbytes(tensor) for tensor in everything)
    weight_map: dict[str, str] = {}
    done, begin = 0, 0
    for number in range(1, NUM_FILES + 1):
        end, target = begin, total * number // NUM_FILES
        while end < len(everything) and (done < target or number == NUM_FILES):
            done += _nbytes(everything[end])
            end += 1
        name = f"model-{number:05d}-of-{NUM_FILES:06d}.safetensors"
        _write_file(folder / name, everything[begin:end])
        weight_map |= {tensor[0]: name for tensor in everything[begin:end]}
        begin = end
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _nbytes(tensor: _Tensor) -> int:
    return math.prod(tensor[2]) * _BYTES[tensor[1]]


def _write_file(path: Path, members: list[_Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in members:
        name, dtype, shape = tensor
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + _nbytes(tensor)]}
        offset += _nbytes(tensor)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    write_checkpoint(parser.parse_args().out)


if __name__ == "__main__":
    main()
