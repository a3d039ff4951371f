"""Every family plans in every format, and what belongs to a weight is cut with it."""

from __future__ import annotations

from typing import Any

import pytest

from megamind_ray.api.plan import nominal_topology
from megamind_ray.config import Config
from megamind_ray.core.demands import Demands
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.errors import RequestError
from megamind_ray.planning import build_demands, build_plan
from megamind_ray.planning.shapes import FAMILIES, shape_manifest

_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 512,
}
_LATENT: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 128,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 128,
    "v_head_dim": 128,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 128},
    "mistral": {"head_dim": 128},
    "qwen2": {"hidden_size": 512},
    "qwen3": {"head_dim": 128},
    "mixtral": {"head_dim": 128, "num_local_experts": 4},
    "qwen3_moe": {"head_dim": 128, "moe_intermediate_size": 256, "num_experts": 4, "mlp_only_layers": [1]},
    "deepseek_v3": _LATENT,
    "gpt_oss": {"head_dim": 64, "num_local_experts": 4},
}
MESHES = [Parallel(tp=2), Parallel(tp=4), Parallel(pp=2), Parallel(dp=2), Parallel(tp=2, pp=2, dp=2)]
MOE_MESHES = [Parallel(tp=2, ep=2), Parallel(tp=4, ep=2), Parallel(tp=2, dp=2, ep=4, pp=2)]
FORMATS = [(name, weights) for name, family in FAMILIES.items() for weights in family.weights]
CASES = [
    (name, weights, mesh)
    for name, weights in FORMATS
    for mesh in [*MESHES, *(MOE_MESHES if "experts" in str(SETTINGS[name]) else [])]
]
SCALED = {"fp8": ("weight", "weight_scale_inv", 128), "int4": ("weight_packed", "weight_scale", 16)}


def config(name: str) -> dict[str, Any]:
    return {"model_type": name, **_COMMON, **SETTINGS[name]}


def demands_of(name: str, weights: str, mesh: Parallel) -> Demands:
    return build_demands(shape_manifest(config(name), weights=weights, uri=name), mesh)


def local_shapes(demands: Demands, name: str) -> list[tuple[int, ...]]:
    """What each rank that holds the tensor holds of it."""
    views = demands.views
    return [
        demands.shapes[shape]
        for index, shape in zip(views.name.tolist(), views.shape.tolist(), strict=True)
        if demands.names[index] == name
    ]


def test_every_family_is_planned() -> None:
    assert set(SETTINGS) == set(FAMILIES)


@pytest.mark.parametrize(("name", "weights", "mesh"), CASES, ids=[f"{n}-{w}-{mesh}" for n, w, mesh in CASES])
def test_every_byte_is_read_once_and_reaches_the_devices(name: str, weights: str, mesh: Parallel) -> None:
    manifest = shape_manifest(config(name), weights=weights, uri=name)

    plan: Plan = build_plan(manifest, build_demands(manifest, mesh), nominal_topology(mesh.world), config=Config())

    assert plan.bytes_total == plan.bytes_from_storage == manifest.nbytes
    assert plan.bytes_to_device >= manifest.nbytes * mesh.dp ** (mesh.ep == 1)


@pytest.mark.parametrize("weights", SCALED)
@pytest.mark.parametrize("layer", ["self_attn.o_proj", "mlp.down_proj"])
def test_columns_are_cut_with_their_scales(weights: str, layer: str) -> None:
    demands = demands_of("llama", weights, Parallel(tp=2))
    weight, scale, columns = SCALED[weights]
    at = f"model.layers.0.{layer}"

    of_weight, of_scale = local_shapes(demands, f"{at}.{weight}"), local_shapes(demands, f"{at}.{scale}")

    whole = shape_manifest(config("llama"), weights=weights, uri="x").tensors[f"{at}.{weight}"].shape
    assert of_weight == [(whole[0], whole[1] // 2)] * 2
    assert [shape[1] for shape in of_scale] == [shape[1] // columns for shape in of_weight]


@pytest.mark.parametrize("layer", ["self_attn.q_proj", "mlp.gate_proj"])
def test_rows_of_packed_weights_are_cut_with_their_scales(layer: str) -> None:
    demands = demands_of("llama", "int4", Parallel(tp=2))
    at = f"model.layers.0.{layer}"

    assert local_shapes(demands, f"{at}.weight_packed") == [(256, 32)] * 2
    assert local_shapes(demands, f"{at}.weight_scale") == [(256, 2)] * 2
    assert local_shapes(demands, f"{at}.weight_shape") == [(2,)] * 2


def test_packed_experts_stay_apart_and_go_to_their_group() -> None:
    demands = demands_of("mixtral", "int4", Parallel(tp=2, ep=2))

    held = [name for name in demands.names if ".layers.0." in name and name.endswith(".w2.weight_packed")]
    assert held == [f"model.layers.0.mlp.experts.{expert}.w2.weight_packed" for expert in range(4)]
    assert [local_shapes(demands, name) for name in held] == [[(256, 64)]] * 4


def test_heads_that_cut_through_a_group_of_scales_are_refused() -> None:
    narrow = {**config("llama"), "head_dim": 64, "num_key_value_heads": 4}
    manifest = shape_manifest(narrow, weights="int4", uri="x")

    with pytest.raises(RequestError, match=r"o_proj\.weight_packed would be split at feature 64, which .*weight_scale"):
        build_demands(manifest, Parallel(tp=4))
