"""Which tensors a layer has in each format, and what the configuration's own scheme changes."""

from __future__ import annotations

from typing import Any

import pytest

from megamind_ray.core.manifest import Manifest
from megamind_ray.errors import RequestError
from megamind_ray.planning.shapes import shape_manifest

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "torch_dtype": "float16",
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_local_experts": 3,
    "vocab_size": 100,
}
DOWN = "model.layers.0.mlp.down_proj"


def packed(weights: dict[str, Any] | None = None, **scheme: Any) -> dict[str, Any]:
    """A configuration as llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 64, "symmetric": True, **(weights or {})}}
    own = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {**LLAMA, "quantization_config": {**own, **scheme}}


def layer(manifest: Manifest, name: str = DOWN) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        tensor.name.removeprefix(f"{name}."): (tensor.dtype.label, tensor.shape)
        for tensor in manifest.tensors.values()
        if tensor.name.startswith(f"{name}.")
    }


def test_plain_weights_have_the_dtype_of_the_configuration() -> None:
    assert layer(shape_manifest(LLAMA, uri="x")) == {"weight": ("F16", (256, 384))}


def test_without_a_dtype_weights_are_bfloat16() -> None:
    plain = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}

    assert layer(shape_manifest(plain, uri="x")) == {"weight": ("BF16", (256, 384))}


def test_fp8_has_a_scale_for_each_block() -> None:
    manifest = shape_manifest({**LLAMA, "intermediate_size": 385}, weights="fp8", uri="x")

    assert layer(manifest) == {"weight": ("F8_E4M3", (256, 385)), "weight_scale_inv": ("F32", (2, 4))}


def test_int4_has_a_scale_for_each_group_of_128() -> None:
    assert layer(shape_manifest(LLAMA, weights="int4", uri="x")) == {
        "weight_packed": ("I32", (256, 48)),
        "weight_scale": ("F16", (256, 3)),
        "weight_shape": ("I64", (2,)),
    }


def test_mxfp4_has_16_bytes_and_a_scale_for_32_values() -> None:
    experts = layer(shape_manifest(GPT_OSS, weights="mxfp4", uri="x"), "model.layers.0.mlp.experts")

    assert experts == {
        "gate_up_proj_blocks": ("U8", (3, 192, 2, 16)),
        "gate_up_proj_scales": ("U8", (3, 192, 2)),
        "gate_up_proj_bias": ("BF16", (3, 192)),
        "down_proj_blocks": ("U8", (3, 64, 3, 16)),
        "down_proj_scales": ("U8", (3, 64, 3)),
        "down_proj_bias": ("BF16", (3, 64)),
    }


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_embedding_norms_and_head_stay_plain(weights: str) -> None:
    manifest = shape_manifest(LLAMA, weights=weights, uri="x")

    names = ["model.embed_tokens", "model.norm", "model.layers.0.input_layernorm", "lm_head"]
    assert [list(layer(manifest, name)) for name in names] == [["weight"]] * 4


def test_the_scheme_of_the_configuration_is_the_default() -> None:
    assert layer(shape_manifest(packed(), uri="x"))["weight_scale"] == ("F16", (256, 6))


def test_the_scheme_of_the_configuration_is_taken_where_the_same_kind_is_asked_for() -> None:
    manifest = shape_manifest(packed(), weights="int4", uri="x")

    assert manifest.config["quantization_config"] == packed()["quantization_config"]
    assert layer(manifest)["weight_scale"] == ("F16", (256, 6))


def test_another_format_goes_before_the_scheme_of_the_configuration() -> None:
    manifest = shape_manifest(packed(), weights="fp8", uri="x")

    assert manifest.config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }


def test_plain_weights_of_a_quantised_model_have_no_scheme() -> None:
    manifest = shape_manifest(packed(), weights="bf16", uri="x")

    assert "quantization_config" not in manifest.config
    assert layer(manifest) == {"weight": ("BF16", (256, 384))}


def test_packed_integers_of_eight_bits_are_four_to_an_int32() -> None:
    manifest = shape_manifest(packed({"num_bits": 8}), uri="x")

    assert layer(manifest)["weight_packed"] == ("I32", (256, 96))


def test_asymmetric_integers_have_packed_zero_points() -> None:
    manifest = shape_manifest(packed({"symmetric": False}), uri="x")

    assert layer(manifest)["weight_zero_point"] == ("I32", (32, 6))


def test_one_scale_a_row_without_groups() -> None:
    manifest = shape_manifest(packed({"group_size": None, "strategy": "channel"}), uri="x")

    assert layer(manifest)["weight_scale"] == ("F16", (256, 1))


@pytest.mark.parametrize("pattern", [DOWN, "model.layers.0", "down_proj", "re:.*down_proj$", "model.layers.*.mlp"])
def test_layers_that_the_scheme_ignores_stay_plain(pattern: str) -> None:
    assert list(layer(shape_manifest(packed(ignore=["lm_head", pattern]), uri="x"))) == ["weight"]


def test_layers_that_the_scheme_does_not_name_are_packed() -> None:
    manifest = shape_manifest(packed(ignore=["model.layers.1", "re:.*gate_proj"]), uri="x")

    assert "weight_packed" in layer(manifest)


def test_only_targets_of_the_scheme_are_packed() -> None:
    scheme = packed()
    scheme["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*down_proj"]
    manifest = shape_manifest(scheme, uri="x")

    assert "weight_packed" in layer(manifest)
    assert list(layer(manifest, "model.layers.0.mlp.up_proj")) == ["weight"]


def test_features_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(RequestError, match=r"mlp\.down_proj: its 200 in features are no multiple of the group of 128"):
        shape_manifest({**LLAMA, "intermediate_size": 200}, weights="int4", uri="x")


@pytest.mark.parametrize(("config", "weights"), [(GPT_OSS, "int4"), (GPT_OSS, "fp8"), (LLAMA, "mxfp4")])
def test_a_format_that_the_family_does_not_come_in_is_refused(config: dict[str, Any], weights: str) -> None:
    with pytest.raises(RequestError, match=f"weights='{weights}', for which no layout .* take weights from bf16"):
        shape_manifest(config, weights=weights, uri="x")


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(RequestError, match="weights='int3': not known; take one of bf16, fp8, int4, mxfp4"):
        shape_manifest(LLAMA, weights="int3", uri="x")


@pytest.mark.parametrize(
    "scheme",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ],
)
def test_a_scheme_without_a_known_layout_is_refused_unless_another_format_is_asked_for(scheme: dict[str, Any]) -> None:
    config = {**LLAMA, "quantization_config": scheme}

    with pytest.raises(RequestError, match="quantization_config is of the kind .* give the checkpoint itself"):
        shape_manifest(config, uri="x")
    assert layer(shape_manifest(config, weights="bf16", uri="x")) == {"weight": ("BF16", (256, 384))}


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("fp8", "quantization_config='fp8'; it must be an object"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups=None"),
        (packed(ignore="lm_head")["quantization_config"], "ignore='lm_head'; it must be a list of names"),
        (packed(ignore=["re:("])["quantization_config"], "the pattern"),
        (packed({"group_size": "all"})["quantization_config"], "group_size='all'; it must be a number"),
    ],
)
def test_a_scheme_that_cannot_be_understood_is_refused(scheme: object, message: str) -> None:
    with pytest.raises(RequestError, match=f"config.json: .*{message}"):
        shape_manifest({**LLAMA, "quantization_config": scheme}, uri="x")
