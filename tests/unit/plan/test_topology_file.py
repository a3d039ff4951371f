"""Topology files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Disk, Gpu, Links, Nic, Node, Storage, Topology
from megamind_ray.errors import RequestError
from megamind_ray.planning.topology_file import dump_topology, load_topology, parse_topology

EXAMPLE = Path(__file__).parents[3] / "examples" / "topologies" / "two_nodes_of_eight_h100.toml"

SMALL = """
schema = "megamind.topology/1"
[[nodes]]
name = "n0"
memory = "64GiB"
pool = "16GiB"
[[nodes.gpus]]
memory = "24GiB"
"""


def test_the_example_has_two_nodes_of_eight() -> None:
    topology = load_topology(EXAMPLE)
    assert [node.id for node in topology.nodes] == ["n0", "n0-1"]
    assert [gpu.index for gpu in topology.nodes[1].gpus] == list(range(8))
    assert [gpu.numa for gpu in topology.nodes[0].gpus] == [0] * 4 + [1] * 4
    assert topology.nodes[0].nic_bytes_per_s == 25e9
    assert topology.nodes[0].disk_bytes_per_s == 14e9
    assert topology.storage == Storage(bytes_per_s=20e9, shared=True)


def test_what_is_left_out_has_its_default() -> None:
    topology = parse_topology(SMALL, origin="small")
    gpu = topology.nodes[0].gpus[0]
    assert (gpu.free_bytes, gpu.nvlink_group, gpu.numa) == (24 << 30, None, None)
    assert (topology.storage, topology.links, topology.name) == (None, Links(), "")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('memory = "24GiB"', 'memory = "24GiB"\nnvlnk_group = 0', r"nodes\[0\]: gpus\[0\]: unknown key 'nvlnk_group'"),
        ('pool = "16GiB"', 'pool = "16GiB"\nshm = 1', r"nodes\[0\]: unknown key 'shm'; there are name, count"),
        ("[[nodes]]", "color = 1\n[[nodes]]", "unknown key 'color'"),
        ("[[nodes]]", "[links]\nnvlnk = 1\n[[nodes]]", r"\[links\]: unknown key 'nvlnk'; there are nvlink"),
        ("topology/1", "topology/2", r"schema is 'megamind.topology/2'; this release reads"),
        ('pool = "16GiB"', 'pool = "16 apples"', r"nodes\[0\]: pool: '16 apples' is not a size"),
        ('pool = "16GiB"', "", r"nodes\[0\]: pool is missing"),
        ('pool = "16GiB"', 'pool = "65GiB"', r"nodes\[0\]: pool is larger than memory"),
        ('memory = "24GiB"', 'memory = "24GiB"\nfree = "25GiB"', "free is larger than memory"),
        ('memory = "24GiB"', 'memory = "24GiB"\ncount = 0', "count = 0 must be an integer of 1 or more"),
        ('memory = "24GiB"', 'memory = "24GiB"\npcie = "fast"', r"pcie: 'fast' is not a rate"),
        ('name = "n0"', "name = 3", "name = 3 must be a text"),
        ('name = "n0"', "", r"nodes\[0\]: name is missing"),
        ("[[nodes]]", "[nodes]", r"write at least one \[\[nodes\]\]"),
        ("schema =", "schema", "not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_place(old: str, new: str, complaint: str) -> None:
    assert old in SMALL
    with pytest.raises(RequestError, match=complaint) as caught:
        parse_topology(SMALL.replace(old, new, 1), origin="cluster.toml")
    assert "cluster.toml" in caught.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"missing\.toml: cannot be read"):
        load_topology(tmp_path / "missing.toml")


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_RATE = st.floats(1.0, 1e12)
_SIZE = st.integers(0, 1 << 50)


@st.composite
def _nodes(draw: st.DrawFn, name: str) -> Node:
    gpus = []
    for index in sorted(draw(st.sets(st.integers(0, 9), max_size=5))):
        memory = draw(st.sampled_from([1 << 34, 10**10]))
        optional = st.none() | st.integers(0, 1)
        gpus.append(
            Gpu(
                index=index,
                memory_bytes=memory,
                free_bytes=draw(st.sampled_from([0, memory])),
                numa=draw(optional),
                nvlink_group=draw(optional),
                pcie_bytes_per_s=draw(st.sampled_from([25e9, 1.5e9])),
            )
        )
    memory = draw(_SIZE)
    return Node(
        id=NodeId(name),
        gpus=tuple(gpus),
        memory_bytes=memory,
        pool_bytes=draw(st.integers(0, memory)),
        disks=tuple(Disk(name=draw(_TEXT), bytes_per_s=draw(_RATE)) for _ in range(draw(st.integers(0, 2)))),
        nics=tuple(Nic(name=draw(_TEXT), bytes_per_s=draw(_RATE)) for _ in range(draw(st.integers(0, 2)))),
        address=draw(_TEXT),
        rack=draw(st.none() | _TEXT),
    )


@given(st.data())
def test_dump_and_parse_give_the_topology_back(data: st.DataObject) -> None:
    names = data.draw(st.lists(_TEXT, min_size=1, max_size=3, unique=True))
    topology = Topology(
        nodes=tuple(data.draw(_nodes(name)) for name in names),
        name=data.draw(_TEXT),
        links=Links(nvlink_bytes_per_s=data.draw(_RATE)),
        storage=data.draw(st.none() | st.builds(Storage, bytes_per_s=_RATE, shared=st.booleans())),
    )
    assert parse_topology(dump_topology(topology), origin="dump") == topology
