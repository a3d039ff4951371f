"""Arguments of another kind than they should be: each is refused, with what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import megamind_ray as mm


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(4), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


ARGUMENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "arena as text": (lambda file: mm.load_file(file, arena="4MiB"), r"arena=mm.Arena\('4MiB'\)"),
    "arena as a number": (lambda file: mm.load_state_dict(file, arena=4096), r"arena=mm.Arena\(4096\)"),
    "settings as a dict": (
        lambda file: mm.load_state_dict(file, config={"io": {}}),
        r"load_config\(overrides={'io': {}}\)",
    ),
    "settings as a path": (lambda file: mm.inspect(file, config="a.toml"), r"config=mm.load_config\("),
    "settings of a plan": (lambda file: mm.plan(file, config={}), r"config=mm.load_config\("),
    "settings of a module load": (lambda file: mm.load_into(torch.nn.ReLU(), file, config={}), r"mm.load_config\("),
    "settings of a connection": (lambda _: mm.connect("local", config={}), r"config=mm.load_config\("),
    "a mesh as a number": (lambda file: mm.plan(file, 2), r"parallel=mm.Parallel\(tp=2\)"),
    "a dict as the module": (lambda file: mm.load_into({}, file), "is of type dict; give a torch.nn.Module"),
    "swapped arguments": (lambda file: mm.load_into(str(file), torch.nn.ReLU()), r"load_into\(module, uri\)"),
    "a module as the file": (lambda _: mm.load_file(torch.nn.ReLU()), "of type ReLU, names no checkpoint"),
    "no file": (lambda _: mm.load_file(None), "None, of type NoneType, names no checkpoint; give a path"),
    "bytes as a name": (lambda _: mm.load_file(b"x.safetensors"), "of type bytes, names no checkpoint"),
    "a number as a name": (lambda _: mm.inspect(7), "7, of type int, names no checkpoint"),
    "a number as the sidecar": (lambda file: mm.inspect(file, sidecar=7), "7, of type int, names no"),
    "a number as a glob": (lambda file: mm.load_state_dict(file, include=5), "include=5: give a glob"),
    "numbers as globs": (lambda file: mm.load_state_dict(file, include=["a", 5]), "include=.* give a glob"),
    "bytes as a glob": (lambda file: mm.load_state_dict(file, include=b"a"), "include=b'a': give a glob"),
    "no glob": (lambda file: mm.load_state_dict(file, include=[]), r"include=\[\]: give a glob"),
    "an empty glob": (lambda file: mm.load_state_dict(file, include=""), "matches no tensor"),
    "an empty device": (lambda file: mm.load_file(file, device=""), "device='': give 'cpu'"),
    "a flag as the device": (lambda file: mm.load_file(file, device=False), "device=False: give 'cpu'"),
    "a list as the device": (lambda file: mm.load_state_dict(file, device=["cpu"]), r"device=\['cpu'\]: give 'cpu'"),
    "a device of an arena": (lambda _: mm.Arena("1MiB", device=""), "device='': give 'cpu'"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_wrong_argument_says_what_to_give(file: Path, case: str) -> None:
    call, words = ARGUMENTS[case]

    with pytest.raises(mm.RequestError, match=words):
        call(file)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", [0, torch.device("cuda", 0), "cuda:0"])
def test_an_index_is_a_cuda_device_and_not_the_host(file: Path, device: Any) -> None:
    for load in (mm.load_file, mm.load_state_dict):
        with pytest.raises(mm.RequestError, match="device 'cuda:0' cannot be used"):
            load(file, device=device)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_the_host_is_named_in_every_way_of_torch(file: Path, device: Any) -> None:
    assert mm.load_file(file, device=device)["a"].device.type == "cpu"


@pytest.mark.parametrize("include", ["a", ["a"], ("a",), {"a"}, iter(["a"])])
def test_globs_may_come_in_anything_that_can_be_gone_through(file: Path, include: Any) -> None:
    assert list(mm.load_state_dict(file, include=include)) == ["a"]


def test_a_name_of_the_hub_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(mm.RequestError, match="give hf://meta-llama/Llama-3.1-8b for the model of that name"):
        mm.load_state_dict("meta-llama/Llama-3.1-8b")
    for path in ("./models/llama", "a/b/c", "model.safetensors", "/models/llama", "../llama"):
        with pytest.raises(mm.RequestError, match="check the path of the checkpoint$"):
            mm.load_state_dict(path)
