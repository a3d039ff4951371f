"""``megamind plan`` without a checkpoint: by a model's name, or the folder of its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 128,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_a_model_is_planned_by_its_name(megamind: Any) -> None:
    result = megamind("plan", "llama-3-8b", "--shapes", "--tp", "8", "--json")

    assert result.code == 0, result.stderr
    assert (result.document["bytes_total"], result.document["shapes"]) == (16_060_522_496, True)


def test_people_are_told_that_no_checkpoint_was_opened(megamind: Any, model: Path) -> None:
    assert "no checkpoint was opened" in megamind("plan", model, "--shapes").stdout


def test_the_format_of_the_weights_can_be_chosen(megamind: Any, model: Path) -> None:
    plain, packed = (
        megamind("plan", model, "--shapes", "--weights", weights, "--json").document["bytes_total"]
        for weights in ("bf16", "int4")
    )

    assert packed < plain


@pytest.mark.parametrize("name", [".", "config.json"])
def test_config_names_a_model_where_there_is_no_checkpoint(name: str, megamind: Any, model: Path) -> None:
    by_config = megamind("plan", "--config", model / name, "--tp", "2", "--json")
    by_shapes = megamind("plan", model, "--shapes", "--tp", "2", "--json")

    assert by_config.document["bytes_to_device"] == by_shapes.document["bytes_to_device"]


def test_config_still_names_settings(megamind: Any, model: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[plan]\nmax_replicated_share = 2.5\n")

    result = megamind("plan", model, "--shapes", "--config", settings, "--json")

    assert "max_replicated_share" in result.document["error"]["message"]


def test_a_models_configuration_beside_a_checkpoint_is_refused(megamind: Any, model: Path, checkpoint: Path) -> None:
    result = megamind("plan", checkpoint, "--config", model, "--json")

    assert result.code == 2
    assert "leave one of them out" in result.document["error"]["message"]


def test_without_any_model_the_ways_to_name_one_are_listed(megamind: Any) -> None:
    result = megamind("plan", "--tp", "2", "--json")

    assert result.code == 2
    assert "--config DIR" in result.document["error"]["message"]


def test_an_unknown_name_lists_the_known_ones(megamind: Any) -> None:
    result = megamind("plan", "deepseek-v9", "--shapes", "--json")

    assert result.code == 2
    assert "deepseek-v3, gpt-oss-120b" in result.document["error"]["message"]


def test_formats_are_for_shapes(megamind: Any, checkpoint: Path) -> None:
    result = megamind("plan", checkpoint, "--weights", "int4", "--json")

    assert result.code == 2
    assert "--shapes" in result.document["error"]["message"]
