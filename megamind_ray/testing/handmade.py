"""Checkpoints written byte by byte, so that they may be wrong in one place each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["LLAMA_CONFIG", "LLAMA_SHAPES", "entries", "framed", "write_llama", "write_weights"]

LLAMA_CONFIG: Final[Mapping[str, object]] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
LLAMA_SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    "model.embed_tokens.weight": (64, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.k_proj.weight": (16, 32),
    "model.layers.0.self_attn.v_proj.weight": (16, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.mlp.gate_proj.weight": (64, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
}


def framed(header: bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with this header text; ``length`` is what the prefix says of it, if not the truth."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entries(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, Any]]:
    """Header entries of U8 tensors whose bytes follow each other."""
    header: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, shape in shapes.items():
        begin, offset = offset, offset + math.prod(shape)
        header[name] = {"dtype": "U8", "shape": list(shape), "data_offsets": [begin, offset]}
    return header


def write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Writes a sound file of U8 zeros; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    num_bytes = sum(math.prod(shape) for shape in shapes.values())
    path.write_bytes(framed(json.dumps(entries(shapes)).encode(), bytes(num_bytes)))
    return path


def write_llama(
    folder: Path,
    *,
    config: Mapping[str, object] | str = LLAMA_CONFIG,
    extra: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """Writes a small llama; returns its folder.

    Args:
        folder: Where.
        config: The configuration, or the text of its file.
        extra: More tensors.
    """
    write_weights(folder / "model.safetensors", {**LLAMA_SHAPES, **(extra or {})})
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(dict(config)))
    return folder
