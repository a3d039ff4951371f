"""`megamind plan` beyond one plan: predictions, other layouts beside it, what overflows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LLAMA = ("plan", "llama-3-8b", "--shapes", "--tp", "4", "--topology", "4x-rtx-4090")
LARGE = ("plan", "llama-3-70b", "--shapes", "--tp", "4", "--topology", "4x-rtx-4090")


def test_hardware_with_rates_gives_a_prediction(megamind: Any) -> None:
    document = megamind(*LLAMA, "--json").document

    report = document["predicted"]
    assert report["kind"] == "simulation"
    assert report["seconds"]["total"] >= report["lower_bound_s"] > 0
    assert report["bottleneck"]
    assert len(report["ranks"]) == 4


def test_people_see_the_time_and_a_timeline(megamind: Any) -> None:
    result = megamind(*LLAMA)

    assert result.code == 0, result.stderr
    assert "predicted: " in result.stdout
    assert "bottleneck: " in result.stdout
    assert "n0/storage" in result.stdout


def test_nothing_is_predicted_where_nothing_is_known(megamind: Any, checkpoint: Path) -> None:
    assert "predicted" not in megamind("plan", checkpoint, "--json").document
    assert "predicted" not in megamind(*LLAMA, "--no-predict", "--json").document


def test_a_prediction_is_recorded(megamind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "record"

    result = megamind(*LLAMA, "--record", folder)

    assert result.code == 0, result.stderr
    assert json.loads((folder / "report.json").read_text())["kind"] == "simulation"
    assert (folder / "timeline.html").read_text().startswith("<!doctype html>")
    assert "traceEvents" in json.loads((folder / "trace.json").read_text())
    assert megamind("replay", folder).code == 0


def test_cases_stand_beside_the_plan_itself(megamind: Any) -> None:
    document = megamind(*LLAMA, "--compare", "tp=2,pp=2", "--compare", "dp=8", "--json").document

    assert document["schema"] == "megamind.comparison/1"
    assert [case["case"] for case in document["cases"]] == ["tp=4", "tp=2,pp=2", "dp=8"]
    assert [case["fits"] for case in document["cases"]] == [True, True, False]
    assert "needs 32 GPUs" in document["cases"][2]["problem"]
    assert document["best"] in ("tp=4", "tp=2,pp=2")


def test_a_sweep_marks_the_fastest(megamind: Any) -> None:
    result = megamind("plan", "llama-3-8b", "--shapes", "--topology", "4x-rtx-4090", "--sweep", "tp")

    assert result.code == 0, result.stderr
    assert result.stdout.count(" *\n") + result.stdout.count(" *  ") == 1
    assert result.stdout.count("would help most") == 1
    assert all(f"tp={tp}" in result.stdout for tp in (1, 2, 4))


def test_what_is_too_large_says_what_stays_in_host_memory(megamind: Any) -> None:
    refused = megamind(*LARGE)
    document = megamind(*LARGE, "--offload", "--json").document

    assert refused.code == 2
    assert "CapacityError" in refused.stderr
    assert "--offload" in refused.stderr
    assert document["host_bytes"] == sum(rank["host_bytes"] for rank in document["ranks"])
    assert document["pass_s"] > 0
    assert all(rank["device_bytes"] + rank["slot_bytes"] <= 22 << 30 for rank in document["ranks"])


def test_a_layout_that_cannot_work_names_the_nearest_one_that_does(megamind: Any) -> None:
    result = megamind("plan", "llama-3-8b", "--shapes", "--tp", "3", "--topology", "4x-rtx-4090")

    assert result.code == 2
    assert "The nearest layout that works on this hardware: tp=" in result.stderr


def test_a_layout_that_the_refusal_names_itself_is_not_named_twice(megamind: Any) -> None:
    result = megamind("plan", "llama-3-70b", "--shapes", "--topology", "hgx-h100")

    assert result.code == 2
    assert "pp=2 would need about" in result.stderr
    assert "nearest layout" not in result.stderr


def test_what_fits_needs_no_host_memory(megamind: Any) -> None:
    assert "nothing stays in host memory" in megamind(*LLAMA, "--offload").stdout


def test_a_model_by_name_without_shapes_names_the_option(megamind: Any) -> None:
    result = megamind("plan", "llama-3-8b", "--tp", "2")

    assert result.code == 2
    assert "add --shapes" in result.stderr


def test_ranks_placed_for_the_same_reason_say_it_once(megamind: Any) -> None:
    lines = megamind(*LLAMA, "--no-predict").stdout.splitlines()

    assert sum("tightest fit" in line for line in lines) == 1
    assert sum(line.rstrip().endswith("as above") for line in lines) == 3


def test_of_many_ranks_the_first_are_shown(megamind: Any) -> None:
    text = megamind("plan", "llama-3-8b", "--shapes", "--tp", "8", "--dp", "6").stdout

    assert "... and 8 more ranks; --json has all of them" in text


@pytest.mark.parametrize(
    "options",
    [
        ("--compare", "tp=2", "--offload"),
        ("--sweep", "tp", "--save", "there"),
        ("--offload", "--explain", "lm_head.weight"),
    ],
)
def test_two_questions_at_once_are_refused(megamind: Any, options: tuple[str, ...]) -> None:
    result = megamind(*LLAMA, *options)

    assert result.code == 2
    assert "one of them at a time" in result.stderr


def test_a_record_of_what_cannot_be_planned_leaves_no_folder(megamind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "record"

    result = megamind(*LARGE, "--record", folder)

    assert result.code == 2
    assert not folder.exists()


def test_an_empty_folder_of_the_users_stays(megamind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "record"
    folder.mkdir()

    assert megamind(*LARGE, "--record", folder).code == 2
    assert folder.is_dir()


@pytest.mark.parametrize("options", [("--predict",), ("--compare", "tp=2"), ("--sweep", "tp")])
def test_a_time_from_rates_that_nobody_gave_is_said_to_be_guessed(
    megamind: Any, checkpoint: Path, options: tuple[str, ...]
) -> None:
    command = ("plan", checkpoint, "--allow-replication", *options)

    assert "rates of disks, networks and memory are guesses" in megamind(*command).stdout
    assert megamind(*command, "--json").document["rates_guessed"] is True
    named = megamind(*command, "--topology", "4x-rtx-4090")
    assert named.code == 0, named.stderr
    assert "guesses" not in named.stdout


def test_a_record_of_guessed_rates_says_so_too(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    assert megamind("plan", checkpoint, "--record", tmp_path / "record").code == 0

    notes = json.loads((tmp_path / "record/report.json").read_text())["notes"]
    assert any("guesses" in note for note in notes)


def test_cases_that_all_name_their_hardware_are_no_guess(megamind: Any, checkpoint: Path) -> None:
    shown = megamind("plan", checkpoint, "--sweep", "tp", "--topology", "hgx-h100").stdout

    assert "guesses" not in shown
