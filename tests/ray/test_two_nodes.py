"""Two Ray nodes on this machine: blocks go from agent to agent. More than one real host is another test bed's job."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import megamind_ray as mm
from megamind_ray.testing.checkpoints import llama_checkpoint, mixtral_checkpoint
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.real_cluster import RealCluster

_LOAD = """
import json, sys
import megamind_ray as mm
from megamind_ray.testing.digests import rank_digests
address, folder, mesh = sys.argv[1:]
parallel = mm.Parallel(**json.loads(mesh))
with mm.connect(address, config=mm.load_config(overrides={"routing": {"force_pool": True}})) as cluster:
    model = cluster.load(folder, parallel, keep=False)
    print(json.dumps({"report": model.report.to_json(), "held": model.run(rank_digests)}))
"""


@pytest.fixture(scope="module")
def on_head_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the second node sees empty."""
    return tmp_path_factory.mktemp("on-head-alone")


@pytest.fixture(scope="module")
def nodes(on_head_alone: Path) -> Iterator[RealCluster]:
    with RealCluster(num_gpus=2, pool_bytes=128 << 20) as cluster:
        blind_to = on_head_alone if os.geteuid() == 0 else None
        cluster.add_node(num_gpus=2, pool_bytes=128 << 20, blind_to=blind_to)
        yield cluster


def load(nodes: RealCluster, folder: Path, mesh: dict[str, int]) -> tuple[mm.LoadReport, list[object]]:
    """Loads through a driver of its own; the report, and what each rank holds as digests in JSON."""
    answer = json.loads(nodes.python(_LOAD, nodes.address, str(folder), json.dumps(mesh)).splitlines()[-1])
    return mm.LoadReport.from_json(answer["report"]), answer["held"]


def expected(folder: Path, mesh: dict[str, int]) -> list[object]:
    parallel = mm.Parallel(**mesh)
    held = [digest_all(expected_state_dict(folder, parallel, rank)) for rank in parallel.ranks]
    return list(json.loads(json.dumps(held)))


@pytest.mark.parametrize(
    ("make", "mesh"),
    [(llama_checkpoint, {"tp": 2, "dp": 2}), (mixtral_checkpoint, {"tp": 4, "ep": 2})],
    ids=["every byte on both nodes", "experts on one node each"],
)
def test_ranks_on_two_nodes_hold_their_slices_and_storage_is_read_once(
    nodes: RealCluster, tmp_path: Path, make: object, mesh: dict[str, int]
) -> None:
    assert callable(make)
    folder = make(tmp_path / "m")
    report, held = load(nodes, folder, mesh)
    assert held == expected(folder, mesh)
    assert len({rank.node for rank in report.ranks}) == 2
    assert report.bytes_from_storage == report.bytes_total
    assert 0 < report.bytes_over_network <= report.bytes_total
    assert report.faults == ()


@pytest.mark.cluster
def test_what_one_node_cannot_read_the_other_reads_for_it(nodes: RealCluster, on_head_alone: Path) -> None:
    """Storage fails on one node only: its extents are read on the other, and come to its ranks from there."""
    folder = llama_checkpoint(on_head_alone / "llama")
    mesh = {"tp": 2, "dp": 2}
    report, held = load(nodes, folder, mesh)
    assert held == expected(folder, mesh)
    assert {fault.kind for fault in report.faults} == {"extent_failed"}
    assert all("no such file" in fault.where for fault in report.faults)
    assert report.bytes_over_network > 0
