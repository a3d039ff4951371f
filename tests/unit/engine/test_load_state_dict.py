from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import megamind_ray as mm
from megamind_ray.config import Config
from megamind_ray.engine.state_dict import load_tensors
from megamind_ray.testing.checkpoints import llama_checkpoint


def test_a_folder_of_several_files_gives_all_their_tensors(tmp_path: Path) -> None:
    folder = llama_checkpoint(tmp_path, tied=False, num_files=3)
    expected: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        expected |= mm.load_file(file)

    loaded = mm.load_state_dict(folder)

    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_tied_name_is_there_as_the_same_tensor(tmp_path: Path) -> None:
    loaded = mm.load_state_dict(llama_checkpoint(tmp_path, tied=True))

    assert loaded["lm_head.weight"] is loaded["model.embed_tokens.weight"]


def test_the_tied_name_alone_reads_the_tensor_that_it_is_tied_to(tmp_path: Path) -> None:
    loaded = mm.load_state_dict(llama_checkpoint(tmp_path, tied=True), include="lm_head.weight")

    assert list(loaded) == ["lm_head.weight"]


def test_only_included_tensors_are_read(llama: Any, config: Config) -> None:
    manifest = mm.inspect(llama.path)
    infos = [info for name, info in manifest.tensors.items() if ".layers.1." in name]

    loaded = load_tensors(manifest, infos, "cpu", config)

    nbytes = sum(info.nbytes for info in infos)
    assert nbytes <= loaded.summary.totals.payload_bytes <= nbytes + 2 * config.io.max_gap_bytes
    assert all(torch.equal(loaded.tensors[info.name], llama.tensors[info.name]) for info in infos)


def test_several_globs_add_up(llama: Any) -> None:
    loaded = mm.load_state_dict(llama.path, include=["model.layers.0.mlp.*", "model.norm.weight"])

    assert sorted(loaded) == [
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    assert all(torch.equal(tensor, llama.tensors[name]) for name, tensor in loaded.items())


def test_a_glob_that_matches_nothing_is_named(llama: Any) -> None:
    with pytest.raises(mm.RequestError, match=r"include='model\.layer\.\*' matches no tensor of .*inspect"):
        mm.load_state_dict(llama.path, include="model.layer.*")


def test_what_is_left_out_takes_no_memory_between_the_others(tmp_path: Path, write_raw: Callable[..., Path]) -> None:
    sizes = {"first": 100, "left out": 1 << 20, "last": 100}
    path = write_raw(tmp_path / "w.safetensors", {name: ("U8", [size], bytes(size)) for name, size in sizes.items()})

    loaded = mm.load_state_dict(path, include=["first", "last"])

    assert 0 < loaded["last"].data_ptr() - loaded["first"].data_ptr() < 256


def test_included_tensors_with_a_sidecar_are_verified(
    llama: Any, tmp_path: Path, record: Callable[[Path], Any], config: Config
) -> None:
    manifest = record(Path(shutil.copytree(llama.path, tmp_path / "llama")))
    info = manifest.tensors["model.layers.1.mlp.up_proj.weight"]

    loaded = load_tensors(manifest, [info], "cpu", config)

    assert loaded.summary.verified == "reference"
    assert torch.equal(loaded.tensors[info.name], llama.tensors[info.name])


def test_any_file_system_of_fsspec_works(llama: Any) -> None:
    memory = fsspec.filesystem("memory")
    for file in llama.path.iterdir():
        memory.pipe_file(f"/models/llama/{file.name}", file.read_bytes())
    try:
        loaded = mm.load_state_dict("memory://models/llama")
    finally:
        memory.rm("/models", recursive=True)

    assert loaded.keys() == llama.tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in llama.tensors.items())
