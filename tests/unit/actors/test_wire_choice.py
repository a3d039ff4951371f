"""The wire of a load, with nodes and a measurement that the tests make up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

import megamind_ray as mm
from megamind_ray.actors.messages import LoadRequest
from megamind_ray.actors.wire_choice import WireChooser, pairs_to_measure
from megamind_ray.config import Config, WireConfig, WireUse
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Links, Node, Topology
from megamind_ray.core.wires import WireName
from megamind_ray.errors import ClusterError, RequestError

LARGE = 1 << 40


class MadeUpNodes:
    """Nodes that have NIXL, but for those in ``without``; ``rates`` is what is measured from anywhere to a node."""

    def __init__(self, rates: Mapping[str, tuple[float, float]], without: Mapping[str, str] | None = None) -> None:
        self.rates = rates
        self.without = without or {}
        self.measured: list[tuple[str, str]] = []

    def lacking(self, nodes: Sequence[NodeId], config: Config) -> Mapping[NodeId, str]:
        return {node: self.without[node] for node in nodes if node in self.without}

    def measure(self, source: NodeId, target: NodeId, config: Config) -> Mapping[WireName, float]:
        self.measured.append((source, target))
        if target not in self.rates:
            raise ClusterError(f"node {target} does not answer")
        ray, nixl = self.rates[target]
        return {"ray": ray, "nixl": nixl}


def fleet(*names: str, links: Links | None = None) -> Topology:
    nodes = tuple(Node(id=NodeId(name), gpus=(), memory_bytes=1, pool_bytes=1, address=name) for name in names)
    return Topology(nodes=nodes, links=links or Links())


def request(use: WireUse = "auto") -> LoadRequest:
    config = Config(wire=WireConfig(use=use))
    return LoadRequest(uri="m", parallel=mm.Parallel(), name=None, keep=False, config=config)


def test_the_faster_wire_is_taken_and_the_plan_counts_with_the_slowest_pair() -> None:
    nodes = MadeUpNodes({"b": (1e9, 8e9), "c": (2e9, 4e9)})

    topology, settled = WireChooser(nodes, lambda: True).decide(fleet("a", "b", "c"), request(), LARGE)

    assert nodes.measured == [("a", "b"), ("b", "c")]
    assert settled.config.wire.use == settled.wire.wire == "nixl"
    assert topology.links.wire_bytes_per_s == 4e9
    assert "4.00 times as much" in settled.wire.reason
    assert "measured between 2 pairs of nodes" in settled.wire.reason


def test_rays_object_store_stays_where_nixl_is_hardly_faster() -> None:
    nodes = MadeUpNodes({"b": (1.0e9, 1.1e9)})
    topology, settled = WireChooser(nodes, lambda: True).decide(fleet("a", "b"), request(), LARGE)
    assert settled.config.wire.use == "ray"
    assert topology.links.wire_bytes_per_s == 1.0e9


def test_nodes_are_measured_once_and_new_ones_when_they_come() -> None:
    nodes = MadeUpNodes({"b": (1e9, 8e9), "c": (1e9, 8e9)})
    chooser = WireChooser(nodes, lambda: True)
    for _ in range(3):
        chooser.decide(fleet("a", "b"), request(), LARGE)
    assert nodes.measured == [("a", "b")]
    chooser.decide(fleet("a", "b", "c"), request(), LARGE)
    assert nodes.measured == [("a", "b"), ("b", "c")]


def test_what_a_topology_file_says_is_not_measured_again() -> None:
    nodes = MadeUpNodes({})
    known = fleet("a", "b", links=Links(ray_bytes_per_s=1e9, nixl_bytes_per_s=9e9))
    topology, settled = WireChooser(nodes, lambda: True).decide(known, request(), LARGE)
    assert (settled.config.wire.use, topology.links.wire_bytes_per_s, nodes.measured) == ("nixl", 9e9, [])


def test_a_measurement_that_fails_leaves_rays_object_store_and_is_not_tried_again() -> None:
    nodes = MadeUpNodes({})
    chooser = WireChooser(nodes, lambda: True)
    for _ in range(2):
        topology, settled = chooser.decide(fleet("a", "b"), request(), LARGE)
    assert settled.wire.wire == "ray"
    assert settled.wire.reason == "NIXL could not be measured: node b does not answer"
    assert topology == fleet("a", "b")
    assert nodes.measured == [("a", "b")]


@pytest.mark.parametrize(
    ("names", "num_bytes", "reason"),
    [("a", LARGE, "one node has no other"), ("ab", 1 << 20, "too small to measure for")],
    ids=["one node", "a small checkpoint"],
)
def test_nothing_is_measured_where_it_would_not_pay(names: str, num_bytes: int, reason: str) -> None:
    nodes = MadeUpNodes({"b": (1.0, 9.0)})
    _, settled = WireChooser(nodes, lambda: True).decide(fleet(*names), request(), num_bytes)
    assert (settled.config.wire.use, nodes.measured) == ("ray", [])
    assert reason in settled.wire.reason


def test_one_node_without_nixl_leaves_rays_object_store_and_is_named() -> None:
    nodes = MadeUpNodes({"b": (1.0, 9.0)}, without={"b": "nixl is not installed"})
    _, settled = WireChooser(nodes, lambda: True).decide(fleet("a", "b"), request(), LARGE)
    assert settled.wire.reason == "1 of 2 nodes cannot use NIXL (node b: nixl is not installed)"
    with pytest.raises(RequestError, match=r"node b: nixl is not installed\); `pip install megamind-ray\[rdma\]`"):
        WireChooser(nodes, lambda: True).decide(fleet("a", "b"), request("nixl"), LARGE)


def test_where_nixl_is_not_installed_nobody_is_asked() -> None:
    class Silent(MadeUpNodes):
        def lacking(self, nodes: Sequence[NodeId], config: Config) -> Mapping[NodeId, str]:
            raise AssertionError("asked")

    _, settled = WireChooser(Silent({}), lambda: False).decide(fleet("a", "b"), request(), LARGE)
    assert settled.wire.reason == "nixl is not installed"


def test_neighbours_are_measured_within_racks_first() -> None:
    racks = ("r1", "r0", "r1", "r0")
    nodes = [replace(node, rack=rack) for node, rack in zip(fleet(*"abcd").nodes, racks, strict=True)]
    assert pairs_to_measure(Topology(nodes=tuple(nodes))) == [("b", "d"), ("d", "a")]
