"""Topologies that come with the package, and how a topology is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Topology
from megamind_ray.errors import RequestError
from megamind_ray.planning import dump_topology, preset, preset_names, preset_text, resolve_topology
from megamind_ray.units import GIB

NAMES = {
    "1x-rtx-4090": (1, 1),
    "4x-rtx-4090": (1, 4),
    "cluster-1024": (128, 1024),
    "cluster-64": (64, 512),
    "dgx-a100-80gb": (1, 8),
    "founding": (1, 8),
    "hgx-h100": (1, 8),
    "hgx-h200": (1, 8),
    "two-racks": (16, 128),
}
# What the driver shows of each, in GiB.
WHOLE_GIB = {"rtx": 23.99, "a100": 80.0, "founding": 80.0, "h100": 79.65, "h200": 140.4, "cluster": 79.65, "two": 79.65}


def test_the_presets_are_listed() -> None:
    assert preset_names() == tuple(sorted(NAMES))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_preset_has_its_nodes_and_gpus_and_says_where_its_figures_are_from(name: str) -> None:
    topology = preset(name)

    assert (len(topology.nodes), topology.num_gpus) == NAMES[name]
    assert "nominal" in topology.source or "preset hgx-h100" in topology.source
    assert topology.name
    assert all(node.disks and node.nics for node in topology.nodes)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_weights_may_take_what_arenas_leave(name: str) -> None:
    (whole_gib,) = [size for part, size in WHOLE_GIB.items() if part in name]

    for node in preset(name).nodes:
        for gpu in node.gpus:
            assert 0.9 * whole_gib < gpu.memory_bytes / GIB <= 0.92 * whole_gib


@pytest.mark.parametrize("name", ["cluster-64", "cluster-1024", "two-racks"])
def test_nodes_of_clusters_are_the_preset_for_one(name: str) -> None:
    (alone,) = preset("hgx-h100").nodes

    assert {replace(node, id=NodeId("n0"), rack=None) for node in preset(name).nodes} == {alone}


@pytest.mark.parametrize(("name", "oversubscribed"), [("cluster-64", 1), ("cluster-1024", 1), ("two-racks", 4)])
def test_uplinks_carry_what_they_are_said_to(name: str, oversubscribed: int) -> None:
    topology = preset(name)

    for rack in topology.racks:
        inside = sum(node.nic_bytes_per_s for node in topology.nodes if node.rack == rack.name)
        assert inside == oversubscribed * rack.uplink_bytes_per_s
    assert {node.rack for node in topology.nodes} == {rack.name for rack in topology.racks}


def test_a_preset_is_found_by_its_name() -> None:
    assert resolve_topology("hgx-h100") == resolve_topology(Path("hgx-h100")) == preset("hgx-h100")


def test_a_topology_is_itself() -> None:
    topology = Topology(nodes=())

    assert resolve_topology(topology) is topology


def test_a_file_goes_before_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(preset("1x-rtx-4090"), name="my own")
    (tmp_path / "hgx-h100").write_text(dump_topology(own))
    (tmp_path / "own.toml").write_text(dump_topology(own))
    monkeypatch.chdir(tmp_path)

    assert resolve_topology("hgx-h100") == resolve_topology("own.toml") == own


def test_a_folder_of_that_name_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "founding").mkdir()
    monkeypatch.chdir(tmp_path)

    assert resolve_topology("founding") == preset("founding")


@pytest.mark.parametrize("name", ["missing.toml", "folder/hgx-h100"])
def test_what_looks_like_a_path_is_one(name: str) -> None:
    with pytest.raises(RequestError, match=f"topology file {name}: cannot be read"):
        resolve_topology(name)


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(
        RequestError, match=r"'hgx-h10': neither a file nor a preset; .*did you mean 'hgx-h100'\?"
    ) as got:
        resolve_topology("hgx-h10")
    assert all(name in got.value.message for name in NAMES)


def test_an_unknown_preset_lists_the_presets() -> None:
    with pytest.raises(RequestError, match="no topology preset is named 'x'; take one of 1x-rtx-4090, "):
        preset_text("x")
