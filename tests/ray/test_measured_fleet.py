"""A running fleet whose nodes are measured by their agents."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest

import megamind_ray as mm
from megamind_ray.actors import measuring
from megamind_ray.actors.measuring import measure_fleet
from megamind_ray.config import Config, PlanConfig
from megamind_ray.core.topology import Host
from megamind_ray.engine.measure import MeasureRequest
from megamind_ray.engine.measure_topology import measured_topology
from megamind_ray.errors import RequestError
from megamind_ray.planning import dump_topology, parse_topology, resolve_topology
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.units import MIB


def test_each_node_is_measured_and_what_a_put_and_a_call_cost(cluster: mm.Cluster, tmp_path: Path) -> None:
    topology = cluster.topology()

    found = measure_fleet("default", MeasureRequest(folder=tmp_path, seconds=30, max_bytes=8 * MIB), Config())

    assert list(found) == [node.id for node in topology.nodes]
    (one,) = found.values()
    by_name = {figure.name: figure.value for figure in one.figures}
    assert one.host.put_s == by_name["a put, beside its bytes"] > 0
    assert one.host.call_s == by_name["a call that hands over a block"] > 0
    assert one.host.take_s == by_name["each further block of a call"] >= 0
    assert one.host != Host(cores=one.host.cores)
    assert len(one.disks) == 1
    assert list(tmp_path.iterdir()) == []
    measured = measured_topology(topology, found)
    assert {gpu.kind for gpu in measured.nodes[0].gpus} == {"cpu"}
    assert {gpu.pcie_bytes_per_s for gpu in measured.nodes[0].gpus} == {one.fill_bytes_per_s}
    assert parse_topology(dump_topology(measured), origin="dump") == measured


def test_a_folder_that_a_node_lacks_is_the_callers_mistake(cluster: mm.Cluster) -> None:
    with pytest.raises(RequestError, match="--dir /no/such/folder"):
        measure_fleet("default", MeasureRequest(folder=Path("/no/such/folder"), seconds=5), Config())


def test_who_gives_up_waiting_stops_the_nodes(
    cluster: mm.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, timeout_s: float, **__: object) -> None:
        until_s = monotonic() + timeout_s
        while not list(tmp_path.iterdir()) and monotonic() < until_s:
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "wait_for_all", interrupted)

    with pytest.raises(KeyboardInterrupt):
        measure_fleet("default", MeasureRequest(folder=tmp_path, seconds=60), Config())
    assert list(tmp_path.iterdir()) == []


def test_a_load_is_planned_with_a_topology_file_that_has_the_nodes(cluster: mm.Cluster, tmp_path: Path) -> None:
    folder = llama_checkpoint(tmp_path / "model")
    file = tmp_path / "fleet.toml"
    settings = Config(plan=PlanConfig(topology=str(file)))

    file.write_text(dump_topology(cluster.topology()), encoding="utf-8")
    with mm.connect(cluster.address, config=settings) as caller:
        caller.load(folder).unload()
        file.write_text(dump_topology(resolve_topology("hgx-h100")), encoding="utf-8")
        with pytest.raises(RequestError, match=r"fleet\.toml: it has none of the cluster's nodes"):
            caller.load(folder)
