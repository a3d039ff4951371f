"""Loads in virtual time: closed forms where one thing is slow, and what must hold for every load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamind_ray.config import Config, IoConfig
from megamind_ray.core.event_log import check
from megamind_ray.core.events import LoadStarted
from megamind_ray.core.instructions import CompleteLoad
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.core.report import LoadReport
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.core.timeline import Timeline
from megamind_ray.core.topology import Nic, Storage, Topology
from megamind_ray.errors import CapacityError, RequestError
from megamind_ray.planning import build_demands, build_plan, pool_budget_bytes
from megamind_ray.sim import simulate_plan
from megamind_ray.units import KIB, MIB

MakePlan: TypeAlias = Callable[..., Plan]
MakeTopology: TypeAlias = Callable[..., Topology]
MESHES = [Parallel(), Parallel(tp=4), Parallel(pp=2, tp=2), Parallel(dp=2, tp=2)]


def with_slow_network(topology: Topology, bytes_per_s: float) -> Topology:
    nics = (Nic(name="eth0", bytes_per_s=bytes_per_s),)
    return replace(topology, nodes=tuple(replace(node, nics=nics) for node in topology.nodes))


def with_shared_storage(topology: Topology, storage: Storage) -> Topology:
    return replace(topology, storage=storage, nodes=tuple(replace(node, disks=()) for node in topology.nodes))


@pytest.mark.parametrize("parallel", MESHES, ids=str)
@pytest.mark.parametrize("referenced", [False, True])
def test_every_byte_arrives_once_and_no_resource_gives_more_than_it_has(
    parallel: Parallel, referenced: bool, plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    topology = topology_of()
    plan = plan_of(parallel, topology, referenced=referenced)
    report = simulate_plan(plan, topology, config, exact=True).report
    assert report.kind == "simulation"
    assert report.bytes_from_storage == plan.bytes_from_storage
    assert report.bytes_to_device == plan.bytes_to_device
    assert report.bytes_replicated == plan.bytes_replicated
    assert report.verified == ("reference" if referenced else "transit")
    assert all(0 < share <= 1 for share in report.utilisation.values())
    assert report.lower_bound_s is not None
    assert report.seconds["total"] >= report.lower_bound_s > 0


def test_a_slow_disk_is_what_a_load_takes(plan_of: MakePlan, topology_of: MakeTopology, config: Config) -> None:
    topology = topology_of(1, 2, disk=50e6)
    plan = plan_of(Parallel(tp=2), topology)
    report = simulate_plan(plan, topology, config, exact=True).report
    reading_s = plan.bytes_from_storage / 50e6
    assert report.lower_bound_s == pytest.approx(reading_s)
    # What is left is one extent's way through the pool, and some calls.
    assert reading_s < report.seconds["total"] < reading_s + 0.2
    assert report.bottleneck.startswith("disks of n0 are busy ")
    assert "another disk" in report.bottleneck
    assert report.utilisation["disks of n0"] > 0.9


def test_a_slow_network_is_what_a_replicated_load_takes(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    topology = with_slow_network(topology_of(2, 1), 50e6)
    plan = plan_of(Parallel(dp=2), topology)
    report = simulate_plan(plan, topology, config, exact=True).report
    assert report.bytes_over_network == plan.bytes_total, "each node sends its half to the other one"
    sending_s = plan.bytes_total / 2 / 50e6
    assert sending_s < report.seconds["total"] < sending_s * 1.3
    assert report.bottleneck.startswith("network ")
    assert "and 1 more like it" in report.bottleneck


def test_blocks_that_every_node_needs_are_sent_once_to_each(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    topology = topology_of(4, 1)
    plan = plan_of(Parallel(dp=4), topology)
    report = simulate_plan(plan, topology, config, exact=True).report
    assert report.bytes_over_network == 3 * plan.bytes_total


def test_shared_storage_is_shared_by_all_that_read(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    storage = Storage(bytes_per_s=80e6, latency_s=0.01)
    topology = with_shared_storage(topology_of(2, 2), storage)
    plan = plan_of(Parallel(tp=4), topology, root="s3://models/llama")
    report = simulate_plan(plan, topology, config, exact=True).report
    reading_s = plan.bytes_from_storage / 80e6
    assert reading_s < report.seconds["total"] < reading_s * 1.2
    assert report.bottleneck.startswith("shared storage is busy")


def test_requests_that_are_slow_one_by_one_are_made_side_by_side(plan_of: MakePlan, topology_of: MakeTopology) -> None:
    """One node, 1 MiB chunks at 10 MB/s each: 8 in flight give 80 MB/s, 4 give 40."""
    storage = Storage(bytes_per_s=10e9, latency_s=0.0, request_bytes_per_s=10e6)
    topology = with_shared_storage(topology_of(1, 2), storage)
    plan = plan_of(Parallel(tp=2), topology, root="s3://models/llama", force_pool=True)
    for num_threads in (4, 8):
        io = IoConfig(chunk_bytes=MIB, extent_bytes=4 * MIB, remote_threads=num_threads)
        report = simulate_plan(plan, topology, Config(io=io), exact=True).report
        reading_s = plan.bytes_from_storage / (num_threads * 10e6)
        assert reading_s * 0.99 < report.seconds["total"] < reading_s * 1.2
        assert "more io.remote_threads would help most" in report.bottleneck


def test_a_storage_that_answers_few_requests_is_the_bottleneck(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    storage = Storage(bytes_per_s=10e9, latency_s=0.0, requests_per_s=50.0)
    topology = with_shared_storage(topology_of(1, 2), storage)
    plan = plan_of(Parallel(tp=2), topology, root="s3://models/llama")
    report = simulate_plan(plan, topology, config, exact=True).report
    assert report.lower_bound_s == pytest.approx(plan.bytes_from_storage / MIB / 50.0)
    assert report.seconds["total"] >= plan.bytes_from_storage / MIB / 50.0
    assert report.bottleneck.startswith("requests to shared storage are busy")


def _without_ray(topology: Topology) -> Topology:
    nodes = (replace(node, host=replace(node.host, put_s=0.0, call_s=0.0, take_s=0.0)) for node in topology.nodes)
    return replace(topology, nodes=tuple(nodes))


def test_a_pool_that_holds_little_is_never_more_than_full_and_never_stops_a_load(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    """Two nodes that need each other's blocks, with room for one or two extents each."""
    peaks = {}
    for name, pool in (("wide", 1 << 30), ("narrow", 24 * MIB)):
        topology = topology_of(2, 1, pool=pool, disk=20e9)
        plan = plan_of(Parallel(dp=2), topology)
        simulation = simulate_plan(plan, topology, config, exact=True)
        assert simulation.report.bytes_to_device == plan.bytes_to_device
        held = simulation.timeline.samples.filter(pc.field("series").isin(["bytes n0/host", "bytes n1/host"]))
        peaks[name] = max(held["value"].to_pylist())
        assert 0 < peaks[name] <= pool_budget_bytes(topology.nodes[0], config)
    assert peaks["narrow"] < peaks["wide"]


def test_an_extent_that_fits_no_pool_is_refused(plan_of: MakePlan, topology_of: MakeTopology, config: Config) -> None:
    plan = plan_of(Parallel(tp=2), topology_of(1, 2))
    with pytest.raises(CapacityError, match="do not fit its pool"):
        simulate_plan(plan, topology_of(1, 2, pool=MIB), config)


def test_puts_of_an_agent_wait_for_each_other(plan_of: MakePlan, topology_of: MakeTopology, config: Config) -> None:
    topology = topology_of(1, 2, disk=50e9)
    plan = plan_of(Parallel(tp=2), topology, force_pool=True)
    node = topology.nodes[0]  # slower than was planned with: else extents would be longer
    topology = replace(topology, nodes=(replace(node, host=replace(node.host, put_s=20 * node.host.put_s)),))
    report = simulate_plan(plan, topology, config, exact=True).report
    put_s = topology.nodes[0].host.put_s * len(plan.tables["blocks"])
    assert report.seconds["total"] >= put_s * 0.9  # block sizes are rounded
    assert "larger extents" in report.bottleneck


def test_one_thread_that_reads_is_slower_than_eight(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    topology = _without_ray(topology_of(1, 2, disk=50e9))  # puts of one agent wait for each other
    plan = plan_of(Parallel(tp=2), topology, force_pool=True)
    one = replace(config, io=replace(config.io, agent_threads=1, read_threads=1))
    reports = [simulate_plan(plan, topology, item, exact=True).report for item in (one, config)]
    assert reports[0].seconds["total"] > 2 * reports[1].seconds["total"]
    assert "more io.agent_threads would help most" in reports[0].bottleneck


def test_calls_that_cost_more_make_a_load_longer(plan_of: MakePlan, topology_of: MakeTopology, config: Config) -> None:
    times = []
    for call_s in (0.0, 0.002, 0.05):
        topology = topology_of(2, 2, call_s=call_s)
        times.append(
            simulate_plan(plan_of(Parallel(tp=4), topology), topology, config, exact=True).report.seconds["total"]
        )
    assert times == sorted(times)
    assert len(set(times)) == 3


def test_a_load_of_nothing_takes_its_calls(
    plan_of: MakePlan, topology_of: MakeTopology, manifest_of: Callable[..., Manifest], config: Config
) -> None:
    """Opening, starting, telling the agent that all is there, making sure of all ranks, closing."""
    nothing = TensorInfo("model.norm.weight", DType.BF16, (0,), 0, 1000, 1000)
    manifest = replace(manifest_of(), tensors={nothing.name: nothing})
    topology = topology_of(1, 2, call_s=0.01)
    plan = build_plan(manifest, build_demands(manifest, Parallel(tp=2)), topology, config=config)
    report = simulate_plan(plan, topology, config).report
    assert report.seconds["total"] == pytest.approx(5 * 0.01)
    assert (report.bytes_from_storage, report.lower_bound_s, report.bottleneck) == (0, 0.0, "")


def test_what_a_rank_reads_by_itself_takes_no_pool(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    topology = topology_of(1, 1)
    simulation = simulate_plan(plan_of(Parallel(), topology), topology, config, exact=True)
    (rank,) = simulation.report.ranks
    assert (rank.bytes_direct, rank.bytes_pool) == (rank.bytes_to_device, 0)
    kinds = {(row["track"], row["kind"]) for row in simulation.timeline.spans.to_pylist()}
    assert kinds == {("n0/storage", "read"), ("rank 0", "read"), ("rank 0", "copy")}


def test_the_seconds_of_a_rank_are_within_the_load(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    topology = topology_of()
    report = simulate_plan(plan_of(Parallel(tp=4), topology), topology, config, exact=True).report
    for rank in report.ranks:
        assert rank.seconds["wait"] + rank.seconds["copy"] <= rank.seconds["total"] <= report.seconds["total"]


def test_kept_blocks_take_of_the_credit_and_are_in_the_report(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    topology = topology_of(1, 2)
    plan = plan_of(Parallel(tp=2), topology, keep=True)
    simulation = simulate_plan(plan, topology, config)
    assert simulation.report.kept.num_bytes == plan.bytes_total
    limit = simulation.timeline.limits["bytes n0/host"]
    assert limit == pytest.approx(0.75 * topology.nodes[0].pool_bytes - plan.bytes_total, abs=1)


def samples_of(timeline: Timeline, series: str) -> list[tuple[float, float]]:
    rows = timeline.samples.to_pylist()
    return [(row["at_s"], row["value"]) for row in rows if row["series"] == series]


def test_the_timeline_has_the_tracks_and_series_of_a_measured_one(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    topology = topology_of()
    simulation = simulate_plan(plan_of(Parallel(dp=2, tp=2), topology, referenced=True), topology, config)
    timeline, end_s = simulation.timeline, simulation.report.seconds["total"]
    rows = timeline.spans.to_pylist()
    assert {row["track"] for row in rows} == {
        *(f"{node}/{part}" for node in ("n0", "n1") for part in ("storage", "pool", "wire")),
        *(f"rank {rank}" for rank in range(4)),
    }
    assert {row["kind"] for row in rows} == {"read", "verify", "cut", "put", "wire", "copy", "wait"}
    assert all(0 <= row["begin_s"] <= row["end_s"] <= end_s for row in rows)
    begins = [row["begin_s"] for row in rows]
    assert begins == sorted(begins)
    assert set(timeline.limits) == set(timeline.samples["series"].to_pylist())
    for series, limit in timeline.limits.items():
        values = [value for _, value in samples_of(timeline, series)]
        assert max(values) <= limit * 1.001
    assert timeline.origin == "predicted"
    assert Timeline.from_json(timeline.to_json()).spans.to_pylist() == rows


def test_series_add_up_to_the_bytes_of_the_report(plan_of: MakePlan, topology_of: MakeTopology, config: Config) -> None:
    topology = topology_of()
    simulation = simulate_plan(plan_of(Parallel(dp=2, tp=2), topology), topology, config, exact=True)
    timeline, report = simulation.timeline, simulation.report

    def moved(series: str) -> float:
        samples = samples_of(timeline, series)
        times, values = np.array([at_s for at_s, _ in samples]), np.array([value for _, value in samples])
        return float((np.diff(times) * values[:-1]).sum())

    assert sum(moved(f"bytes/s {node}/storage") for node in ("n0", "n1")) == pytest.approx(report.bytes_from_storage)
    assert sum(moved(f"bytes/s {node}/network in") for node in ("n0", "n1")) == pytest.approx(report.bytes_over_network)
    for rank in report.ranks:
        assert samples_of(timeline, f"bytes rank {rank.rank}/device")[-1][1] == rank.bytes_to_device
    for node in ("n0", "n1"):
        assert samples_of(timeline, f"bytes {node}/host")[-1][1] == 0


def test_the_event_log_begins_with_the_start_ends_with_the_end_and_replays(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    topology = topology_of()
    events = simulate_plan(plan_of(Parallel(tp=4), topology), topology, config).events
    assert isinstance(events.entries[0].event, LoadStarted)
    assert events.entries[-1].instructions == (CompleteLoad(),)
    assert check(events) is None


def test_equal_simulations_are_equal(plan_of: MakePlan, topology_of: MakeTopology, config: Config) -> None:
    topology = topology_of()
    plan = plan_of(Parallel(dp=2, tp=2), topology)
    first, second = (simulate_plan(plan, topology, config) for _ in range(2))
    assert first.report == second.report
    assert first.timeline.spans.equals(second.timeline.spans)


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_the_default_resolution_is_close_to_exact(
    parallel: Parallel, plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    topology = topology_of()
    plan = plan_of(parallel, topology)
    exact, usual = (
        simulate_plan(plan, topology, config, exact=value).report.seconds["total"] for value in (True, False)
    )
    # Over two nodes the two fetches from a peer fall into step, or do not, by less than the resolution.
    assert usual == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_merged_extents_are_close_to_whole_ones_and_the_report_says_so(
    parallel: Parallel, plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    """A few hundred extents, as small as a large load's are beside the whole."""
    fine = replace(config, io=replace(config.io, chunk_bytes=128 * KIB, extent_bytes=256 * KIB))
    topology = topology_of(put_s=1e-4, call_s=1e-4, take_s=1e-5)
    plan = plan_of(parallel, topology, config=fine)

    def run(max_flows: int) -> LoadReport:
        return simulate_plan(plan, topology, fine, max_flows=max_flows).report

    whole, merged = run(10**6), run(2500)
    assert merged.bytes_to_device == whole.bytes_to_device
    assert merged.bytes_from_storage == whole.bytes_from_storage
    assert merged.bytes_over_network == whole.bytes_over_network
    assert merged.lower_bound_s == pytest.approx(whole.lower_bound_s, rel=0.01)
    assert merged.seconds["total"] == pytest.approx(whole.seconds["total"], rel=0.2)
    assert [note for note in merged.notes if "were simulated as one" in note]
    assert not [note for note in whole.notes if "were simulated as one" in note]


def test_a_plan_for_other_hardware_is_refused(plan_of: MakePlan, topology_of: MakeTopology, config: Config) -> None:
    plan = plan_of(Parallel(tp=4), topology_of(2, 2))
    with pytest.raises(RequestError, match=r"rank 2 of the plan is on GPU n1:0, which topology 'small' lacks"):
        simulate_plan(plan, topology_of(1, 2), config)


def test_faster_hardware_of_the_same_shape_is_welcome(
    plan_of: MakePlan, topology_of: MakeTopology, config: Config
) -> None:
    plan = plan_of(Parallel(tp=4), topology_of(disk=1e8))
    slow, fast = (simulate_plan(plan, topology_of(disk=disk), config).report.seconds["total"] for disk in (1e8, 1e9))
    assert fast < slow / 2


@settings(deadline=None, max_examples=25)
@given(
    parallel=st.sampled_from(MESHES),
    disk=st.sampled_from([50e6, 1e9, 20e9]),
    network=st.sampled_from([50e6, 10e9]),
    pool=st.sampled_from([48 * MIB, 1 << 30]),
    force_pool=st.booleans(),
    referenced=st.booleans(),
    exact=st.booleans(),
)
def test_no_load_is_faster_than_its_bound_whatever_the_hardware(
    parallel: Parallel,
    disk: float,
    network: float,
    pool: int,
    force_pool: bool,
    referenced: bool,
    exact: bool,
    plan_of: MakePlan,
    topology_of: MakeTopology,
    config: Config,
) -> None:
    topology = with_slow_network(topology_of(disk=disk, pool=pool), network)
    plan = plan_of(parallel, topology, force_pool=force_pool, referenced=referenced)
    report = simulate_plan(plan, topology, config, exact=exact).report
    assert report.lower_bound_s is not None
    assert report.seconds["total"] >= report.lower_bound_s * (1 - 1e-9)
    assert report.bytes_to_device == plan.bytes_to_device
    assert max(report.utilisation.values()) <= 1
