"""Packed weights of four bits, split over ranks: each rank unpacks the same values as one rank that has all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megamind_ray.core.demands import Demands
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.io import open_manifest
from megamind_ray.planning import build_demands
from megamind_ray.planning.shapes import shape_manifest

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "torch_dtype": "float32",
}
DTYPES = {"I32": torch.int32, "I64": torch.int64, "F32": torch.float32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Random bits under the names of the shapes."""
    folder = tmp_path_factory.mktemp("packed")
    shaped = shape_manifest(LLAMA, weights="int4", uri="x")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(-(2**31), 2**31 - 1, tensor.shape, generator=generator).to(DTYPES[tensor.dtype.label])
        for name, tensor in shaped.tensors.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(shaped.config)))
    return open_manifest(folder)


def local(demands: Demands, manifest: Manifest, rank: int, name: str, dtype: type[np.generic]) -> np.ndarray:
    """What a rank holds of a tensor, row by row of the demands."""
    views, rows = demands.views, demands.slices
    (view,) = [
        i for i in range(len(views.rank)) if int(views.rank[i]) == rank and demands.names[int(views.name[i])] == name
    ]
    held = np.zeros(int(views.nbytes[view]), np.uint8)
    stored = np.fromfile(Path(manifest.root) / manifest.files[0].path, np.uint8)
    for i in np.flatnonzero(rows.tensor == views.tensor[view]).tolist():
        if rank in demands.consumer_sets[rows.consumers[i]]:
            for run in range(int(rows.num_runs[i])):
                source = int(rows.src_offset[i] + run * rows.src_stride_bytes[i])
                target = int(rows.dst_offset[i] + run * rows.dst_stride_bytes[i])
                size = int(rows.run_bytes[i])
                held[target : target + size] = stored[source : source + size]
    return held.view(dtype).reshape(demands.shapes[int(views.shape[view])])


def unpacked(demands: Demands, manifest: Manifest, rank: int, layer: str) -> np.ndarray:
    """The weight ``[out, in]`` that a rank computes with."""
    packed = local(demands, manifest, rank, f"{layer}.weight_packed", np.int32)
    scale = local(demands, manifest, rank, f"{layer}.weight_scale", np.float32)
    values = (packed[:, :, None] >> np.arange(0, 32, 4)) & 15
    return (values.reshape(len(packed), -1) - 8) * np.repeat(scale, 128, axis=1)


@pytest.mark.parametrize(
    ("layer", "axis"),
    [
        ("self_attn.q_proj", 0),
        ("self_attn.v_proj", 0),
        ("mlp.up_proj", 0),
        ("self_attn.o_proj", 1),
        ("mlp.down_proj", 1),
    ],
)
def test_the_parts_of_all_ranks_are_the_whole(layer: str, axis: int, checkpoint: Manifest) -> None:
    name = f"model.layers.0.{layer}"
    whole = unpacked(build_demands(checkpoint, Parallel()), checkpoint, 0, name)

    demands = build_demands(checkpoint, Parallel(tp=2))
    parts = [unpacked(demands, checkpoint, rank, name) for rank in range(2)]

    assert all(part.size < whole.size for part in parts)
    assert np.array_equal(np.concatenate(parts, axis=axis), whole)


def test_what_is_in_and_out_of_the_mlp_is_cut_at_the_same_features(checkpoint: Manifest) -> None:
    demands = build_demands(checkpoint, Parallel(tp=2))

    inner = [
        (
            unpacked(demands, checkpoint, rank, "model.layers.0.mlp.gate_proj").shape[0],
            unpacked(demands, checkpoint, rank, "model.layers.0.mlp.down_proj").shape[1],
        )
        for rank in range(2)
    ]

    assert inner == [(384, 384), (256, 256)]


def test_the_shape_on_disk_stays_that_of_the_whole_layer(checkpoint: Manifest) -> None:
    demands = build_demands(checkpoint, Parallel(tp=2))
    name = "model.layers.0.mlp.down_proj.weight_shape"

    held = [local(demands, checkpoint, rank, name, np.int64).tolist() for rank in range(2)]

    assert held[0] == held[1] == local(build_demands(checkpoint, Parallel()), checkpoint, 0, name, np.int64).tolist()
