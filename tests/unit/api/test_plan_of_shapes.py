"""``mm.plan(..., shapes=True)``: a model's configuration in place of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

import megamind_ray as mm
from megamind_ray.testing.checkpoints import llama_checkpoint

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_folder_with_a_configuration_alone_is_planned(folder: Path) -> None:
    plan = mm.plan(folder, mm.Parallel(tp=2), shapes=True)

    assert (plan.uri, plan.bytes_total) == (str(folder), 2 * (2 * 6400 + 2 * (4 * 4096 + 3 * 6144 + 128) + 64))


def test_the_configuration_itself_can_be_named(folder: Path) -> None:
    assert mm.plan(folder / "config.json", shapes=True).bytes_total == mm.plan(folder, shapes=True).bytes_total


def test_shapes_plan_as_the_checkpoint_does(tmp_path: Path) -> None:
    checkpoint = llama_checkpoint(tmp_path / "llama")

    of_shapes, of_files = (mm.plan(checkpoint, mm.Parallel(tp=2, pp=2), shapes=shapes) for shapes in (True, False))

    assert of_shapes.bytes_to_device == of_files.bytes_to_device
    assert of_shapes.bytes_from_storage == of_files.bytes_from_storage


def test_a_configuration_in_remote_storage_is_read() -> None:
    filesystem: Any = fsspec.filesystem("memory")
    filesystem.pipe_file("/of_shapes/config.json", json.dumps(LLAMA).encode())

    assert mm.plan("memory://of_shapes", shapes=True).bytes_total > 0


def test_a_ready_model_is_planned_by_name() -> None:
    plan = mm.plan("gpt-oss-20b", mm.Parallel(tp=2), shapes=True)

    assert (plan.uri, plan.bytes_total) == ("gpt-oss-20b", 13_761_264_768)


def test_a_folder_goes_before_a_ready_model_of_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "llama-3-8b").mkdir()
    (folder / "llama-3-8b" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(folder)

    assert mm.plan("llama-3-8b", shapes=True).bytes_total < 1 << 20


def test_671_billion_parameters_fit_eight_gpus_of_80_gib_in_four_bits_and_not_in_eight() -> None:
    plan = mm.plan("deepseek-v3", mm.Parallel(tp=8), shapes=True, weights="int4")
    assert 40e9 < plan.bytes_to_device / 8 < 60e9

    with pytest.raises(mm.CapacityError):
        mm.plan("deepseek-v3", mm.Parallel(tp=8), shapes=True, weights="fp8")


def test_weights_of_a_checkpoint_cannot_be_chosen(folder: Path) -> None:
    with pytest.raises(mm.RequestError, match="weights='int4': the weights of a checkpoint are stored as they are"):
        mm.plan(folder, weights="int4")


def test_shapes_have_no_checksums(folder: Path) -> None:
    with pytest.raises(mm.RequestError, match="sidecar=True: shapes have no bytes"):
        mm.plan(folder, shapes=True, sidecar=True)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mm.RequestError, match=r"has no config\.json.*deepseek-v3"):
        mm.plan(tmp_path, shapes=True)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": NaN', "[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"])
def test_a_configuration_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(mm.RequestError, match=r"config\.json: (not valid JSON|must be a JSON object)"):
        mm.plan(tmp_path, shapes=True)
