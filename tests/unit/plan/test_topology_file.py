"""Topology files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Disk, Gpu, Host, Links, Nic, Node, Rack, Storage, Switch, Topology
from megamind_ray.errors import RequestError
from megamind_ray.planning.topology_dump import dump_topology
from megamind_ray.planning.topology_file import load_topology, parse_topology

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

FULL = """
schema = "megamind.topology/1"
name = "all there is"
source = "made up, 2020"
[storage]
rate = "20GB/s"
latency = "5ms"
request = "85MB/s"
requests = 5500
[[racks]]
name = "left"
uplink = "100GB/s"
[[nodes]]
name = "n0"
memory = "64GiB"
pool = "16GiB"
pool_taken = "1GiB"
rack = "left"
[nodes.host]
cores = 8
memory_rate = "40GB/s"
copy = "9GB/s"
touch = "2GB/s"
checksum = "12GB/s"
network = "3GB/s"
run = "200ns"
put = "2.5ms"
call = "1ms"
take = "300us"
[[nodes.gpus]]
count = 2
memory = "24GiB"
kind = "cpu"
[[nodes.switches]]
gpus = [0, 1]
rate = "25GB/s"
[[nodes.disks]]
name = "nvme0"
count = 2
rate = "7GB/s"
latency = "80us"
[[nodes.nics]]
name = "eth0"
rate = "200Gbit/s"
latency = 1e-5
[links]
nvlink = "300GB/s"
wire = "2GB/s"
"""


def test_the_example_has_two_nodes_of_eight() -> None:
    topology = load_topology(EXAMPLE)
    assert [node.id for node in topology.nodes] == ["n0", "n0-1"]
    assert [gpu.index for gpu in topology.nodes[1].gpus] == list(range(8))
    assert [gpu.numa for gpu in topology.nodes[0].gpus] == [0] * 4 + [1] * 4
    assert topology.nodes[0].nic_bytes_per_s == 25e9
    assert topology.nodes[0].disk_bytes_per_s == 14e9
    assert topology.storage == Storage(bytes_per_s=20e9, shared=True)


def test_the_example_of_the_schema_is_a_topology() -> None:
    page = (Path(__file__).parents[3] / "docs" / "design" / "0003-schemas.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)

    topology = parse_topology(example, origin="0003-schemas.md")

    (first, second) = topology.nodes
    assert first.host == Host()
    assert (first.rack, second.rack) == ("r0", "r0")
    assert topology.storage is not None


def test_every_figure_has_its_place() -> None:
    topology = parse_topology(FULL, origin="full")

    (node,) = topology.nodes
    assert topology.source == "made up, 2020"
    assert topology.storage == Storage(
        bytes_per_s=20e9, latency_s=0.005, request_bytes_per_s=85e6, requests_per_s=5500.0
    )
    assert topology.racks == (Rack(name="left", uplink_bytes_per_s=100e9),)
    assert topology.links == Links(nvlink_bytes_per_s=300e9, wire_bytes_per_s=2e9)
    assert (node.rack, node.pool_taken_bytes) == ("left", 1 << 30)
    assert node.host == Host(
        cores=8,
        memory_bytes_per_s=40e9,
        copy_bytes_per_s=9e9,
        touch_bytes_per_s=2e9,
        checksum_bytes_per_s=12e9,
        network_bytes_per_s=3e9,
        run_s=2e-7,
        put_s=0.0025,
        call_s=0.001,
        take_s=0.0003,
    )
    assert [gpu.kind for gpu in node.gpus] == ["cpu", "cpu"]
    assert node.switches == (Switch(gpus=(0, 1), bytes_per_s=25e9),)
    assert [disk.name for disk in node.disks] == ["nvme0", "nvme0-1"]
    assert node.disks[1].latency_s == 8e-5
    assert node.nics == (Nic(name="eth0", bytes_per_s=25e9, latency_s=1e-5),)


def test_what_is_left_out_has_its_default() -> None:
    topology = parse_topology(SMALL, origin="small")
    (node,) = topology.nodes
    assert node.gpus == (Gpu(index=0, memory_bytes=24 << 30, free_bytes=24 << 30),)
    assert (node.host, node.switches, node.disks, node.nics, node.rack) == (Host(), (), (), (), None)
    assert topology == Topology(nodes=(node,))


def test_nodes_are_dealt_out_to_racks_in_their_order() -> None:
    text = SMALL.replace("[[nodes]]", '[[racks]]\nname = "r"\ncount = 3\nuplink = "1GB/s"\n[[nodes]]', 1)
    text = text.replace('name = "n0"', 'name = "n0"\ncount = 5\nrack = "r"\nper_rack = 2', 1)

    topology = parse_topology(text, origin="racks")

    assert [rack.name for rack in topology.racks] == ["r", "r-1", "r-2"]
    assert [(node.id, node.rack) for node in topology.nodes] == [
        ("n0", "r"),
        ("n0-1", "r"),
        ("n0-2", "r-1"),
        ("n0-3", "r-1"),
        ("n0-4", "r-2"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('memory = "24GiB"', 'memory = "24GiB"\nnvlnk_group = 0', r"nodes\[0\]: gpus\[0\]: unknown key 'nvlnk_group'"),
        ('pool = "16GiB"', 'pool = "16GiB"\nshm = 1', r"nodes\[0\]: unknown key 'shm'; there are name, count"),
        ("[[nodes]]", "color = 1\n[[nodes]]", "unknown key 'color'"),
        ("[[nodes]]", "[links]\nnvlnk = 1\n[[nodes]]", r"\[links\]: unknown key 'nvlnk'; there are nvlink, wire"),
        ("topology/1", "topology/2", r"schema is 'megamind.topology/2'; this release reads"),
        ('pool = "16GiB"', 'pool = "16 apples"', r"nodes\[0\]: pool: '16 apples' is not a size"),
        ('pool = "16GiB"', "", r"nodes\[0\]: pool is missing"),
        ('pool = "16GiB"', 'pool = "65GiB"', r"nodes\[0\]: pool is larger than memory"),
        ('pool = "16GiB"', 'pool = "16GiB"\nhost = 3', r"\[host\]: 3 must be a table with the keys cores"),
        ('pool = "16GiB"', 'pool = "16GiB"\nhost.cores = 0', r"\[host\]: cores = 0 must be an integer of 1 or more"),
        ('pool = "16GiB"', 'pool = "16GiB"\nhost.put = "3 apples"', r"\[host\]: put: '3 apples' is not a duration"),
        ('pool = "16GiB"', 'pool = "16GiB"\nhost.call = -1', r"\[host\]: call: -1 must be 0 seconds or more"),
        ('pool = "16GiB"', 'pool = "16GiB"\nhost.copy = "3s"', r"\[host\]: copy: '3s' is not a rate"),
        ('pool = "16GiB"', 'pool = "16GiB"\nper_rack = 2', r"nodes\[0\]: per_rack is there and rack is not"),
        ('memory = "24GiB"', 'memory = "24GiB"\nfree = "25GiB"', "free is larger than memory"),
        ('memory = "24GiB"', 'memory = "24GiB"\ncount = 0', "count = 0 must be an integer of 1 or more"),
        ('memory = "24GiB"', 'memory = "24GiB"\ncount = 70000', "count = 70000 is more than 65536; correct it"),
        ('memory = "24GiB"', 'memory = "24GiB"\nkind = "tpu"', "kind = 'tpu' must be one of cuda, cpu"),
        ('memory = "24GiB"', 'memory = "24GiB"\npcie = "fast"', r"pcie: 'fast' is not a rate"),
        ('memory = "24GiB"', f'memory = "24GiB"\npcie = {"9" * 400}', "pcie: 9+ must be more than 0 bytes per second"),
        ("[[nodes.gpus]]", "[[nodes.switches]]\nrate = 1\n[[nodes.gpus]]", r"switches\[0\]: gpus is missing"),
        (
            "[[nodes.gpus]]",
            '[[nodes.switches]]\nrate = 1\ngpus = ["a"]\n[[nodes.gpus]]',
            r"switches\[0\]: gpus = 'a' must be an integer of 0 or more",
        ),
        (
            "[[nodes.gpus]]",
            "[[nodes.switches]]\nrate = 1\ngpus = [3]\n[[nodes.gpus]]",
            r"cluster.toml: topology '': the switches of node 'n0' have the GPUs \[3\]; name each of its GPUs \[0\]",
        ),
        ("[[nodes]]", "racks = 3\n[[nodes]]", r"racks must be tables, \[\[racks\]\]"),
        ("[[nodes]]", '[[racks]]\nname = "r"\n[[nodes]]', r"racks\[0\]: uplink is missing; give a rate"),
        (
            "[[nodes]]",
            '[[racks]]\nname = "r-1"\nuplink = 1\n[[racks]]\nname = "r"\ncount = 2\nuplink = 1\n[[nodes]]',
            "racks: two are named 'r-1'",
        ),
        ("[[nodes]]", "[storage]\nrate = 1\nrequests = 0\n[[nodes]]", r"\[storage\]: requests = 0 must be a number"),
        (
            "[[nodes]]",
            '[storage]\nrate = 1\nrack = "attic"\n[[racks]]\nname = "r"\nuplink = 1\n[[nodes]]',
            "storage: rack is 'attic', and the file has r; name the rack",
        ),
        ("[[nodes]]", "source = 3\n[[nodes]]", "source = 3 must be a text"),
        ('name = "n0"', "name = 3", "name = 3 must be a text"),
        ('name = "n0"', "", r"nodes\[0\]: name is missing"),
        ("[[nodes]]", "[nodes]", r"write at least one \[\[nodes\]\]"),
        ("schema =", "schema", "not TOML"),
        ("[[nodes]]", "[storage]\nrate = 1e-300\n[[nodes]]", r"rate = 1e-300 must be from 1 to 1e\+18"),
        ("[[nodes]]", "[storage]\nrate = 1e299\n[[nodes]]", r"rate = 1e\+299 must be from 1 to 1e\+18"),
    ],
)
def test_a_mistake_is_named_with_its_place(old: str, new: str, complaint: str) -> None:
    assert old in SMALL
    with pytest.raises(RequestError, match=complaint) as caught:
        parse_topology(SMALL.replace(old, new, 1), origin="cluster.toml")
    assert "cluster.toml" in caught.value.message


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ('count = 4\n[[nodes.gpus]]\ncount = 65536\nmemory = "1GiB"', "262144 gpus in all"),
        ('count = 65536\n[[nodes.disks]]\nname = "d"\ncount = 65536\nrate = 1', "4294967296 disks in all"),
        ('count = 65536\n[[nodes]]\nname = "n1"\nmemory = 1\npool = 1', "65537 nodes in all"),
        ('[[racks]]\nname = "r"\ncount = 65536\nuplink = 1\n[[racks]]\nname = "s"\nuplink = 1', "65537 racks in all"),
    ],
)
def test_counts_that_multiply_to_what_no_cluster_has_are_refused(tables: str, complaint: str) -> None:
    text = f'schema = "megamind.topology/1"\n[[nodes]]\nname = "n0"\nmemory = 1\npool = 1\n{tables}'

    with pytest.raises(RequestError, match=rf"cluster\.toml: {complaint} are more than 65536; correct a count"):
        parse_topology(text, origin="cluster.toml")


def test_a_mistake_names_the_file_once() -> None:
    text = SMALL.replace("[[nodes]]", "[storage]\nrate = 1\nrequests = nan\n[[nodes]]", 1)

    with pytest.raises(RequestError) as caught:
        parse_topology(text, origin="cluster.toml")

    assert caught.value.message.count("cluster.toml") == 1


def test_what_is_no_regular_file_is_not_read_without_end() -> None:
    with pytest.raises(RequestError, match=r"/dev/zero: cannot be read \(it is not a regular file\)"):
        load_topology("/dev/zero")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"missing\.toml: cannot be read"):
        load_topology(tmp_path / "missing.toml")


def test_a_topology_is_written_as_people_write_it() -> None:
    text = dump_topology(parse_topology(FULL, origin="full"))

    for line in ('memory = "64GiB"', 'pool_taken = "1GiB"', 'put = "2.5ms"', 'rate = "25GB/s"', 'request = "85MB/s"'):
        assert line in text.splitlines()


def test_comments_stand_at_the_top_and_change_nothing() -> None:
    topology = parse_topology(FULL, origin="full")

    text = dump_topology(topology, comments=["disk: 2 GB/s", 'a line\nschema = "another"'])

    assert text.splitlines()[1:3] == ["# disk: 2 GB/s", '# a line schema = "another"']
    assert parse_topology(text, origin="dump") == topology


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_RATE = st.floats(1.0, 1e15) | st.integers(1, 10**6).map(lambda megabytes: megabytes * 1e6)
_SECONDS = st.floats(0.0, 1e5) | st.integers(0, 10**4).map(lambda number: number * 1e-7)
_SIZE = st.integers(0, 1 << 50)


@st.composite
def _gpus(draw: st.DrawFn) -> tuple[Gpu, ...]:
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
                kind=draw(st.sampled_from(["cuda", "cpu"])),
            )
        )
    return tuple(gpus)


_HOSTS = st.just(Host()) | st.builds(
    Host,
    cores=st.integers(1, 512),
    memory_bytes_per_s=_RATE,
    copy_bytes_per_s=_RATE,
    touch_bytes_per_s=_RATE,
    checksum_bytes_per_s=_RATE,
    network_bytes_per_s=_RATE,
    run_s=_SECONDS,
    put_s=_SECONDS,
    call_s=_SECONDS,
    take_s=_SECONDS,
)
_DISKS = st.lists(st.builds(Disk, name=_TEXT, bytes_per_s=_RATE, latency_s=_SECONDS), max_size=2).map(tuple)
_NICS = st.lists(st.builds(Nic, name=_TEXT, bytes_per_s=_RATE, latency_s=_SECONDS), max_size=2).map(tuple)
_STORAGES = st.builds(
    Storage,
    bytes_per_s=_RATE,
    shared=st.booleans(),
    latency_s=_SECONDS,
    request_bytes_per_s=st.none() | _RATE,
    requests_per_s=st.none() | st.floats(0.1, 1e6),
)


@st.composite
def _nodes(draw: st.DrawFn, name: str) -> Node:
    gpus, memory = draw(_gpus()), draw(_SIZE)
    switched = draw(st.integers(0, len(gpus)))
    return Node(
        id=NodeId(name),
        gpus=gpus,
        memory_bytes=memory,
        pool_bytes=draw(st.integers(0, memory)),
        pool_taken_bytes=draw(st.sampled_from([0, 5, 1 << 20])),
        disks=draw(_DISKS),
        nics=draw(_NICS),
        address=draw(_TEXT),
        rack=draw(st.none() | _TEXT),
        switches=tuple(Switch(gpus=(gpu.index,), bytes_per_s=draw(_RATE)) for gpu in gpus[:switched]),
        host=draw(_HOSTS),
    )


@given(st.data())
def test_dump_and_parse_give_the_topology_back(data: st.DataObject) -> None:
    names = data.draw(st.lists(_TEXT, min_size=1, max_size=3, unique=True))
    racks = data.draw(st.lists(_TEXT, max_size=2, unique=True))
    storage = data.draw(st.none() | _STORAGES)
    if storage is not None and racks:
        storage = replace(storage, rack=data.draw(st.sampled_from([None, *racks])))
    topology = Topology(
        nodes=tuple(data.draw(_nodes(name)) for name in names),
        name=data.draw(_TEXT),
        links=Links(
            nvlink_bytes_per_s=data.draw(_RATE),
            wire_bytes_per_s=data.draw(st.none() | _RATE),
            ray_bytes_per_s=data.draw(st.none() | _RATE),
            nixl_bytes_per_s=data.draw(st.none() | _RATE),
        ),
        storage=storage,
        racks=tuple(Rack(name=name, uplink_bytes_per_s=data.draw(_RATE)) for name in racks),
        source=data.draw(_TEXT),
    )
    text = dump_topology(topology, comments=[data.draw(_TEXT)])
    assert parse_topology(text, origin="dump") == topology
