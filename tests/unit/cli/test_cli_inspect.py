from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megamind_ray.testing.fault_server import Answer, FaultServer


def test_a_checkpoint_is_summed_up(megamind: Any, checkpoint: Path) -> None:
    result = megamind("inspect", checkpoint)

    assert result.code == 0
    assert "12 in 1 file" in result.stdout
    assert "F16" in result.stdout
    assert result.stderr == ""


def test_lines_in_a_pipe_have_no_padding(megamind: Any, checkpoint: Path) -> None:
    lines = megamind("inspect", checkpoint).stdout.splitlines()

    assert lines == [line.rstrip() for line in lines]


def test_the_document_has_the_counts(megamind: Any, checkpoint: Path) -> None:
    document = megamind("inspect", checkpoint, "--json").document

    assert document["num_tensors"] == 12
    assert document["num_bytes"] == 2 * document["num_parameters"]
    assert document["dtypes"][0]["dtype"] == "F16"
    assert document["model_type"] == "llama"
    assert document["reference"] is None


def test_tensors_are_listed_on_demand(megamind: Any, checkpoint: Path) -> None:
    plain = megamind("inspect", checkpoint, "--json").document
    listed = megamind("inspect", checkpoint, "--json", "--tensors").document

    assert "tensors" not in plain
    shapes = {tensor["name"]: tensor["shape"] for tensor in listed["tensors"]}
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [16, 32]


def test_people_get_a_line_for_each_tensor(megamind: Any, checkpoint: Path) -> None:
    lines = megamind("inspect", checkpoint, "--tensors").stdout.splitlines()

    (line,) = [line for line in lines if line.startswith("model.layers.0.self_attn.k_proj.weight ")]
    assert line.split()[1:] == ["F16", "[16,", "32]", "1,024", "model.safetensors"]


def test_a_recording_shows(megamind: Any, checkpoint: Path) -> None:
    megamind("verify", "--record", checkpoint)

    reference = megamind("inspect", checkpoint, "--json").document["reference"]

    assert reference["origin"].endswith("megamind-checksums.json")
    assert reference["num_chunks"] == 1


def test_a_configuration_file_is_used(megamind: Any, tmp_path: Path) -> None:
    (tmp_path / "megamind.toml").write_text("[retry]\nattempts = 2\nfirst_wait_s = 0\n")
    with FaultServer(lambda _request: Answer(503, {})) as server:
        result = megamind("inspect", f"{server.uri}/w.safetensors", "--config", tmp_path / "megamind.toml")

    assert result.code == 1
    assert "failed 2 times" in result.stderr


def test_a_configuration_file_that_is_wrong_is_refused(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "megamind.toml").write_text("[io]\nchunks = 1\n")

    result = megamind("inspect", checkpoint, "--config", tmp_path / "megamind.toml")

    assert result.code == 2
    assert "no setting io.chunks" in result.stderr


def test_a_narrow_terminal_shows_every_column_and_number(
    megamind: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megamind_ray.cli.output._PIPE_COLUMNS", 30)

    shown, planned = megamind("inspect", checkpoint).stdout, megamind("plan", checkpoint, "--tp", "2").stdout

    assert "…" not in shown + planned
    assert max(map(len, (shown + planned).splitlines())) <= 30
    assert "dtype: F16" in shown
    assert "arena: " in planned
