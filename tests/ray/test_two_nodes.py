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
