"""Two Ray nodes on this machine: blocks go from agent to agent. More than one real host is another test bed's job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import megamind_ray as mm
from megamind_ray.testing.checkpoints import llama_checkpoint, mixtral_checkpoint
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.real_cluster import RealCluster

_NODES = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
rows = [row for row in ray.nodes() if row["Alive"]]
heads = [row["NodeID"] for row in rows if "node:__internal_head__" in row["Resources"]]
print(json.dumps([heads, [row["NodeID"] for row in rows], rows[0]["NodeManagerAddress"]]))
"""
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
def nodes() -> Iterator[RealCluster]:
    with RealCluster(num_gpus=2, pool_bytes=128 << 20) as cluster:
        cluster.add_node(num_gpus=2, pool_bytes=128 << 20)
        yield cluster


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
    parallel = mm.Parallel(**mesh)
    answer = json.loads(nodes.python(_LOAD, nodes.address, str(folder), json.dumps(mesh)).splitlines()[-1])
    report = mm.LoadReport.from_json(answer["report"])
    for rank in parallel.ranks:
        expected = digest_all(expected_state_dict(folder, parallel, rank))
        assert answer["held"][rank] == json.loads(json.dumps(expected))
    assert len({rank.node for rank in report.ranks}) == 2
    assert report.bytes_from_storage == report.bytes_total
    assert 0 < report.bytes_over_network <= report.bytes_total
    assert report.faults == ()


@pytest.fixture
def detached(nodes: RealCluster) -> Iterator[RealCluster]:
    """Ends the fleet that the test leaves: with its actors, Ray's nodes would not end at once."""
    yield nodes
    nodes.megamind("down")


def test_a_node_is_drained_and_taken_back(detached: RealCluster, tmp_path: Path) -> None:
    """Both nodes have one address: only ids tell them apart."""
    nodes, folder = detached, llama_checkpoint(tmp_path / "m")
    heads, places, address = json.loads(nodes.python(_NODES, nodes.address).splitlines()[-1])
    (leaving,) = set(places) - set(heads)
    nodes.megamind_json("load", str(folder), "--dp", "4", "--detach", "--name", "wide")

    ambiguous = nodes.megamind("drain", address)
    assert "it may be any of 2" in ambiguous.stderr, ambiguous.stderr
    assert ambiguous.returncode == 2
    refused = nodes.megamind("drain", leaving[:10])
    assert "it has ranks of 'wide'" in refused.stderr
    report = nodes.megamind_json("drain", leaving[:10], "--force")
    assert (report["node"], report["unloaded"]) == (leaving, ["wide"])
    assert [name for name in nodes.actors() if leaving in name] == []
    assert nodes.megamind_json("models")["leaving"] == [leaving]

    assert nodes.megamind_json("drain", leaving, "--cancel")["node"] == leaving
    report = mm.LoadReport.from_json(nodes.megamind_json("load", str(folder), "--dp", "4", "--detach"))
    assert {rank.node for rank in report.ranks} == set(places)
