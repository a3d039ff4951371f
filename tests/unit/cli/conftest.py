"""Small checkpoints, and the command line called as the console script calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megamind_ray.cli import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 128,
}


@dataclass(frozen=True)
class Result:
    """What one command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        return json.loads(self.stdout)


Megamind = Callable[..., Result]


@pytest.fixture
def megamind(capsys: pytest.CaptureFixture[str]) -> Megamind:
    def run(*argv: str | Path) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One Llama layer of 48 KiB in a folder; every byte is known."""
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (128, 32),
        f"{layer}.self_attn.q_proj.weight": (32, 32),
        f"{layer}.self_attn.k_proj.weight": (16, 32),
        f"{layer}.self_attn.v_proj.weight": (16, 32),
        f"{layer}.self_attn.o_proj.weight": (32, 32),
        f"{layer}.mlp.gate_proj.weight": (64, 32),
        f"{layer}.mlp.up_proj.weight": (64, 32),
        f"{layer}.mlp.down_proj.weight": (32, 64),
        f"{layer}.input_layernorm.weight": (32,),
        f"{layer}.post_attention_layernorm.weight": (32,),
        "model.norm.weight": (32,),
        "lm_head.weight": (128, 32),
    }
    random = np.random.default_rng(0)
    tensors = {name: random.random(shape, dtype=np.float32).astype(np.float16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
