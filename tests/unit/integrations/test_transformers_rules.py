from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from megamind_ray.core.demands import Demands
from megamind_ray.core.manifest import FileInfo, Manifest
from megamind_ray.core.parallel import ExpertShard, Heads, PackedShard, Parallel, Replicate, Rule, Shard
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.errors import RequestError
from megamind_ray.integrations.transformers import fallback_rules, tp_plan_rules
from megamind_ray.planning import Fallback, build_demands

GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
LAYER = "model.layers.0"
MLP = ((f"{LAYER}.mlp.gate_proj.weight", (256, 64)), (f"{LAYER}.mlp.down_proj.weight", (64, 256)))


class Source:
    """Counts how often it is asked for rules."""

    def __init__(self, *rules: Rule, hint: str = "") -> None:
        self.answer = Fallback(rules=rules, hint=hint)
        self.asked: list[Mapping[str, tuple[int, ...]]] = []

    def __call__(self, config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> Fallback:
        self.asked.append(shapes)
        return self.answer


def manifest_of(
    config: Mapping[str, object], specs: Sequence[tuple[str, tuple[int, ...]]], dtype: DType = DType.BF16
) -> Manifest:
    tensors, at = {}, 8
    for name, shape in specs:
        num_bytes = dtype.nbytes(int(np.prod(shape)))
        assert num_bytes is not None
        tensors[name] = TensorInfo(name, dtype, shape, 0, at, at + num_bytes)
        at += num_bytes
    file = FileInfo(path="model.safetensors", size_bytes=at, data_begin=8)
    return Manifest(uri="mem", root="mem", files=(file,), tensors=tensors, config=config)


def local_shapes(demands: Demands, rank: int) -> dict[str, tuple[int, ...]]:
    views = demands.views
    return {
        demands.names[name]: demands.shapes[shape]
        for at, name, shape in zip(views.rank.tolist(), views.name.tolist(), views.shape.tolist(), strict=True)
        if at == rank
    }


def placement_of(rules: Sequence[Rule], pattern: str) -> object:
    return next(rule.placement for rule in rules if rule.pattern == pattern)


# Translation


def test_attention_is_split_by_the_heads_of_the_configuration() -> None:
    rules = tp_plan_rules(GEMMA2)
    assert placement_of(rules, "*.layers.*.self_attn.k_proj.weight") == Shard(
        dim=0, heads=Heads(count=2, setting="num_key_value_heads", kv=True)
    )
    assert placement_of(rules, "*.layers.*.self_attn.o_proj.weight") == Shard(
        dim=1, heads=Heads(count=4, setting="num_attention_heads")
    )
    assert {rule.origin for rule in rules} == {"transformers", "built-in ends"}


def test_numbers_that_the_configuration_leaves_out_are_the_defaults_of_its_class() -> None:
    shard = placement_of(tp_plan_rules({"model_type": "gemma2"}), "*.layers.*.self_attn.q_proj.weight")
    assert shard == Shard(dim=0, heads=Heads(count=8, setting="num_attention_heads"))


def test_a_dim_that_is_not_made_of_the_heads_is_split_plainly() -> None:
    rules = tp_plan_rules(GEMMA2, {f"{LAYER}.self_attn.q_proj.weight": (510, 64)})
    assert placement_of(rules, "*.layers.*.self_attn.q_proj.weight") == Shard(dim=0)


def test_a_gathered_output_may_be_cut_anywhere() -> None:
    assert placement_of(tp_plan_rules({"model_type": "phi3"}), "*.layers.*.self_attn.qkv_proj.weight") == Shard(dim=0)


def test_sizes_of_packed_experts_come_from_the_checkpoint() -> None:
    name = "*.layers.*.mlp.experts.gate_up_proj"
    shapes = {f"{LAYER}.mlp.experts.gate_up_proj": (4, 24, 32)}
    placement = placement_of(tp_plan_rules({"model_type": "qwen2_moe"}, shapes), name)
    assert isinstance(placement, ExpertShard)
    assert placement.inner == PackedShard(dim=1, sizes=(12, 12), blocks=(Shard(dim=0), Shard(dim=0)))


def test_experts_that_are_apart_go_to_the_ranks_of_their_group() -> None:
    rules = tp_plan_rules({"model_type": "qwen2_moe"})
    assert placement_of(rules, "*.layers.*.mlp.experts.*.down_proj.qweight") == ExpertShard(
        inner=Shard(dim=0), separate=True
    )


def test_a_language_model_inside_another_model_is_split_and_its_eye_is_not() -> None:
    config = {"model_type": "gemma3", "text_config": {"num_attention_heads": 4, "num_key_value_heads": 2}}
    shapes = {"language_model.model.layers.0.self_attn.q_proj.weight": (64, 32)}
    eye = ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", (36, 36))
    manifest = manifest_of(config, [*shapes.items(), eye])
    demands = build_demands(manifest, Parallel(tp=2), fallback_rules=fallback_rules, allow_replication=True)
    assert [tensor.replicated for tensor in demands.tensors] == [False, True]
    assert demands.tensors[0].reason.startswith("transformers: ")


def test_block_scales_are_cut_with_their_weights() -> None:
    config = {**GEMMA2, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    scales = [(f"{LAYER}.mlp.gate_proj.weight_scale_inv", (2, 1)), (f"{LAYER}.mlp.down_proj.weight_scale_inv", (1, 2))]
    demands = build_demands(manifest_of(config, [*MLP, *scales]), Parallel(tp=2), fallback_rules=fallback_rules)
    assert local_shapes(demands, 0) == {
        f"{LAYER}.mlp.gate_proj.weight": (128, 64),
        f"{LAYER}.mlp.gate_proj.weight_scale_inv": (1, 1),
        f"{LAYER}.mlp.down_proj.weight": (64, 128),
        f"{LAYER}.mlp.down_proj.weight_scale_inv": (1, 1),
    }


def test_what_runs_before_the_layers_is_on_the_first_stage_and_what_runs_behind_them_on_the_last() -> None:
    ends = [("model.embed_tokens.weight", (16, 64)), ("model.norm.weight", (64,)), ("lm_head.weight", (16, 64))]
    layers = [(name.replace("layers.0", f"layers.{number}"), shape) for number in range(2) for name, shape in MLP]
    manifest = manifest_of(GEMMA2, [*ends, *layers])
    demands = build_demands(manifest, Parallel(pp=2), fallback_rules=fallback_rules)
    first, last = (local_shapes(demands, rank).keys() for rank in (0, 1))
    assert {name for name, _ in ends if name in first} == {"model.embed_tokens.weight"}
    assert {name for name, _ in ends if name in last} == {"model.norm.weight", "lm_head.weight"}


# Without rules


def refusal(config: Mapping[str, object]) -> str:
    with pytest.raises(RequestError) as caught:
        build_demands(manifest_of(config, MLP), Parallel(tp=2), fallback_rules=fallback_rules)
    return caught.value.message


def test_without_the_package_a_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "model_type='gemma2'" in refusal(GEMMA2)
    assert refusal(GEMMA2).endswith("pip install 'megamind-ray[transformers]'")


def test_without_the_package_a_load_that_replicates_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    manifest = manifest_of(GEMMA2, MLP)
    demands = build_demands(manifest, Parallel(tp=2), fallback_rules=fallback_rules, allow_replication=True)
    assert all(tensor.replicated for tensor in demands.tensors)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "names no model_type"),
        ({"model_type": "nobody_knows"}, "nor does transformers .* know it"),
        ({"model_type": "stablelm"}, "has no tensor-parallel plan for model_type='stablelm'"),
        ({**GEMMA2, "hidden_size": "wide"}, "does not accept config.json of model_type='gemma2': .*wide"),
    ],
)
def test_a_refusal_says_why_transformers_gave_no_rules(config: Mapping[str, object], reason: str) -> None:
    assert re.search(reason, refusal(config))


# When the source is asked


def test_a_source_is_asked_once_with_a_shape_for_each_kind_of_tensor() -> None:
    source = Source(Rule(pattern="*.weight", placement=Shard(dim=0)))
    specs = [(name.replace("layers.0", f"layers.{number}"), shape) for number in range(3) for name, shape in MLP]
    build_demands(manifest_of(GEMMA2, specs), Parallel(tp=2), fallback_rules=source)
    assert source.asked == [dict(MLP)]


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(dp=2)])
def test_a_mesh_that_splits_nothing_asks_for_no_rules(parallel: Parallel) -> None:
    source = Source()
    build_demands(manifest_of(GEMMA2, MLP), parallel, fallback_rules=source)
    assert source.asked == []


def test_a_family_whose_matrices_all_have_built_in_rules_asks_for_none() -> None:
    source = Source()
    specs = [*MLP, (f"{LAYER}.odd_norm.weight", (64,))]
    build_demands(manifest_of({**GEMMA2, "model_type": "llama"}, specs), Parallel(tp=2), fallback_rules=source)
    assert source.asked == []


def test_a_gap_of_a_built_in_family_is_filled_and_its_own_rules_win() -> None:
    source = Source(Rule(pattern="*", placement=Replicate(), origin="elsewhere"))
    specs = [*MLP, (f"{LAYER}.adapter.weight", (2, 2))]
    demands = build_demands(
        manifest_of({**GEMMA2, "model_type": "llama"}, specs), Parallel(tp=2), fallback_rules=source
    )
    assert len(source.asked) == 1
    assert [tensor.reason.partition(":")[0] for tensor in demands.tensors] == ["built-in llama"] * 2 + ["elsewhere"]
