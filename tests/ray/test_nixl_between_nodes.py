"""Two Ray nodes on this machine with NIXL between their agents: chosen, used, left where it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megamind_ray as mm
from megamind_ray.actors.nixl_endpoint import nixl_is_installed
from megamind_ray.planning import parse_topology
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.real_cluster import RealCluster

needs_nixl = pytest.mark.skipif(
    not nixl_is_installed(), reason="nixl is not installed (pip install megamind-ray[rdma])"
)

MESH = {"tp": 2, "dp": 2}
_LOAD = """
import json, sys
import megamind_ray as mm
from megamind_ray.testing.digests import rank_digests
address, folder, mesh, settings = sys.argv[1:]
overrides = {"routing": {"force_pool": True}, **json.loads(settings)}
with mm.connect(address, config=mm.load_config(overrides=overrides)) as cluster:
    try:
        model = cluster.load(folder, mm.Parallel(**json.loads(mesh)), keep=True)
    except mm.RequestError as error:
        print(json.dumps({"refused": str(error)}))
    else:
        print(json.dumps({"report": model.report.to_json(), "held": model.run(rank_digests)}))
"""


_MEASURE = """
import sys
import megamind_ray as mm
from megamind_ray.actors.measuring import measure_fleet_wires
from megamind_ray.engine.measure_topology import measured_topology
from megamind_ray.planning import dump_topology
config = mm.load_config(overrides={"wire": {"measure_bytes": 4 << 20, "measure_s": 1.0}})
with mm.connect(sys.argv[1], config=config) as cluster:
    topology = cluster.topology()
    found, missing = measure_fleet_wires("default", topology, config)
    print("# " + missing)
    print(dump_topology(measured_topology(topology, {}, found)))
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RealCluster]:
    with RealCluster(num_gpus=2, pool_bytes=128 << 20) as cluster:
        cluster.add_node(num_gpus=2, pool_bytes=128 << 20)
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of some MB: blocks of less than 100 KB are no objects of Ray's store."""
    return llama_checkpoint(tmp_path_factory.mktemp("nixl") / "m", num_layers=6, num_files=2)


def load(nodes: RealCluster, folder: Path, **settings: Any) -> mm.LoadReport:
    """Loads, and compares what every rank holds."""
    answer = json.loads(
        nodes.python(_LOAD, nodes.address, str(folder), json.dumps(MESH), json.dumps(settings)).splitlines()[-1]
    )
    parallel = mm.Parallel(**MESH)
    for rank in parallel.ranks:
        expected = digest_all(expected_state_dict(folder, parallel, rank))
        assert answer["held"][rank] == json.loads(json.dumps(expected))
    report = mm.LoadReport.from_json(answer["report"])
    assert sum(report.bytes_by_wire.values()) == report.bytes_over_network > 0
    return report


@needs_nixl
def test_nixl_carries_the_blocks_where_it_is_asked_for(nodes: RealCluster, folder: Path) -> None:
    report = load(nodes, folder, wire={"use": "nixl"})

    assert report.bytes_by_wire["nixl"] > 0.5 * report.bytes_over_network
    assert report.faults == ()
    assert any("by NIXL: wire.use asks for it" in note for note in report.notes)


@needs_nixl
def test_a_buffer_without_room_leaves_rays_object_store(nodes: RealCluster, folder: Path) -> None:
    extents = {"chunk_bytes": 1 << 20, "extent_bytes": 4 << 20}
    report = load(nodes, folder, wire={"use": "nixl", "buffer_bytes": 1 << 20}, io=extents)

    assert report.bytes_by_wire["ray"] > 0
    assert {fault.kind for fault in report.faults} == {"wire_failed"}
    assert "wire.buffer_bytes" in report.faults[0].where


@needs_nixl
def test_both_are_measured_and_the_faster_one_is_taken(nodes: RealCluster, folder: Path) -> None:
    report = load(nodes, folder, wire={"use": "auto", "measure_bytes": 1 << 20, "measure_s": 1.0})

    (note,) = [note for note in report.notes if note.startswith("blocks went from node to node by")]
    chosen = "nixl" if "by NIXL" in note else "ray"
    assert "measured between 1 pair of nodes" in note
    assert max(report.bytes_by_wire, key=lambda wire: report.bytes_by_wire[wire]) == chosen


@pytest.mark.skipif(nixl_is_installed(), reason="nixl is installed")
def test_without_nixl_it_is_rays_object_store_and_who_asks_for_nixl_is_told(nodes: RealCluster, folder: Path) -> None:
    report = load(nodes, folder)
    assert any(note.endswith("by Ray's object store: nixl is not installed") for note in report.notes)
    wanted = json.dumps({"wire": {"use": "nixl"}})
    answer = json.loads(nodes.python(_LOAD, nodes.address, str(folder), json.dumps(MESH), wanted).splitlines()[-1])
    assert "pip install megamind-ray[rdma]" in answer["refused"]


def test_what_each_wire_brings_goes_into_a_topology_file(nodes: RealCluster) -> None:
    missing, _, text = nodes.python(_MEASURE, nodes.address).partition("\n")
    links = parse_topology(text, origin="measured").links

    assert links.ray_bytes_per_s is not None
    if nixl_is_installed():
        assert links.nixl_bytes_per_s is not None
        assert links.wire_bytes_per_s in (links.ray_bytes_per_s, links.nixl_bytes_per_s)
    else:
        assert missing == "# wire NIXL: not measured, nixl is not installed"
        assert (links.wire_bytes_per_s, links.nixl_bytes_per_s) == (links.ray_bytes_per_s, None)
