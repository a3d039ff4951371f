"""The ready configurations, against what is published about these models."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from benchmarks.deepseek_shape import CONFIG, tensors
from megamind_ray.core.manifest import Manifest
from megamind_ray.errors import RequestError
from megamind_ray.planning.shapes import ready_config, ready_names, shape_manifest


@dataclass(frozen=True)
class Published:
    """Parameters of the model, and tensors and bytes (headers apart) of its checkpoint on the hub."""

    num_parameters: int
    num_tensors: int
    num_bytes: int


PUBLISHED = {
    "llama-3-8b": Published(8_030_261_248, 291, 16_060_522_496),
    "llama-3-70b": Published(70_553_706_496, 723, 141_107_412_992),
    "qwen3-8b": Published(8_190_735_360, 399, 16_381_470_720),
    "qwen3-30b-a3b": Published(30_532_122_624, 18_867, 61_064_245_248),
    "mixtral-8x7b": Published(46_702_792_704, 995, 93_405_585_408),
    "gpt-oss-20b": Published(20_914_757_184, 459, 13_761_264_768),
    "gpt-oss-120b": Published(116_829_156_672, 687, 65_248_815_744),
}


def ready_manifest(name: str, weights: str | None = None) -> Manifest:
    return shape_manifest(ready_config(name), weights=weights, uri=name)


def test_every_ready_configuration_is_held_to_something_published() -> None:
    assert set(ready_names()) == {*PUBLISHED, "deepseek-v3"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_plain_model_has_the_published_number_of_parameters(name: str) -> None:
    assert ready_manifest(name, "bf16").num_parameters == PUBLISHED[name].num_parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_checkpoint_has_the_published_tensors_and_bytes(name: str) -> None:
    manifest = ready_manifest(name)

    assert (len(manifest.tensors), manifest.nbytes) == (PUBLISHED[name].num_tensors, PUBLISHED[name].num_bytes)


def test_llama_3_8b_has_the_published_files_to_the_byte() -> None:
    files = ready_manifest("llama-3-8b").files

    assert [(file.path, file.size_bytes) for file in files] == [
        ("model-00001-of-00004.safetensors", 4_976_698_672),
        ("model-00002-of-00004.safetensors", 4_999_802_720),
        ("model-00003-of-00004.safetensors", 4_915_916_176),
        ("model-00004-of-00004.safetensors", 1_168_138_808),
    ]


@pytest.mark.parametrize(("name", "num_files"), [("llama-3-70b", 30), ("mixtral-8x7b", 19)])
def test_large_models_have_the_published_number_of_files(name: str, num_files: int) -> None:
    assert len(ready_manifest(name).files) == num_files


def test_deepseek_v3_has_the_published_elements_of_each_dtype() -> None:
    elements = Counter[str]()
    for tensor in ready_manifest("deepseek-v3").tensors.values():
        elements[tensor.dtype.label] += tensor.num_elements

    assert elements == {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 41_555_600}


def test_deepseek_v3_has_the_published_parameters_without_its_extra_layer() -> None:
    manifest = ready_manifest("deepseek-v3", "bf16")
    main = [tensor for name, tensor in manifest.tensors.items() if not name.startswith("model.layers.61.")]

    assert sum(tensor.num_elements for tensor in main) == 671_026_419_200


def test_deepseek_v3_is_tensor_by_tensor_that_of_the_benchmark() -> None:
    ours = ready_manifest("deepseek-v3").tensors.values()
    theirs = list(tensors())

    assert len(theirs) == 91_991
    assert sorted((tensor.name, tensor.dtype.label, tensor.shape) for tensor in ours) == sorted(theirs)
    assert ready_config("deepseek-v3") == CONFIG | {"attention_bias": False}


def test_four_bits_for_each_weight_of_deepseek_v3_are_a_quarter_of_sixteen() -> None:
    packed, plain = ready_manifest("deepseek-v3", "int4"), ready_manifest("deepseek-v3", "bf16")

    assert 0.25 < packed.nbytes / plain.nbytes < 0.27


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"'llama-9': no such folder.*deepseek-v3.*qwen3-8b"):
        ready_config("llama-9")
