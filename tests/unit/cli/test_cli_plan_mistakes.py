"""What `megamind plan` and `topology` say to absurd hardware, contradicting cases, and names that are not text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megamind_ray.core.plan import Plan

LLAMA = ("plan", "llama-3-8b", "--shapes")
SLOW = """
schema = "megamind.topology/1"
[[nodes]]
name = "n0"
memory = "512GiB"
pool = "400GiB"
[[nodes.gpus]]
memory = "80GiB"
[[nodes.disks]]
name = "floppy"
rate = "1B/s"
"""
# What a file name that is not UTF-8 becomes in an argument.
NOT_TEXT = os.fsdecode(b"caf\xe9")


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    path = tmp_path / "slow.toml"
    path.write_text(SLOW)
    return path


def test_hardware_on_which_a_load_would_be_given_up_is_a_wrong_request(megamind: Any, slow: Path) -> None:
    result = megamind(*LLAMA, "--topology", slow, "--json")

    assert result.code == 2
    message = result.document["error"]["message"]
    assert "would be given up" in message
    assert "correct its rates" in message


def test_such_hardware_is_a_row_of_a_comparison(megamind: Any, slow: Path) -> None:
    result = megamind(*LLAMA, "--topology", "hgx-h100", "--compare", f"topology={slow}", "--json")

    assert result.code == 0, result.stderr
    fits = [case["fits"] for case in result.document["cases"]]
    assert fits == [True, False]
    assert "would be given up" in result.document["cases"][1]["problem"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--sweep", ""), "axes are tp, pp, dp, ep"),
        (("--sweep", "tp,tp"), "an axis is there twice"),
        (("--compare", "tp=2,tp=4"), "tp is there twice"),
        (("--compare", "tp=1000000000"), "a mesh has at most 16384"),
    ],
)
def test_a_case_that_cannot_be_meant_is_refused(megamind: Any, arguments: tuple[str, str], complaint: str) -> None:
    result = megamind(*LLAMA, *arguments, "--json")

    assert result.code == 2
    assert complaint in result.document["error"]["message"]


def test_a_configuration_that_is_not_there_is_named(megamind: Any, tmp_path: Path) -> None:
    result = megamind("plan", "--config", tmp_path / "missing", "--json")

    assert result.code == 2
    assert "missing: there is no such file or folder" in result.document["error"]["message"]


def test_a_tensor_whose_name_is_not_text_is_not_in_the_plan(megamind: Any) -> None:
    result = megamind(*LLAMA, "--explain", NOT_TEXT, "--json")

    assert result.code == 2
    assert "the plan has no tensor" in result.document["error"]["message"]


def test_a_plan_is_saved_to_a_folder_whose_name_is_not_text(megamind: Any, tmp_path: Path) -> None:
    result = megamind(*LLAMA, "--save", tmp_path / NOT_TEXT, "--json")

    assert result.code == 0, result.stderr
    assert Plan.load(tmp_path / NOT_TEXT).bytes_total == result.document["bytes_total"]


def test_a_machine_with_more_gpus_than_any_has_is_not_measured(megamind: Any) -> None:
    result = megamind("topology", "--gpus", "1000000000", "--json")

    assert result.code == 2
    assert "--gpus" in result.document["error"]["message"]


def test_names_that_no_rule_knows_are_the_reason_and_not_the_family(megamind: Any, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = {name.replace("mlp.up_proj", "mlp.up"): value for name, value in load_file(file).items()}
    save_file({**tensors, "model.layers.0.mlp.big": np.ones((256, 512), np.float16)}, file)

    message = megamind("plan", checkpoint, "--tp", "2", "--json").document["error"]["message"]

    assert "there are no built-in rules" not in message
    assert "; no built-in rule for model_type='llama' matches the names of these tensors" in message
    assert "allow_replication=True (--allow-replication)" in message


def test_a_tied_name_is_among_the_nearest(megamind: Any, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name != "lm_head.weight"}, file)
    settings = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(
        json.dumps({**settings, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True})
    )

    assert megamind("plan", checkpoint, "--explain", "lm_head.weight").code == 0
    assert "nearest names are lm_head.weight" in megamind("plan", checkpoint, "--explain", "lm_head.weigh").stderr
    assert "error" in megamind("plan", checkpoint, "--explain", "lm_head.weigh", "--json").document


@pytest.mark.parametrize("command", ["inspect", "plan", "load", "verify", "unload", "drain"])
def test_what_is_missing_is_said(megamind: Any, command: str) -> None:
    result = megamind(command)

    assert (result.code, result.stdout) == (2, "")
    assert "missing argument" in result.stderr.lower()
