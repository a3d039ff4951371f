from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamind_ray.core.demands import Demands
from megamind_ray.core.manifest import FileInfo, Manifest
from megamind_ray.core.parallel import ExpertShard, Heads, PackedShard, Parallel, Replicate, Rule, Shard
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.errors import RequestError
from megamind_ray.planning.demands import build_demands
from megamind_ray.testing.oracle import expected_module_tensors

Spec = tuple[str, DType, tuple[int, ...]]
Checkpoint = Callable[[str], Manifest]
Execute = Callable[[Demands, Manifest], list[dict[str, tuple[tuple[int, ...], bytes]]]]


def manifest_of(
    specs: Sequence[Spec], config: Mapping[str, object] | None = None, tied: Mapping[str, str] | None = None
) -> Manifest:
    """A checkpoint of one file that exists in memory only."""
    tensors, at = {}, 100
    for name, dtype, shape in specs:
        num_bytes = dtype.nbytes(int(np.prod(shape)))
        assert num_bytes is not None
        tensors[name] = TensorInfo(name, dtype, shape, 0, at, at + num_bytes)
        at += num_bytes
    file = FileInfo(path="model.safetensors", size_bytes=at, data_begin=100)
    return Manifest(uri="mem", root="mem", files=(file,), tensors=tensors, config=config or {}, tied=tied or {})


def weight(name: str, *shape: int, dtype: DType = DType.BF16) -> Spec:
    return name, dtype, shape


def holders(demands: Demands) -> dict[str, set[int]]:
    """Name -> ranks that have it."""
    found: dict[str, set[int]] = defaultdict(set)
    for rank, name in zip(demands.views.rank.tolist(), demands.views.name.tolist(), strict=True):
        found[demands.names[name]].add(rank)
    return found


def shapes(demands: Demands, name: str) -> list[tuple[int, ...]]:
    """Local shapes of a name, by rank."""
    number = demands.names.index(name)
    return [demands.shapes[shape] for shape in demands.views.shape[demands.views.name == number].tolist()]


def without(manifest: Manifest, *names: str) -> Manifest:
    tensors = {name: info for name, info in manifest.tensors.items() if name not in names}
    return dataclasses.replace(manifest, tensors=tensors)


def with_config(manifest: Manifest, **settings: object) -> Manifest:
    return dataclasses.replace(manifest, config={**manifest.config, **settings})


# What is replicated over tp, by family: everything else is split.


@pytest.mark.parametrize(
    ("name", "replicated"),
    [
        ("llama", {"input_layernorm", "post_attention_layernorm", "norm"}),
        ("qwen3", {"input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"}),
        ("mixtral", {"input_layernorm", "post_attention_layernorm", "norm", "gate"}),
        (
            "deepseek_v3-fp8",
            {"input_layernorm", "post_attention_layernorm", "norm", "gate", "enorm", "hnorm", "eh_proj"}
            | {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"},
        ),
        (
            "gpt_oss",
            {"input_layernorm", "post_attention_layernorm", "norm", "router", "o_proj", "experts"},
        ),
        ("gpt2", {"ln_1", "ln_2", "ln_f", "wpe", "attn", "c_proj"}),
        ("switch_transformers", {"layer_norm", "final_layer_norm", "classifier"}),
    ],
)
def test_replicated_tensors_of_a_family_are_few_and_known(
    checkpoint: Checkpoint, name: str, replicated: set[str]
) -> None:
    demands = build_demands(checkpoint(name), Parallel(tp=2))
    found = [tensor for tensor in demands.tensors if tensor.replicated]
    assert {tensor.name.split(".")[-2] for tensor in found} == replicated
    # Of the layers that are split, only biases and the order of GPTQ stay whole.
    split = ("o_proj", "experts", "attn", "c_proj")
    assert all("bias" in tensor.name for tensor in found if tensor.name.split(".")[-2] in split)
    assert all(tensor.reason.startswith("built-in ") for tensor in demands.tensors)


# Names


def test_experts_are_fused_gate_before_up(checkpoint: Checkpoint) -> None:
    demands = build_demands(checkpoint("mixtral"), Parallel())
    fused = {tensor.name: tensor.shape for tensor in demands.tensors if tensor.name.startswith("model.layers.0.mlp")}
    assert fused == {
        "model.layers.0.mlp.gate.weight": (4, 96),
        "model.layers.0.mlp.experts.gate_up_proj": (4, 148, 96),
        "model.layers.0.mlp.experts.down_proj": (4, 96, 74),
    }


def test_block_scales_are_fused_with_their_experts(checkpoint: Checkpoint) -> None:
    demands = build_demands(checkpoint("deepseek_v3-fp8"), Parallel())
    fused = {tensor.name: tensor.shape for tensor in demands.tensors}
    assert fused["model.layers.1.mlp.experts.gate_up_proj_scale_inv"] == (4, 4, 1)
    assert fused["model.layers.1.mlp.experts.down_proj_scale_inv"] == (4, 1, 2)


@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_missing_expert_is_named(checkpoint: Checkpoint, part: str) -> None:
    name = f"model.layers.1.block_sparse_moe.experts.2.{part}.weight"
    with pytest.raises(RequestError, match=f"tensor {name} is missing"):
        build_demands(without(checkpoint("mixtral"), name), Parallel())


def test_last_expert_is_missed_by_the_count_in_the_configuration(checkpoint: Checkpoint) -> None:
    manifest = with_config(checkpoint("mixtral"), num_local_experts=5)
    with pytest.raises(RequestError, match=r"block_sparse_moe\.experts\.4\.w1\.weight is missing .* its 5 experts"):
        build_demands(manifest, Parallel())


def test_more_experts_than_configured_are_refused(checkpoint: Checkpoint) -> None:
    manifest = with_config(checkpoint("mixtral"), num_local_experts=3)
    with pytest.raises(RequestError, match=r"experts\.3, but config\.json says 3 experts"):
        build_demands(manifest, Parallel())


def test_experts_of_different_shapes_are_refused(checkpoint: Checkpoint) -> None:
    manifest = checkpoint("mixtral")
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    odd = dataclasses.replace(manifest.tensors[name], shape=(74, 96))
    manifest = dataclasses.replace(manifest, tensors={**manifest.tensors, name: odd})
    with pytest.raises(RequestError, match=r"must be alike, but .*experts\.0\.w2.* and .*experts\.1\.w2.* \[74, 96\]"):
        build_demands(manifest, Parallel())


def test_models_that_keep_experts_apart_keep_their_names() -> None:
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    demands = build_demands(manifest_of([weight(name, 4, 4)], {"model_type": "someone_elses"}), Parallel())
    assert demands.names == (name,)


def test_packed_experts_keep_their_names_and_go_to_their_group() -> None:
    specs = [
        weight(f"model.layers.0.mlp.experts.{e}.{proj}.qweight", 8, 64, dtype=DType.I32)
        for e in range(4)
        for proj in ("gate_proj", "up_proj")
    ]
    config = {
        "model_type": "qwen3_moe",
        "num_attention_heads": 4,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    }
    demands = build_demands(manifest_of(specs, config), Parallel(tp=2, ep=2))
    held = holders(demands)
    assert held["model.layers.0.mlp.experts.1.up_proj.qweight"] == {0}
    assert held["model.layers.0.mlp.experts.2.gate_proj.qweight"] == {1}
    assert shapes(demands, "model.layers.0.mlp.experts.2.gate_proj.qweight") == [(8, 64)]


def test_blocks_of_experts_of_a_rank_lie_one_behind_the_other(checkpoint: Checkpoint, execute: Execute) -> None:
    halves = PackedShard(dim=0, sizes=(2, 2), blocks=(Shard(dim=0),) * 2)
    manifest = checkpoint("mixtral")
    rules = [Rule(pattern="*.experts.down_proj", placement=halves)]
    second = execute(build_demands(manifest, Parallel(tp=2), rules=rules), manifest)[1]
    whole = expected_module_tensors(manifest.root)["model.layers.0.mlp.experts.down_proj"]
    shape, data = second["model.layers.0.mlp.experts.down_proj"]
    assert shape == (2, 96, 74)
    assert data == whole[[1, 3]].view(torch.uint8).numpy().tobytes()


# Stages and tied names


def test_tied_tensor_has_both_names_on_one_stage(checkpoint: Checkpoint) -> None:
    demands = build_demands(checkpoint("llama"), Parallel())
    tied = [i for i, t in enumerate(demands.tensors) if t.name == "model.embed_tokens.weight"]
    views = demands.views
    rows = views.tensor == tied[0]
    assert [demands.names[name] for name in views.name[rows]] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert views.alias[rows].tolist() == [0, 1]


def test_tied_tensor_is_demanded_by_both_ends_and_read_once(checkpoint: Checkpoint) -> None:
    manifest = checkpoint("llama")
    demands = build_demands(manifest, Parallel(pp=2))
    held = holders(demands)
    assert held["model.embed_tokens.weight"] == {0}
    assert held["lm_head.weight"] == {1}
    assert held["model.norm.weight"] == {1}
    assert demands.views.alias.sum() == 0
    assert demands.bytes_total == manifest.nbytes
    assert (0, 1) in demands.consumer_sets


def test_encoder_layers_come_before_decoder_layers(checkpoint: Checkpoint) -> None:
    demands = build_demands(checkpoint("switch_transformers"), Parallel(pp=4))
    held = holders(demands)
    blocks = [f"{stack}.block.{number}" for stack in ("encoder", "decoder") for number in (0, 1)]
    assert [held[f"{block}.layer.0.SelfAttention.q.weight"] for block in blocks] == [{0}, {1}, {2}, {3}]
    assert held["shared.weight"] == {0, 1, 2, 3}
    assert demands.stage_of_layer == (0, 1, 2, 3)


def test_more_stages_than_layers_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(RequestError, match="pp=4 needs at least 4 layers, but the checkpoint has 3"):
        build_demands(checkpoint("llama"), Parallel(pp=4))


def test_a_rule_can_move_a_tensor_to_another_stage(checkpoint: Checkpoint) -> None:
    rules = [Rule(pattern="model.norm.weight", stage="all")]
    demands = build_demands(checkpoint("llama"), Parallel(pp=2), rules=rules)
    assert holders(demands)["model.norm.weight"] == {0, 1}


def test_layer_stage_of_a_tensor_of_no_layer_is_refused(checkpoint: Checkpoint) -> None:
    rules = [Rule(pattern="model.norm.weight", stage="layer")]
    with pytest.raises(RequestError, match=r"model\.norm\.weight: a rule puts it on the stage of its layer"):
        build_demands(checkpoint("llama"), Parallel(pp=2), rules=rules)


# Heads, experts, replication


def test_tp_that_does_not_divide_the_heads_names_both(checkpoint: Checkpoint) -> None:
    with pytest.raises(RequestError, match="tp=5 does not divide num_attention_heads=12.* tp may be 1, 2, 4, 12"):
        build_demands(checkpoint("llama"), Parallel(tp=5))


def test_tp_between_query_and_key_heads_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(RequestError, match="tp=3 does not divide num_key_value_heads=4 .* tp may be 1, 2, 4, 12"):
        build_demands(checkpoint("llama"), Parallel(tp=3))


def test_ep_without_experts_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(RequestError, match="ep=2, but no tensor of .* is split by experts"):
        build_demands(checkpoint("llama"), Parallel(tp=2, ep=2))


def test_expert_groups_fold_over_dp(checkpoint: Checkpoint) -> None:
    demands = build_demands(checkpoint("mixtral"), Parallel(dp=2, tp=2, ep=2))
    name = "model.layers.0.mlp.experts.down_proj"
    assert shapes(demands, name) == [(2, 96, 74)] * 4
    tensor = next(i for i, t in enumerate(demands.tensors) if t.name == name)
    consumers = {demands.consumer_sets[c] for c in demands.slices.consumers[demands.slices.tensor == tensor]}
    assert consumers == {(0, 1), (2, 3)}


def test_unknown_family_is_refused_over_tp_with_the_largest_tensors(checkpoint: Checkpoint) -> None:
    manifest = with_config(checkpoint("llama"), model_type="unheard_of")
    with pytest.raises(
        RequestError,
        match=r"tp=2: 100% .* more than the 30% allowed; largest: model\.embed_tokens\.weight \(.*allow_replication",
    ):
        build_demands(manifest, Parallel(tp=2))


def test_replication_can_be_allowed(checkpoint: Checkpoint) -> None:
    manifest = with_config(checkpoint("llama"), model_type="unheard_of")
    demands = build_demands(manifest, Parallel(tp=2), allow_replication=True)
    assert all(tensor.replicated and tensor.reason == "no rule" for tensor in demands.tensors)
    assert demands.consumer_sets == ((0, 1),)


def test_replication_that_the_users_rules_ask_for_does_not_count(checkpoint: Checkpoint) -> None:
    rules = [Rule(pattern="*", placement=Replicate())]
    assert build_demands(checkpoint("llama"), Parallel(tp=2), rules=rules).consumer_sets == ((0, 1),)


def test_fallback_rules_come_after_the_built_in_ones(checkpoint: Checkpoint) -> None:
    manifest = with_config(checkpoint("llama"), model_type="unheard_of")
    fallback = [Rule(pattern="*_proj.weight", placement=Shard(dim=0), origin="transformers")]
    demands = build_demands(manifest, Parallel(tp=2), fallback_rules=fallback, max_replicated_share=0.5)
    assert demands.tensors[[t.name for t in demands.tensors].index("model.layers.0.mlp.up_proj.weight")].reason == (
        "transformers: *_proj.weight"
    )
    built_in = build_demands(checkpoint("llama"), Parallel(tp=2), fallback_rules=fallback)
    assert not any(tensor.reason.startswith("transformers") for tensor in built_in.tensors)


def test_one_rank_needs_no_complete_configuration() -> None:
    manifest = manifest_of([weight("model.layers.0.self_attn.q_proj.weight", 4, 4)], {"model_type": "llama"})
    assert len(build_demands(manifest, Parallel()).tensors) == 1
    with pytest.raises(RequestError, match="lacks 'num_attention_heads'"):
        build_demands(manifest, Parallel(tp=2))


# Quantised layers


def linear(config: Mapping[str, object], *specs: Spec) -> Manifest:
    return manifest_of(specs, {"model_type": "llama", "num_attention_heads": 4, **config})


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
Q_PROJ = "model.layers.0.self_attn.q_proj"
O_PROJ = "model.layers.0.self_attn.o_proj"


def test_heads_that_block_scales_cannot_express_are_refused() -> None:
    manifest = linear(
        FP8,
        weight(f"{Q_PROJ}.weight", 256, 128, dtype=DType.F8_E4M3),
        weight(f"{Q_PROJ}.weight_scale_inv", 2, 1, dtype=DType.F32),
    )
    assert len(build_demands(manifest, Parallel(tp=2)).tensors) == 2
    with pytest.raises(
        RequestError, match=r"q_proj\.weight would be split at feature 64, which .*q_proj\.weight_scale_inv cannot"
    ):
        build_demands(manifest, Parallel(tp=4))


def test_a_users_rule_for_a_weight_is_rounded_to_what_its_scales_can_express() -> None:
    manifest = manifest_of(
        [weight("a.weight", 640, 8, dtype=DType.F8_E4M3), weight("a.weight_scale_inv", 5, 1, dtype=DType.F32)]
    )
    rules = [
        Rule(pattern="a.weight", placement=Shard(dim=0)),
        Rule(pattern="a.weight_scale_inv", placement=Shard(dim=0, features_per_index=128)),
    ]
    demands = build_demands(manifest, Parallel(tp=2), rules=rules)
    assert shapes(demands, "a.weight") == [(384, 8), (256, 8)]
    assert shapes(demands, "a.weight_scale_inv") == [(3, 1), (2, 1)]


def test_scales_without_a_rule_beside_a_split_weight_are_refused() -> None:
    manifest = manifest_of(
        [weight("a.weight", 640, 8, dtype=DType.F8_E4M3), weight("a.weight_scale_inv", 5, 1, dtype=DType.F32)]
    )
    with pytest.raises(RequestError, match=r"a\.weight is split over tp, but no rule says .*a\.weight_scale_inv"):
        build_demands(manifest, Parallel(tp=2), rules=[Rule(pattern="a.weight", placement=Shard(dim=0))])


def test_tensors_of_one_layer_with_different_boundaries_are_refused() -> None:
    manifest = manifest_of([weight("a.weight", 12, 8), weight("a.bias", 12)])
    rules = [
        Rule(pattern="a.weight", placement=Shard(dim=0, heads=Heads(count=2, setting="n"))),
        Rule(pattern="a.bias", placement=PackedShard(dim=0, sizes=(6, 6), blocks=(Shard(dim=0),) * 2)),
    ]
    with pytest.raises(RequestError, match=r"split a\.weight and a\.bias at different features"):
        build_demands(manifest, Parallel(tp=2), rules=rules)


def test_per_tensor_scale_is_whole_and_per_channel_scale_is_split() -> None:
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    one = linear(config, weight(f"{Q_PROJ}.weight", 8, 8, dtype=DType.F8_E4M3), weight(f"{Q_PROJ}.weight_scale", 1))
    many = linear(config, weight(f"{Q_PROJ}.weight", 8, 8, dtype=DType.F8_E4M3), weight(f"{Q_PROJ}.weight_scale", 8, 1))
    assert shapes(build_demands(one, Parallel(tp=2)), f"{Q_PROJ}.weight_scale") == [(1,), (1,)]
    assert shapes(build_demands(many, Parallel(tp=2)), f"{Q_PROJ}.weight_scale") == [(4, 1), (4, 1)]


def gptq(group_size: int, *, desc_act: bool) -> Manifest:
    groups = 1 if group_size < 0 else 64 // group_size
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": desc_act}
    return linear(
        {"quantization_config": scheme},
        weight(f"{O_PROJ}.qweight", 8, 16, dtype=DType.I32),
        weight(f"{O_PROJ}.qzeros", groups, 2, dtype=DType.I32),
        weight(f"{O_PROJ}.scales", groups, 16, dtype=DType.F16),
        weight(f"{O_PROJ}.g_idx", 64, dtype=DType.I32),
    )


def test_gptq_row_split_cuts_groups_with_their_rows() -> None:
    demands = build_demands(gptq(16, desc_act=False), Parallel(tp=2))
    found = {name: shapes(demands, f"{O_PROJ}.{name}")[0] for name in ("qweight", "qzeros", "scales", "g_idx")}
    assert found == {"qweight": (4, 16), "qzeros": (2, 2), "scales": (2, 16), "g_idx": (32,)}


def test_gptq_row_split_with_one_group_keeps_its_scales_whole() -> None:
    demands = build_demands(gptq(-1, desc_act=False), Parallel(tp=2), allow_replication=True)
    assert shapes(demands, f"{O_PROJ}.scales") == [(1, 16), (1, 16)]
    assert shapes(demands, f"{O_PROJ}.qweight") == [(4, 16), (4, 16)]


def test_gptq_row_split_with_scattered_groups_is_refused() -> None:
    assert build_demands(gptq(16, desc_act=True), Parallel()).tensors
    with pytest.raises(RequestError, match=r"o_proj\.g_idx: .* desc_act=true"):
        build_demands(gptq(16, desc_act=True), Parallel(tp=2))


def test_heads_inside_a_gptq_group_are_refused() -> None:
    with pytest.raises(
        RequestError, match=r"o_proj\.g_idx would be split at feature 16, which .*o_proj\.(qzeros|scales)"
    ):
        build_demands(gptq(32, desc_act=False), Parallel(tp=4))


@pytest.mark.parametrize(
    ("scheme", "named"),
    [({"quant_method": "bitsandbytes"}, "bitsandbytes"), ({"quant_method": "gptq", "bits": 3}, "gptq with bits=3")],
)
def test_schemes_that_cannot_be_split_are_refused_over_tp(scheme: Mapping[str, object], named: str) -> None:
    manifest = linear({"quantization_config": scheme}, weight(f"{Q_PROJ}.weight", 8, 8))
    assert build_demands(manifest, Parallel(dp=2)).tensors
    with pytest.raises(RequestError, match=f"quantised by '{named}'"):
        build_demands(manifest, Parallel(tp=2))


def test_split_inside_a_byte_is_refused_with_the_tensor() -> None:
    manifest = manifest_of([weight("a.weight", 6, 4, dtype=DType.F4)])
    rules = [Rule(pattern="a.weight", placement=Shard(dim=1, unit=1))]
    assert shapes(build_demands(manifest, Parallel(tp=2), rules=rules), "a.weight") == [(6, 2), (6, 2)]
    with pytest.raises(RequestError, match=r"a\.weight: its elements have 4 bits"):
        build_demands(manifest, Parallel(tp=4), rules=rules)


# Include


def test_include_takes_module_names_and_names_on_disk(checkpoint: Checkpoint) -> None:
    demands = build_demands(
        checkpoint("mixtral"), Parallel(tp=2), include=["*layers.0.*experts.2.w1.weight", "model.norm.*"]
    )
    assert sorted(t.name for t in demands.tensors) == ["model.layers.0.mlp.experts.gate_up_proj", "model.norm.weight"]


def test_include_finds_tied_names(checkpoint: Checkpoint) -> None:
    demands = build_demands(checkpoint("llama"), Parallel(), include=["lm_head.*"])
    assert [t.name for t in demands.tensors] == ["model.embed_tokens.weight"]


def test_include_that_matches_nothing_is_named(checkpoint: Checkpoint) -> None:
    with pytest.raises(RequestError, match=r"include='nope\.\*' matches no tensor"):
        build_demands(checkpoint("llama"), Parallel(), include=["model.*", "nope.*"])


# Invariants


def test_slices_are_sorted_by_place_in_the_files(checkpoint: Checkpoint) -> None:
    rows = build_demands(checkpoint("llama-kv12-untied-3files"), Parallel(tp=2)).slices
    places = list(zip(rows.file.tolist(), rows.src_offset.tolist(), strict=True))
    assert places == sorted(places)
    assert {file for file, _ in places} == {0, 1, 2}


def test_equal_input_gives_equal_demands(checkpoint: Checkpoint) -> None:
    first, second = (build_demands(checkpoint("deepseek_v3"), Parallel(tp=2, pp=2, dp=2)) for _ in range(2))
    for table in ("slices", "views"):
        one, other = getattr(first, table), getattr(second, table)
        assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__)
    assert first.consumer_sets == second.consumer_sets
    assert first.tensors == second.tensors


def test_empty_tensors_and_scalars_have_views() -> None:
    manifest = manifest_of([weight("a", 0, 4), weight("b"), weight("c", 3)])
    demands = build_demands(manifest, Parallel())
    assert [demands.shapes[shape] for shape in demands.views.shape] == [(0, 4), (), (3,)]
    assert demands.views.nbytes.tolist() == [0, 2, 6]
    assert len(demands.slices.file) == 2


@st.composite
def placements(draw: st.DrawFn) -> tuple[tuple[int, ...], Shard | PackedShard | ExpertShard | Replicate]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    dim = draw(st.integers(0, len(shape) - 1))
    shard = Shard(dim=dim, unit=draw(st.integers(1, 3)))
    first = draw(st.integers(0, shape[dim]))
    packed = PackedShard(dim=dim, sizes=(first, shape[dim] - first), blocks=(shard, shard))
    inner = draw(st.sampled_from([shard, packed, Replicate()]))
    return shape, draw(st.sampled_from([inner, ExpertShard(inner=inner)]))


@settings(deadline=None, max_examples=150)
@given(
    case=placements(),
    tp=st.integers(1, 5),
    dp=st.integers(1, 2),
    spread=st.booleans(),
    experts=st.integers(1, 3),
    fused=st.booleans(),
)
def test_distinct_slices_tile_every_tensor(
    case: tuple[tuple[int, ...], Shard | PackedShard | ExpertShard | Replicate],
    tp: int,
    dp: int,
    spread: bool,
    experts: int,
    fused: bool,
) -> None:
    """Every byte of the checkpoint is in exactly one distinct slice, also where experts are fused on the way."""
    shape, placement = case
    if fused and len(shape) > 1:
        disk = [
            weight(f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight", *shape)
            for e in range(experts)
            for w in ("w1", "w2", "w3")
        ]
        whole = (experts, 2 * shape[0], *shape[1:])
        pattern, config = "*gate_up_proj", {"model_type": "mixtral", "num_attention_heads": 1, "intermediate_size": 1}
        if isinstance(placement, ExpertShard):
            placement = placement.inner
        placement = _shifted(placement, whole)
    else:
        disk, pattern, config = [weight("a", *shape), weight("b", 3)], "a", {}
    manifest = manifest_of(disk, config)
    ep = dp * tp if spread and isinstance(placement, ExpertShard) else 1
    rules = [Rule(pattern=pattern, placement=placement), Rule(pattern="*", placement=Replicate())]
    rows = build_demands(manifest, Parallel(tp=tp, dp=dp, ep=ep), rules=rules).slices
    columns = np.stack([rows.src_offset, rows.run_bytes, rows.num_runs, rows.src_stride_bytes], axis=1)
    covered = np.zeros(manifest.files[0].size_bytes, dtype=np.int64)
    for begin, run, count, step in np.unique(columns, axis=0).tolist():
        for at in range(count):
            covered[begin + at * step : begin + at * step + run] += 1
    assert covered[:100].sum() == 0
    assert (covered[100:] == 1).all()


def _shifted(placement: Shard | PackedShard | Replicate, whole: tuple[int, ...]) -> ExpertShard:
    """The placement of one expert's tensor as one of the fused tensor, whose dim 1 is twice as long."""
    if isinstance(placement, Shard):
        return ExpertShard(inner=dataclasses.replace(placement, dim=placement.dim + 1))
    if isinstance(placement, PackedShard):
        sizes = placement.sizes if placement.dim else (sum(placement.sizes),) * 2
        return ExpertShard(inner=dataclasses.replace(placement, dim=placement.dim + 1, sizes=sizes))
    return ExpertShard(inner=placement)
