"""Seconds that nothing beats: of a plan, and of all plans of a request."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamind_ray.config import Config, IoConfig, RoutingConfig
from megamind_ray.core.demands import Demands, Int64Array
from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import FileChecksums, FileInfo, Manifest, Reference
from megamind_ray.core.parallel import Parallel, Replicate, Rule, Shard
from megamind_ray.core.plan import Plan
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.core.topology import Disk, Gpu, Nic, Node, Rack, Storage, Switch, Topology
from megamind_ray.errors import CapacityError
from megamind_ray.planning.bound import Bound, _request, kept_together, lower_bound, plan_bound, search
from megamind_ray.planning.build import build_plan
from megamind_ray.planning.cost import CostModel, ResourceKind
from megamind_ray.planning.demands import build_demands
from megamind_ray.policies.placement.refutation import is_refuted
from megamind_ray.policies.registry import PLACEMENT
from megamind_ray.policies.routing.base import RoutingDecision, RoutingRequest

MIB, GB = 1 << 20, 10**9
SMALL = Config(io=IoConfig(chunk_bytes=MIB, extent_bytes=4 * MIB))
ROWS = (Rule(pattern="*", placement=Shard(dim=0), stage="all"),)
COPIES = (Rule(pattern="*", placement=Replicate(), stage="all"),)
LAYERS = (Rule(pattern="*.rows", placement=Shard(dim=0)), Rule(pattern="*.columns", placement=Shard(dim=1)))


def checkpoint(mib: int, *, reference: bool = False) -> Manifest:
    """One matrix of 1024 rows."""
    nbytes = mib * MIB
    info = TensorInfo("t", DType.U8, (1024, nbytes // 1024), 0, 0, nbytes)
    sums = (FileChecksums(header_crc32=0, chunks_crc32=(0,) * mib),)
    return Manifest(
        uri="/m",
        root="/m",
        files=(FileInfo(path="m.safetensors", size_bytes=nbytes, data_begin=0),),
        tensors={"t": info},
        reference=Reference(origin="sidecar", chunk_bytes=MIB, files=sums) if reference else None,
    )


def demands_of(manifest: Manifest, parallel: Parallel, rules: tuple[Rule, ...]) -> Demands:
    return build_demands(manifest, parallel, rules=rules, allow_replication=True)


def one_disk(name: str, gpus: int = 1, disk: float = GB, nic: float = 100 * GB) -> Node:
    return Node(
        id=NodeId(name),
        gpus=tuple(Gpu(index=i, memory_bytes=1 << 40, free_bytes=1 << 40) for i in range(gpus)),
        memory_bytes=1 << 40,
        pool_bytes=1 << 38,
        disks=(Disk(name="d", bytes_per_s=disk),),
        nics=(Nic(name="n", bytes_per_s=nic),),
    )


def bound_of(manifest: Manifest, rules: tuple[Rule, ...], parallel: Parallel, topology: Topology) -> Bound:
    demands = demands_of(manifest, parallel, rules)
    return plan_bound(build_plan(manifest, demands, topology, config=SMALL), CostModel(topology))


def test_a_plan_takes_as_long_as_its_disk_reads() -> None:
    bound = bound_of(checkpoint(100), ROWS, Parallel(), Topology(nodes=(one_disk("n0"),)))
    assert bound.resource == "disks of n0"
    assert bound.seconds == pytest.approx(100 * MIB / GB)


def test_a_block_that_another_node_needs_counts_at_both_networks_and_both_uplinks() -> None:
    nodes = (replace(one_disk("a", nic=GB), rack="x"), replace(one_disk("b", nic=GB), rack="y"))
    topology = Topology(
        nodes=nodes, racks=(Rack(name="x", uplink_bytes_per_s=GB), Rack(name="y", uplink_bytes_per_s=GB))
    )
    by_resource = bound_of(checkpoint(64), COPIES, Parallel(dp=2), topology).by_resource
    # Each node reads half and sends it to the other.
    half = pytest.approx(32 * MIB / GB)
    for name in ("network in of a", "network out of a", "rack uplink out of x", "rack uplink in of x", "disks of b"):
        assert by_resource[name] == half, name


def processors(topology: Topology) -> list[int]:
    """Indices of the processors among the resources."""
    resources = CostModel(topology).resources
    return [index for index, resource in enumerate(resources) if resource.kind is ResourceKind.CPU]


def test_checksums_count_where_there_is_a_reference() -> None:
    topology = Topology(nodes=(one_disk("n0"),))
    with_sums, without = (
        bound_of(checkpoint(16, reference=flag), ROWS, Parallel(), topology).by_resource.get("processors of n0", 0.0)
        for flag in (True, False)
    )
    (units,) = (units for index, units in CostModel(topology).verify(0).uses if index in processors(topology))
    assert with_sums - without == pytest.approx(16 * MIB * units / topology.nodes[0].host.cores)


def test_two_gpus_behind_one_switch_share_it() -> None:
    node = one_disk("n0", gpus=2, disk=1000 * GB)
    topology = Topology(nodes=(replace(node, switches=(Switch(gpus=(0, 1), bytes_per_s=GB),)),))
    bound = bound_of(checkpoint(64), COPIES, Parallel(dp=2), topology)
    assert bound.resource == "PCIe switch of n0/0"
    assert bound.seconds == pytest.approx(2 * 64 * MIB / GB)


def test_the_bound_of_a_request_is_met_where_nodes_are_alike() -> None:
    topology = Topology(nodes=tuple(one_disk(f"n{i}", gpus=2) for i in range(2)))
    manifest, parallel = checkpoint(64), Parallel(tp=2, dp=2)
    demands = demands_of(manifest, parallel, ROWS)
    least = lower_bound(manifest, demands, CostModel(topology), chunk_bytes=MIB)
    assert least.resource == "disks"
    assert least.seconds == pytest.approx(32 * MIB / GB, rel=1e-3)
    assert bound_of(manifest, ROWS, parallel, topology).seconds == pytest.approx(least.seconds, rel=0.05)


def test_the_largest_rank_meets_the_fastest_link() -> None:
    slow, fast = (
        Gpu(index=i, memory_bytes=1 << 40, free_bytes=1 << 40, pcie_bytes_per_s=r * GB) for i, r in ((0, 1), (1, 4))
    )
    topology = Topology(nodes=(replace(one_disk("n0", disk=1000 * GB), gpus=(slow, fast)),))
    manifest = checkpoint(64)
    least = lower_bound(manifest, demands_of(manifest, Parallel(), ROWS), CostModel(topology), chunk_bytes=MIB)
    assert least.resource == "host to device"
    assert least.seconds == pytest.approx(64 * MIB / (4 * GB), rel=1e-3)


def test_keeping_together_costs_what_one_node_reads_alone() -> None:
    topology = Topology(nodes=tuple(one_disk(f"n{i}", gpus=2) for i in range(2)))
    manifest, parallel = checkpoint(64), Parallel(tp=2)
    demands = demands_of(manifest, parallel, ROWS)
    plan = build_plan(manifest, demands, topology, config=SMALL)
    model = CostModel(topology)
    apart = lower_bound(manifest, demands, model, chunk_bytes=MIB)
    together = lower_bound(manifest, demands, model, chunk_bytes=MIB, together=kept_together(plan, topology))
    assert together.seconds == pytest.approx(2 * apart.seconds, rel=1e-3)
    assert plan_bound(plan, model).seconds == pytest.approx(together.seconds, rel=1e-3)


def test_what_fits_nowhere_takes_for_ever() -> None:
    topology = Topology(nodes=(one_disk("n0"),))
    manifest = checkpoint(1)
    demands = demands_of(manifest, Parallel(tp=2), ROWS)
    assert lower_bound(manifest, demands, CostModel(topology)).seconds == float("inf")


def test_three_stages_on_two_nodes_are_two_on_one_of_them() -> None:
    topology = Topology(nodes=tuple(one_disk(f"n{i}", gpus=2) for i in range(2)))
    manifest, parallel = layered(), Parallel(pp=3)
    demands = demands_of(manifest, parallel, LAYERS)
    model, stage_s = CostModel(topology), 9 * MIB / GB
    assert search(manifest, demands, model, 1.98 * stage_s, chunk_bytes=MIB).is_proven
    assert not search(manifest, demands, model, 2.02 * stage_s, chunk_bytes=MIB).is_proven


def test_between_two_others_a_node_hands_on_what_it_does_not_read() -> None:
    topology = Topology(nodes=tuple(one_disk(f"n{i}", disk=100 * GB, nic=GB) for i in range(3)))
    manifest, demands = checkpoint(64), demands_of(checkpoint(64), Parallel(dp=3), COPIES)
    model, all_s = CostModel(topology), 64 * MIB / GB
    assert lower_bound(manifest, demands, model, chunk_bytes=MIB).seconds < 0.7 * all_s  # two thirds come in
    assert search(manifest, demands, model, 0.98 * all_s, chunk_bytes=MIB).is_proven
    assert not search(manifest, demands, model, 1.02 * all_s, chunk_bytes=MIB).is_proven


def test_columns_are_cut_wherever_they_are_read() -> None:
    node = one_disk("n0", gpus=2, disk=1000 * GB)
    slow = Topology(nodes=(replace(node, host=replace(node.host, memory_bytes_per_s=10 * GB)),))
    columns = (Rule(pattern="*", placement=Shard(dim=1), stage="all"),)
    by_rows, by_columns = (
        lower_bound(
            checkpoint(64),
            demands_of(checkpoint(64), Parallel(tp=2), rules),
            CostModel(slow),
            chunk_bytes=MIB,
            direct=False,
        )
        for rules in (ROWS, columns)
    )
    # Two bytes more of memory's rate for each.
    assert by_columns.by_resource["host memory"] - by_rows.by_resource["host memory"] == pytest.approx(
        2 * 64 * MIB / (10 * GB), rel=0.05
    )


def test_a_search_that_is_cut_short_proves_nothing() -> None:
    topology = Topology(nodes=tuple(one_disk(f"n{i}", gpus=2) for i in range(2)))
    demands = demands_of(layered(), Parallel(pp=3), LAYERS)
    result = search(layered(), demands, CostModel(topology), 10 * MIB / GB, chunk_bytes=MIB, max_steps=1)
    assert (result.is_proven, result.candidate) == (False, None)


class AnyConsumer:
    """Readers drawn from the consumers."""

    name = "any"

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def route(self, request: RoutingRequest) -> RoutingDecision:
        first = request.first_node.tolist()
        node = [int(request.nodes[begin + self._draw(end - begin)]) for begin, end in itertools.pairwise(first)]
        direct = (request.only_rank >= 0) & request.allow_direct
        zeros = np.zeros(len(node), np.int64)
        return RoutingDecision(direct=direct, node=np.array(node, np.int64), reason=zeros, reasons=("any",))


@st.composite
def hardware(draw: st.DrawFn) -> Topology:
    def rate(*choices: float) -> float:
        return draw(st.sampled_from(choices)) * GB

    has_disks = draw(st.booleans())
    nodes = []
    for index in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 4))
        gpus = tuple(
            Gpu(
                index=i,
                memory_bytes=64 * MIB,
                free_bytes=draw(st.sampled_from([20, 40, 64])) * MIB,
                nvlink_group=draw(st.sampled_from([None, 0])),
                numa=i // 2,
                pcie_bytes_per_s=rate(1, 2),
            )
            for i in range(count)
        )
        switches = (Switch(gpus=(0, 1), bytes_per_s=rate(1, 2)),) if count > 1 and draw(st.booleans()) else ()
        nodes.append(
            Node(
                id=NodeId(f"n{index}"),
                gpus=gpus,
                memory_bytes=1 << 34,
                pool_bytes=1 << 33,
                disks=(Disk(name="d", bytes_per_s=rate(0.5, 1, 3)),) if has_disks else (),
                nics=(Nic(name="n", bytes_per_s=rate(0.3, 1, 3)),),
                rack=draw(st.sampled_from([None, "x", "y", "z"])),
                switches=switches,
            )
        )
    racks = (Rack(name="x", uplink_bytes_per_s=rate(0.3, 2)), Rack(name="y", uplink_bytes_per_s=rate(0.3, 2)))
    rack = draw(st.sampled_from([None, "x", "z"]))
    storage = None if has_disks else Storage(bytes_per_s=rate(0.5, 2), rack=rack)
    return Topology(nodes=tuple(nodes), racks=racks, storage=storage)


def layered() -> Manifest:
    infos, at = {}, 0
    for layer in range(3):
        for leaf, mib in (("rows", 5), ("columns", 3), ("norm", 1)):
            name = f"model.layers.{layer}.{leaf}"
            infos[name] = TensorInfo(name, DType.U8, (16, mib * MIB // 16), 0, at, at + mib * MIB)
            at += mib * MIB
    files = (FileInfo(path="m.safetensors", size_bytes=at, data_begin=0),)
    return Manifest(uri="/m", root="/m", files=files, tensors=infos)


def planned(topology: Topology, demands: Demands, policy: str, config: Config, data: st.DataObject) -> Plan | None:
    anywhere = AnyConsumer(lambda count: data.draw(st.integers(0, count - 1))) if data.draw(st.booleans()) else None
    try:
        return build_plan(layered(), demands, topology, config=config, placement=PLACEMENT[policy](), routing=anywhere)
    except CapacityError:
        return None


@settings(max_examples=60)
@given(
    topology=hardware(),
    mesh=st.sampled_from(
        [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 3, 1), (1, 3, 2), (1, 1, 4)]
    ),
    policy=st.sampled_from(sorted(PLACEMENT)),
    direct=st.booleans(),
    data=st.data(),
)
def test_no_plan_of_any_policy_is_below_the_bound(
    topology: Topology, mesh: tuple[int, int, int], policy: str, direct: bool, data: st.DataObject
) -> None:
    tp, pp, dp = mesh
    if topology.num_gpus < tp * pp * dp:
        return
    demands = demands_of(layered(), Parallel(tp=tp, pp=pp, dp=dp), LAYERS)
    config = replace(SMALL, routing=RoutingConfig(force_pool=not direct, min_direct_bytes=0))
    plan = planned(topology, demands, policy, config, data)
    if plan is None:
        return
    model = CostModel(topology)
    found = plan_bound(plan, model).seconds
    needs = plan.tables["ranks"]["arena_bytes"].to_pylist()
    for together in ((), kept_together(plan, topology)):
        least = lower_bound(
            layered(), demands, model, rank_bytes=needs, chunk_bytes=MIB, direct=direct, together=together
        )
        assert found >= least.seconds * (1 - 1e-6)
        # What has been done cannot be refuted.
        late = found * (1 + 1e-6)
        assert not search(
            layered(), demands, model, late, rank_bytes=needs, chunk_bytes=MIB, direct=direct, together=together
        ).is_proven


def fixed_node(index: int, gpus: tuple[Gpu, ...], *, disk: float, nic: float) -> Node:
    return Node(
        id=NodeId(f"n{index}"),
        gpus=gpus,
        memory_bytes=1 << 34,
        pool_bytes=1 << 33,
        disks=(Disk(name="d", bytes_per_s=disk * GB),),
        nics=(Nic(name="n", bytes_per_s=nic * GB),),
    )


def fixed_gpus(*nvlink: int | None) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(index=i, memory_bytes=64 * MIB, free_bytes=20 * MIB, nvlink_group=group, numa=i // 2, pcie_bytes_per_s=GB)
        for i, group in enumerate(nvlink)
    )


@pytest.mark.parametrize(
    ("nodes", "parallel", "policy"),
    [
        # Two copies of a gang on one node, one over NVLink and one not: neither sends anything to another node.
        (
            (
                fixed_node(0, fixed_gpus(None), disk=0.5, nic=0.3),
                fixed_node(1, fixed_gpus(None, None, 0, 0), disk=1, nic=0.3),
            ),
            Parallel(tp=2, dp=2),
            "best_fit",
        ),
        # Of what comes to a rank behind a slow network, a third is wanted by nobody else, and not sent on.
        (
            (
                fixed_node(0, fixed_gpus(None, None), disk=3, nic=3),
                fixed_node(1, fixed_gpus(None), disk=1, nic=0.3),
                fixed_node(2, fixed_gpus(None), disk=1, nic=1),
            ),
            Parallel(tp=4),
            "exact",
        ),
    ],
)
def test_plans_that_were_below_the_bound_once(nodes: tuple[Node, ...], parallel: Parallel, policy: str) -> None:
    topology, demands = Topology(nodes=nodes), demands_of(layered(), parallel, LAYERS)
    config = replace(SMALL, routing=RoutingConfig(force_pool=True))
    plan = build_plan(layered(), demands, topology, config=config, placement=PLACEMENT[policy]())
    model = CostModel(topology)
    needs = plan.tables["ranks"]["arena_bytes"].to_pylist()

    for together in ((), kept_together(plan, topology)):
        least = lower_bound(
            layered(), demands, model, rank_bytes=needs, chunk_bytes=MIB, direct=False, together=together
        )
        assert plan_bound(plan, model).seconds >= least.seconds * (1 - 1e-6)


@settings(max_examples=60)
@given(
    topology=hardware(),
    mesh=st.sampled_from([(2, 1, 1), (1, 1, 2), (2, 1, 2), (1, 3, 1), (1, 3, 2), (1, 1, 4), (4, 1, 1)]),
    policy=st.sampled_from(["round_robin", "best_fit", "topology_blind"]),
    direct=st.booleans(),
    data=st.data(),
)
def test_no_weights_refute_what_is_done(
    topology: Topology, mesh: tuple[int, int, int], policy: str, direct: bool, data: st.DataObject
) -> None:
    tp, pp, dp = mesh
    if topology.num_gpus < tp * pp * dp:
        return
    demands = demands_of(layered(), Parallel(tp=tp, pp=pp, dp=dp), LAYERS)
    config = replace(SMALL, routing=RoutingConfig(force_pool=not direct, min_direct_bytes=0))
    plan = planned(topology, demands, policy, config, data)
    if plan is None:
        return
    model = CostModel(topology)
    request = _request(layered(), demands, model, None, MIB, direct=direct)
    assert not is_refuted(request, nodes_of(plan, topology), plan_bound(plan, model).seconds * (1 + 1e-6), rounds=60)


def nodes_of(plan: Plan, topology: Topology) -> list[int]:
    names = [node.id for node in topology.nodes]
    return [names.index(name) for name in plan.tables["ranks"]["node"].to_pylist()]


# Nodes, and what their disks, networks and uplinks do; each is the limit of one.
@pytest.mark.parametrize(
    ("num_nodes", "disk", "nic", "uplink"), [(4, 0.5, 2, 0.2), (4, 2, 0.2, 2), (2, 2, 0.2, 2), (3, 0.2, 2, 2)]
)
def test_no_readers_at_all_are_sooner_than_what_weights_refute(
    num_nodes: int, disk: float, nic: float, uplink: float
) -> None:
    nodes = [replace(one_disk(f"n{i}", disk=disk * GB, nic=nic * GB), rack="xxyy"[i]) for i in range(num_nodes)]
    racks = tuple(Rack(name=name, uplink_bytes_per_s=uplink * GB) for name in "xy")
    topology, manifest = Topology(nodes=tuple(nodes), racks=racks), checkpoint(64)
    demands, model = demands_of(manifest, Parallel(dp=num_nodes), COPIES), CostModel(topology)
    request = _request(manifest, demands, model, None, 4 * MIB, direct=True)
    config = Config(io=IoConfig(chunk_bytes=4 * MIB, extent_bytes=4 * MIB))
    best = np.inf
    for shares in itertools.product(range(5), repeat=num_nodes):
        if sum(shares) != 4:
            continue
        # By quarters of the extents, who reads: all ways there are.
        readers = np.repeat(np.arange(num_nodes), shares)
        plan = build_plan(manifest, demands, topology, config=config, routing=Fixed(readers))
        where = nodes_of(plan, topology)
        found = plan_bound(plan, model).seconds
        assert not is_refuted(request, where, found, rounds=60)
        best = min(best, found)
    # Thirds would be sooner than quarters on three nodes.
    assert is_refuted(request, where, best * 0.6)


class Fixed:
    """Readers by turns."""

    name = "fixed"

    def __init__(self, readers: Int64Array) -> None:
        self._readers = readers

    def route(self, request: RoutingRequest) -> RoutingDecision:
        num = len(request.first_node) - 1
        node = self._readers[np.arange(num) % len(self._readers)].astype(np.int64)
        zeros = np.zeros(num, np.int64)
        return RoutingDecision(direct=zeros.astype(np.bool_), node=node, reason=zeros, reasons=("fixed",))
