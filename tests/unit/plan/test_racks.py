"""Placement that knows of racks: gangs within one, near the storage, copies of a stage together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megamind_ray.config import Config, IoConfig
from megamind_ray.core.manifest import FileInfo, Manifest
from megamind_ray.core.parallel import Parallel, Rule, Shard
from megamind_ray.core.plan import Plan
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.core.topology import Storage, Topology
from megamind_ray.planning.bound import plan_bound
from megamind_ray.planning.build import build_plan
from megamind_ray.planning.cost import CostModel
from megamind_ray.planning.demands import build_demands
from megamind_ray.policies.registry import PLACEMENT
from megamind_ray.sim import simulate_plan
from megamind_ray.testing.testbed import in_two_racks

MIB, MB = 1 << 20, 10**6
SMALL = Config(io=IoConfig(chunk_bytes=MIB, extent_bytes=4 * MIB))


def two_racks(order: Sequence[str], *, storage_rack: str | None = "r0", hosts: int = 2) -> Topology:
    """Uplinks of a quarter of a host's link; the hosts in any order, as Ray names them at random."""
    found = in_two_racks(hosts_per_rack=hosts, nic_bytes_per_s=100 * MB, oversubscribed=4.0 * hosts)
    storage = Storage(bytes_per_s=1000 * MB, latency_s=0.002, rack=storage_rack)
    return replace(found, nodes=tuple(found.node(name) for name in order), storage=storage)


def plan_for(topology: Topology, parallel: Parallel, policy: str = "best_fit") -> Plan:
    infos = {}
    for layer in range(4):
        begin = layer * 16 * MIB
        name = f"model.layers.{layer}.rows"
        infos[name] = TensorInfo(name, DType.U8, (64, MIB // 4), 0, begin, begin + 16 * MIB)
    files = (FileInfo(path="m.safetensors", size_bytes=64 * MIB, data_begin=0),)
    manifest = Manifest(uri="s3://b/m", root="s3://b/m", files=files, tensors=infos)
    demands = build_demands(manifest, parallel, rules=(Rule(pattern="*", placement=Shard(dim=0)),))
    return build_plan(manifest, demands, topology, config=SMALL, placement=PLACEMENT[policy]())


def racks_of(plan: Plan) -> list[str]:
    """By rank."""
    return [name[:2] for name in plan.tables["ranks"]["node"].to_pylist()]


def seconds(plan: Plan, topology: Topology) -> float:
    return plan_bound(plan, CostModel(topology, remote=True)).seconds


ORDERS = [("r0n0", "r0n1", "r1n0", "r1n1"), ("r1n0", "r0n0", "r1n1", "r0n1"), ("r0n1", "r1n1", "r1n0", "r0n0")]


@pytest.mark.parametrize("order", ORDERS)
def test_a_gang_that_no_host_holds_stays_in_a_rack(order: tuple[str, ...]) -> None:
    racks = racks_of(plan_for(two_racks(order), Parallel(tp=2, dp=2)))
    assert racks[0] == racks[1] != racks[2] == racks[3]


@pytest.mark.parametrize("order", ORDERS)
def test_a_gang_goes_to_the_rack_where_the_storage_is(order: tuple[str, ...]) -> None:
    for rack in ("r0", "r1"):
        assert set(racks_of(plan_for(two_racks(order, storage_rack=rack), Parallel(tp=2)))) == {rack}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("storage_rack", ["r0", None])
def test_copies_of_a_stage_are_in_one_rack_so_that_half_crosses_an_uplink(
    order: tuple[str, ...], storage_rack: str | None
) -> None:
    topology = two_racks(order, storage_rack=storage_rack)
    plan = plan_for(topology, Parallel(pp=2, dp=2))
    racks = racks_of(plan)
    assert racks[0] == racks[1] != racks[2] == racks[3]
    assert seconds(plan, topology) == pytest.approx(32 * MIB / (25 * MB), rel=0.1)


def test_without_a_look_at_racks_the_uplink_carries_all() -> None:
    topology = two_racks(ORDERS[1])
    blind, aware = (plan_for(topology, Parallel(pp=2, dp=2), policy) for policy in ("topology_blind", "best_fit"))
    assert seconds(blind, topology) > 1.5 * seconds(aware, topology)


@pytest.mark.parametrize("storage_rack", ["r0", "r1", None])
def test_a_simulation_takes_as_long_as_the_uplink_to_the_storage(storage_rack: str | None) -> None:
    topology = two_racks(ORDERS[0], storage_rack=storage_rack)
    report = simulate_plan(plan_for(topology, Parallel(dp=4)), topology, SMALL).report
    assert report.seconds["transfer"] == pytest.approx(64 * MIB / (25 * MB), rel=0.1)
    assert "uplink" in (report.bottleneck or "")


def test_hosts_in_the_rack_of_the_storage_read_most() -> None:
    extents = plan_for(two_racks(ORDERS[0]), Parallel(dp=4)).tables["extents"]
    nbytes = extents["end"].to_numpy() - extents["begin"].to_numpy()
    near = [name.startswith("r0") for name in extents["node"].to_pylist()]
    assert nbytes[near].sum() > 0.75 * nbytes.sum()
