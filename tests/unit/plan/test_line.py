"""The order in which nodes hand blocks on, and what is known of a cluster's links beforehand."""

from __future__ import annotations

import numpy as np
import pytest

from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Gpu, Links, Nic, Node, Rack, Storage, Switch, Topology
from megamind_ray.errors import RequestError
from megamind_ray.planning.known_links import with_known_links
from megamind_ray.planning.line import line_of, places_of


def _node(name: str, rack: str | None = None, num_gpus: int = 1, **more: object) -> Node:
    gpus = tuple(Gpu(index=index, memory_bytes=10, free_bytes=5) for index in range(num_gpus))
    return Node(id=NodeId(name), gpus=gpus, memory_bytes=1, pool_bytes=1, rack=rack, **more)  # type: ignore[arg-type]


def _line(racks: dict[str, str | None], read: list[int], used: list[int] | None = None) -> tuple[str, ...]:
    topology = Topology(nodes=tuple(_node(name, rack) for name, rack in racks.items()))
    positions = np.arange(len(racks)) if used is None else np.array(used)
    return line_of(topology, np.array(read), positions)


def test_nodes_of_a_rack_stand_together_and_who_reads_most_at_the_ends() -> None:
    racks = {"a": "x", "b": "y", "c": "x", "d": "y"}
    assert _line(racks, [1, 1, 1, 5]) == ("d", "b", "c", "a")


def test_slow_links_stand_at_the_ends_where_nothing_is_handed_on() -> None:
    rates = {"a": 9.0, "b": 9.0, "c": 1.0, "d": 2.0}
    nodes = tuple(_node(name, nics=(Nic(name="e", bytes_per_s=rate),)) for name, rate in rates.items())
    assert line_of(Topology(nodes=nodes), np.full(4, 1), np.arange(4)) == ("c", "a", "b", "d")


def test_slow_links_are_supposed_at_the_ends_before_it_is_known_who_reads() -> None:
    rates = {"a": 9.0, "b": 1.0, "c": 2.0, "d": 9.0}
    nodes = tuple(_node(name, nics=(Nic(name="e", bytes_per_s=rate),)) for name, rate in rates.items())
    places = places_of(Topology(nodes=nodes)).tolist()
    assert {places[1], places[2]} == {0, 3}


def test_racks_with_slow_uplinks_stand_at_the_ends() -> None:
    racks = tuple(Rack(name=name, uplink_bytes_per_s=rate) for name, rate in (("x", 1.0), ("y", 9.0), ("z", 1.0)))
    nodes = tuple(_node(name, rack) for name, rack in (("a", "y"), ("b", "x"), ("c", "z")))
    assert line_of(Topology(nodes=nodes, racks=racks), np.full(3, 1), np.arange(3)) == ("b", "a", "c")


def test_one_that_has_all_stands_at_an_end() -> None:
    assert _line(dict.fromkeys("abc"), [0, 7, 0])[0] == "b"


def test_nodes_without_a_part_are_left_out_and_one_alone_has_no_line() -> None:
    assert _line(dict.fromkeys("abc"), [1, 1, 1], [0, 2]) == ("a", "c")
    assert _line(dict.fromkeys("abc"), [1, 1, 1], [1]) == ()


def test_live_nodes_get_the_links_of_those_with_their_address() -> None:
    nic = Nic(name="eth0", bytes_per_s=1e9)
    known = Topology(
        nodes=(
            _node("first", "x", 2, address="10.0.0.1", nics=(nic,), switches=(Switch(gpus=(0, 1), bytes_per_s=5.0),)),
            _node("other", "y", address="10.0.0.9"),
        ),
        racks=(Rack(name="x", uplink_bytes_per_s=3.0),),
        links=Links(wire_bytes_per_s=2.0),
        storage=Storage(bytes_per_s=4.0),
    )
    live = Topology(nodes=(_node("f00", address="10.0.0.1"), _node("ba5", address="10.0.0.2")), name="default")

    found = with_known_links(live, known)

    assert [node.id for node in found.nodes] == ["f00", "ba5"]
    assert (found.nodes[0].rack, found.nodes[0].nics) == ("x", (nic,))
    assert found.nodes[0].gpus[0].free_bytes == 5
    # Of the two GPUs of the switch one is there.
    assert found.nodes[0].switches == (Switch(gpus=(0,), bytes_per_s=5.0),)
    assert found.nodes[1] == live.nodes[1]
    assert (found.racks, found.links, found.storage) == (known.racks, known.links, known.storage)


def test_nodes_on_one_host_are_told_apart_by_their_names() -> None:
    known = Topology(nodes=(_node("one", "x", address="10.0.0.1"), _node("two", "y", address="10.0.0.1")))
    live = Topology(nodes=(_node("two", address="10.0.0.1"), _node("one", address="10.0.0.1")))
    assert [node.rack for node in with_known_links(live, known).nodes] == ["y", "x"]


def test_a_file_of_another_cluster_is_refused() -> None:
    live = Topology(nodes=(_node("f00", address="10.0.0.1"),))
    known = Topology(nodes=(_node("far", address="192.168.0.1"),))
    with pytest.raises(RequestError, match=r"cluster.toml: it has none .* 10\.0\.0\.1, and it names 192\.168\.0\.1"):
        with_known_links(live, known, origin="cluster.toml")
