from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megamind_ray.core.plan import Plan

TOPOLOGY = """
schema = "megamind.topology/1"
name = "two small GPUs"
[[nodes]]
name = "n0"
memory = "64GiB"
pool = "8GiB"
[[nodes.gpus]]
count = 2
memory = "{gpu}"
"""


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(TOPOLOGY.format(gpu="1GiB"))
    return path


def test_ranks_readers_and_placements_are_shown(megamind: Any, checkpoint: Path, topology: Path) -> None:
    result = megamind("plan", checkpoint, "--tp", "2", "--topology", topology)

    assert result.code == 0, result.stderr
    assert "tp=2 (2 ranks)" in result.stdout
    assert "n0" in result.stdout
    assert "each byte once" in result.stdout


def test_the_sums_of_the_document_agree(megamind: Any, checkpoint: Path, topology: Path) -> None:
    plan = megamind("plan", checkpoint, "--tp", "2", "--topology", topology, "--json").document

    size_bytes = megamind("inspect", checkpoint, "--json").document["num_bytes"]
    assert plan["bytes_total"] == plan["bytes_from_storage"] == size_bytes
    assert sum(read["num_bytes"] for read in plan["reads"]) == plan["bytes_from_storage"]
    assert plan["bytes_to_device"] == plan["bytes_total"] + plan["bytes_replicated"]
    assert sum(share["num_tensors"] for share in plan["placements"]) == 12
    assert [(rank["rank"], rank["node"]) for rank in plan["ranks"]] == [(0, "n0"), (1, "n0")]
    assert [rank["num_tensors"] for rank in plan["ranks"]] == [12, 12]


def test_without_a_topology_the_assumed_one_is_named(megamind: Any, checkpoint: Path) -> None:
    plan = megamind("plan", checkpoint, "--tp", "2", "--json").document

    assert plan["topology"] == "nominal nodes of eight 80 GiB GPUs"
    assert len(plan["ranks"]) == 2


def test_a_tensor_is_explained(megamind: Any, checkpoint: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"

    plan = megamind("plan", checkpoint, "--tp", "2", "--explain", name, "--json").document

    assert name in plan["explained"][name]


def test_an_unknown_tensor_cannot_be_explained(megamind: Any, checkpoint: Path) -> None:
    result = megamind("plan", checkpoint, "--explain", "model.layers.0.mlp.downproj.weight", "--json")

    assert result.code == 2
    assert "downproj" in result.document["error"]["message"]


def test_a_saved_plan_can_be_read_back(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plan"

    result = megamind("plan", checkpoint, "--tp", "2", "--save", folder, "--json")

    assert result.document["saved"] == str(folder)
    assert Plan.load(folder).bytes_total == result.document["bytes_total"]


def test_what_does_not_fit_is_a_wrong_request_with_the_numbers(megamind: Any, checkpoint: Path, topology: Path) -> None:
    topology.write_text(TOPOLOGY.format(gpu="8KiB"))

    result = megamind("plan", checkpoint, "--tp", "2", "--topology", topology, "--json")

    error = result.document["error"]
    assert (result.code, error["class"]) == (2, "CapacityError")
    assert error["fields"]["missing_bytes"] == error["fields"]["needed_bytes"] - error["fields"]["free_bytes"] > 0
    assert "n0" in error["fields"]["where"]


def test_more_ranks_than_gpus_are_refused(megamind: Any, checkpoint: Path, topology: Path) -> None:
    result = megamind("plan", checkpoint, "--tp", "2", "--pp", "1", "--dp", "2", "--topology", topology)

    assert result.code == 2
    assert "4" in result.stderr


def test_rules_of_a_file_go_first(megamind: Any, checkpoint: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rules]]\npattern = "lm_head.weight"\nplacement = "replicate"\n')
    name = "lm_head.weight"

    plain = megamind("plan", checkpoint, "--tp", "2", "--json").document
    ruled = megamind("plan", checkpoint, "--tp", "2", "--rules", rules, "--explain", name, "--json")

    assert ruled.code == 0, ruled.stderr
    assert ruled.document["bytes_replicated"] == plain["bytes_replicated"] + 128 * 32 * 2
