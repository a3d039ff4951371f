"""Names and shapes in the module, against the models of transformers on the meta device."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from megamind_ray.core.parallel import Parallel
from megamind_ray.io import open_manifest
from megamind_ray.planning.demands import build_demands
from megamind_ray.planning.naming import FUSED_FAMILIES
from megamind_ray.testing.checkpoints import CHECKPOINTS

Shapes = dict[str, tuple[int, ...]]
# Formats whose modules come from kernels that are not installed: what stands for a layer's weight, or an expert's.
PACKED = {
    "gptq": r"(\.qweight|\.qzeros|\.scales|\.g_idx)$",
    "awq": r"(\.qweight|\.qzeros|\.scales)$",
    "mxfp4": r"(?<=_proj)(_blocks|_scales)$",
}


def module_shapes(folder: Path) -> Shapes:
    """What a single rank holds, tied names included."""
    demands = build_demands(open_manifest(folder), Parallel())
    views = demands.views
    return {
        demands.names[name]: demands.shapes[shape]
        for name, shape in zip(views.name.tolist(), views.shape.tolist(), strict=True)
    }


def model_of(folder: Path) -> Any:
    """The model that config.json names, its layers replaced where FP8 asks for it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    scheme = getattr(config, "quantization_config", None)
    if scheme is not None:
        del config.quantization_config
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])._from_config(config)
    if scheme is not None and scheme["quant_method"] == "fp8":
        quantizer = AutoHfQuantizer.from_config(AutoQuantizationConfig.from_dict(dict(scheme)), pre_quantized=True)
        quantizer._process_model_before_weight_loading(model)
    return model


def without_a_place(model: Any, names: Iterable[str]) -> set[str]:
    """What transformers passes over: buffers of old releases, and layers that predict further tokens."""
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    extra_layer = f"model.layers.{model.config.num_hidden_layers}."
    return {name for name in names if name.startswith(extra_layer) or any(pattern.search(name) for pattern in patterns)}


def with_plain_weights(names: Iterable[str], method: str) -> set[str]:
    """The names, one in place of all packed tensors of a layer."""
    suffix = "" if method == "mxfp4" else ".weight"
    return {re.sub(PACKED[method], suffix, name) for name in names}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_module_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = CHECKPOINTS[name](tmp_path / name)
    ours, model = module_shapes(folder), model_of(folder)
    theirs = {key: tuple(value.shape) for key, value in model.state_dict().items()}

    extra = without_a_place(model, ours.keys() - theirs.keys())
    assert bool(extra) == name.startswith(("deepseek_v3", "gpt2"))
    ours = {key: shape for key, shape in ours.items() if key not in extra}

    scheme = open_manifest(folder).config.get("quantization_config")
    method = scheme["quant_method"] if isinstance(scheme, dict) else "none"
    if method not in PACKED:
        assert ours == theirs
    else:
        assert with_plain_weights(ours, method) == theirs.keys()
        common = ours.keys() & theirs.keys()
        assert {key: ours[key] for key in common} == {key: theirs[key] for key in common}


def fuses_experts(model_type: str) -> bool:
    """Whether transformers stacks the experts of a checkpoint as planning does."""
    found = get_checkpoint_conversion_mapping(model_type) or []
    converters = [item for item in found if isinstance(item, WeightConverter)]
    both = [item for item in converters if "experts.gate_up_proj" in item.target_patterns[0]]
    return len(both) == 1 and [type(step) for step in both[0].operations] == [MergeModulelist, Concatenate]


@pytest.mark.parametrize("model_type", sorted(FUSED_FAMILIES))
def test_families_that_are_fused_here_are_fused_by_transformers(model_type: str) -> None:
    assert fuses_experts(model_type)
