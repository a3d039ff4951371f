"""What steps cost on given hardware: figures of the topology in, seconds out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Disk, Gpu, Host, Links, Nic, Node, Rack, Storage, Switch, Topology
from megamind_ray.planning.cost import CostModel, ResourceKind, Step, in_sequence

GIB = 1 << 30
HOST = Host(
    cores=8,
    memory_bytes_per_s=100e9,
    copy_bytes_per_s=10e9,
    touch_bytes_per_s=2e9,
    checksum_bytes_per_s=20e9,
    network_bytes_per_s=4e9,
    run_s=1e-6,
    put_s=0.003,
)


def node(name: str, **changes: object) -> Node:
    base = Node(
        id=NodeId(name),
        gpus=tuple(Gpu(index=index, memory_bytes=GIB, free_bytes=GIB, pcie_bytes_per_s=25e9) for index in range(2)),
        memory_bytes=64 * GIB,
        pool_bytes=GIB,
        disks=(Disk(name="a", bytes_per_s=2e9, latency_s=1e-4), Disk(name="b", bytes_per_s=3e9, latency_s=2e-4)),
        nics=(Nic(name="eth0", bytes_per_s=10e9, latency_s=1e-5),),
        host=HOST,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def two_nodes(**changes: object) -> Topology:
    return replace(Topology(nodes=(node("n0"), node("n1"))), **changes)  # type: ignore[arg-type]


def used(model: CostModel, step: Step) -> dict[str, float]:
    return {str(model.resources[index]): units for index, units in step.uses}


def test_a_read_of_local_disks_takes_their_rates_together_and_the_longest_latency() -> None:
    model = CostModel(two_nodes())
    step = model.read(0)
    taken = used(model, step)
    assert taken.pop("processors of n0") < 1e-9
    assert taken == {"disks of n0": 1.0, "host memory of n0": 1.0}
    assert step.alone_s(5 * 10**9, model.resources) == pytest.approx(2e-4 + 1.0)


def test_a_read_of_shared_storage_takes_network_processors_and_storage() -> None:
    storage = Storage(bytes_per_s=50e9, latency_s=0.02, request_bytes_per_s=0.1e9)
    model = CostModel(two_nodes(storage=storage), remote=True)
    step = model.read(1)
    assert used(model, step).keys() == {"network in of n1", "host memory of n1", "processors of n1", "shared storage"}
    assert step.cap_bytes_per_s == 0.1e9
    assert step.alone_s(10**8, model.resources) == pytest.approx(1.02)


def test_nodes_without_disks_read_shared_storage_also_under_a_path() -> None:
    storage = Storage(bytes_per_s=1e9)
    model = CostModel(Topology(nodes=(node("n0", disks=()),), storage=storage))
    assert "shared storage" in used(model, model.read(0))


def test_requests_are_counted_where_storage_answers_so_many_a_second() -> None:
    model = CostModel(two_nodes(storage=Storage(bytes_per_s=50e9, latency_s=0.0, requests_per_s=100.0)), remote=True)
    step = model.read(0, request_bytes=8e6)
    assert used(model, step)["requests to shared storage"] == 1 / 8e6
    assert step.alone_s(8 * 10**6 * 1000, model.resources) == pytest.approx(10.0)


def test_a_disk_nobody_said_anything_of_has_some_rate() -> None:
    model = CostModel(Topology(nodes=(node("n0", disks=(), nics=()),)))
    assert 0 < model.read(0).alone_s(10**9, model.resources) < math.inf


def test_a_cut_costs_so_much_a_byte_and_so_much_a_run() -> None:
    model = CostModel(two_nodes())
    per_byte_s = 1 / 10e9 + 1 / 20e9
    assert model.cut(0).alone_s(10**6, model.resources) == pytest.approx(10**6 * per_byte_s)
    assert model.cut(0, run_bytes=1000).alone_s(10**6, model.resources) == pytest.approx(10**6 * per_byte_s + 1000e-6)


def test_a_block_that_lies_in_its_extent_as_it_is_is_only_summed() -> None:
    model = CostModel(two_nodes())
    assert model.cut(0, packed=True).alone_s(20 * 10**9, model.resources) == pytest.approx(1.0)


def test_a_put_has_a_price_of_its_own() -> None:
    model = CostModel(two_nodes())
    assert model.put(0, 10**9).alone_s(10**9, model.resources) == pytest.approx(0.003 + 0.1)
    assert model.put(0).alone_s(10**9, model.resources) == pytest.approx(0.1)


def test_what_puts_take_beside_their_bytes_is_one_after_the_other_whatever_the_threads() -> None:
    model = CostModel(two_nodes())
    assert used(model, model.put(0, 10**6))["Python of the node agent of n0"] == pytest.approx(0.003 / 10**6)


def test_arenas_in_host_memory_share_what_fills_them() -> None:
    gpus = tuple(Gpu(index=index, memory_bytes=1, free_bytes=1, kind="cpu", pcie_bytes_per_s=3e9) for index in (0, 1))
    node = replace(two_nodes().nodes[0], gpus=gpus)
    model = CostModel(replace(two_nodes(), nodes=(node,)))
    assert used(model, model.copy(0, 0)).keys() == used(model, model.copy(0, 1)).keys()


def test_a_wire_takes_both_ends_and_is_as_slow_as_one_thread() -> None:
    model = CostModel(two_nodes())
    step = model.wire(0, 1)
    assert {"network out of n0", "network in of n1", "processors of n0", "processors of n1"} < used(model, step).keys()
    assert step.alone_s(4 * 10**9, model.resources) == pytest.approx(2e-5 + 1.0)


def test_the_ceiling_of_the_data_plane_holds_for_all_that_comes_into_a_node() -> None:
    model = CostModel(two_nodes(links=Links(wire_bytes_per_s=1e9)))
    step = model.wire(0, 1)
    assert {"data plane out of n0", "data plane in of n1"} < used(model, step).keys()
    assert step.alone_s(10**9, model.resources) == pytest.approx(1.0, rel=1e-3)


def test_a_wire_between_racks_takes_both_uplinks_and_within_a_rack_none() -> None:
    racks = (Rack(name="r0", uplink_bytes_per_s=1e9), Rack(name="r1", uplink_bytes_per_s=1e9))
    nodes = (node("n0", rack="r0"), node("n1", rack="r0"), node("n2", rack="r1"))
    model = CostModel(Topology(nodes=nodes, racks=racks))
    uplinks = {"rack uplink out of r0", "rack uplink in of r1"}
    assert uplinks < used(model, model.wire(0, 2)).keys()
    assert not [name for name in used(model, model.wire(0, 1)) if "uplink" in name]


@pytest.mark.parametrize(
    ("storage_rack", "node_rack", "uplinks"),
    [
        ("r0", "r0", set()),
        ("r0", "r1", {"rack uplink out of r0", "rack uplink in of r1"}),
        ("r0", None, {"rack uplink out of r0"}),
        (None, "r1", {"rack uplink in of r1"}),
        (None, None, set()),
    ],
)
def test_what_is_read_from_storage_crosses_the_uplinks_between(
    storage_rack: str | None, node_rack: str | None, uplinks: set[str]
) -> None:
    racks = (Rack(name="r0", uplink_bytes_per_s=1e9), Rack(name="r1", uplink_bytes_per_s=1e9))
    reader = node("n0", rack=node_rack, disks=())
    storage = Storage(bytes_per_s=1e9, rack=storage_rack)
    model = CostModel(Topology(nodes=(reader,), racks=racks, storage=storage))
    assert {name for name in used(model, model.read(0)) if "uplink" in name} == uplinks


def test_what_a_node_reads_from_its_own_disks_crosses_no_uplink() -> None:
    racks = (Rack(name="r0", uplink_bytes_per_s=1e9),)
    model = CostModel(Topology(nodes=(node("n0", rack="r0"),), racks=racks, storage=Storage(bytes_per_s=1e9)))
    assert not [name for name in used(model, model.read(0)) if "uplink" in name]


def test_gpus_behind_a_switch_share_its_way_to_the_host() -> None:
    model = CostModel(Topology(nodes=(node("n0", switches=(Switch(gpus=(0,), bytes_per_s=20e9),)),)))
    assert "PCIe switch of n0/0" in used(model, model.copy(0, 0))
    assert "PCIe switch of n0/0" in used(model, model.place(0, 0))
    assert "PCIe switch of n0/0" not in used(model, model.copy(0, 1))


def test_a_copy_from_the_pool_is_summed_by_one_thread_and_what_a_rank_read_by_itself_is_not() -> None:
    model = CostModel(two_nodes())
    assert model.copy(0, 1).alone_s(20 * 10**9, model.resources) == pytest.approx(1.0)
    assert model.place(0, 1).alone_s(25 * 10**9, model.resources) == pytest.approx(1.0)
    assert "processors of n0" not in used(model, model.place(0, 1))


def test_a_rank_whose_device_is_host_memory_touches_it_first() -> None:
    gpus = (Gpu(index=0, memory_bytes=GIB, free_bytes=GIB, pcie_bytes_per_s=50e9, kind="cpu"),)
    model = CostModel(Topology(nodes=(node("n0", gpus=gpus),)))
    assert model.place(0, 0).alone_s(2 * 10**9, model.resources) == pytest.approx(1.0)
    assert model.copy(0, 0).alone_s(2 * 10**9, model.resources) == pytest.approx(1.1)


@given(st.lists(st.tuples(st.floats(1e6, 1e12), st.floats(0, 1)), min_size=1, max_size=4), st.integers(1, 10**12))
def test_steps_in_sequence_take_the_sum_of_their_times(steps: list[tuple[float, float]], nbytes: int) -> None:
    parts = [Step(kind="cut", latency_s=latency, uses=((0, 1 / cap),), cap_bytes_per_s=cap) for cap, latency in steps]
    resources = CostModel(Topology(nodes=(node("n0"),))).resources
    roomy = (replace(resources[0], kind=ResourceKind.CPU, capacity=100.0),)
    whole = in_sequence(*parts)
    assert whole.alone_s(nbytes, roomy) == pytest.approx(sum(part.alone_s(nbytes, roomy) for part in parts))
    assert dict(whole.uses)[0] == pytest.approx(sum(1 / cap for cap, _ in steps))
