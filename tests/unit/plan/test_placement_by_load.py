"""Placements that look at what a load costs, and the baselines that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamind_ray.core.ids import NodeId
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Disk, Gpu, Nic, Node, Switch, Topology
from megamind_ray.planning.cost import CostModel
from megamind_ray.planning.transfers import transfer_costs
from megamind_ray.policies.costs import TransferLoad
from megamind_ray.policies.placement.base import PlacementPolicy, PlacementRequest
from megamind_ray.policies.placement.best_fit import BestFitDecreasing
from megamind_ray.policies.placement.descent import descend
from megamind_ray.policies.placement.domains import slots
from megamind_ray.policies.placement.exact import Exact, solve
from megamind_ray.policies.placement.largest_first import LargestFirst
from megamind_ray.policies.placement.locality import groups_of, is_kept
from megamind_ray.policies.placement.makespan import Makespan
from megamind_ray.policies.placement.refutation import refute
from megamind_ray.policies.placement.round_robin import RoundRobin
from megamind_ray.policies.placement.topology_blind import TopologyBlind
from megamind_ray.policies.registry import PLACEMENT

GB, GIB = 10**9, 1 << 30
MakeNode = Callable[..., Node]


def plain(name: str, *free_gib: float, disk: float = 1.0, nic: float = 100.0, pcie: float = 50.0) -> Node:
    return Node(
        id=NodeId(name),
        gpus=tuple(
            Gpu(index=i, memory_bytes=80 * GIB, free_bytes=int(free * GIB), pcie_bytes_per_s=pcie * GB)
            for i, free in enumerate(free_gib)
        ),
        memory_bytes=512 * GIB,
        pool_bytes=64 * GIB,
        disks=(Disk(name="d", bytes_per_s=disk * GB),),
        nics=(Nic(name="n", bytes_per_s=nic * GB),),
    )


def request_for(parallel: Parallel, rank_gb: list[float], *nodes: Node) -> PlacementRequest:
    """Ranks that each need bytes of their own."""
    topology = Topology(nodes=nodes)
    world = parallel.world
    each = np.arange(world + 1, dtype=np.int64)
    nbytes = np.array(rank_gb) * GB
    load = TransferLoad(
        first_rank=each, ranks=each[:-1], first_part=each, part_set=each[:-1], part_bytes=nbytes, class_bytes=nbytes
    )
    return PlacementRequest(
        parallel=parallel,
        rank_bytes=tuple(int(size) for size in nbytes),
        topology=topology,
        costs=transfer_costs(CostModel(topology)),
        load=load,
    )


def places(policy: PlacementPolicy, request: PlacementRequest) -> list[str]:
    return [str(seat) for seat in policy.place(request).seats]


def seconds(policy: PlacementPolicy, request: PlacementRequest) -> float:
    assert request.costs is not None
    assert request.load is not None
    order = {(slot.node.id, slot.gpu.index): slot.order for slot in slots(request.topology)}
    seats = policy.place(request).seats
    gpus = [order[seat.node, seat.gpu] for seat in seats if seat is not None]
    return Makespan(request.costs, request.load, len(gpus)).seconds(np.array(gpus, np.int64))


def test_the_node_that_loads_the_mesh_soonest_is_taken_though_another_is_tighter() -> None:
    slow, fast = plain("slow", 20, 20), plain("fast", 80, 80, disk=4)
    assert places(BestFitDecreasing(), request_for(Parallel(tp=2), [10, 10], slow, fast)) == ["fast:0", "fast:1"]


def test_of_nodes_that_load_alike_the_tighter_is_taken() -> None:
    roomy, tight = plain("roomy", 80, 80), plain("tight", 20, 20)
    assert places(BestFitDecreasing(), request_for(Parallel(tp=2), [10, 10], roomy, tight)) == ["tight:0", "tight:1"]


def test_a_mesh_that_one_node_holds_stays_there_though_two_would_read_it_sooner() -> None:
    nodes = plain("a", 80, 80), plain("b", 80, 80)
    assert places(BestFitDecreasing(), request_for(Parallel(pp=2), [10, 10], *nodes)) == ["a:0", "a:1"]


def test_stages_are_dealt_by_the_speed_of_the_disks() -> None:
    slow, fast = plain("slow", 80, 80, disk=1), plain("fast", 80, 80, 80, disk=3)
    seats = places(BestFitDecreasing(), request_for(Parallel(pp=4), [10] * 4, slow, fast))
    assert sorted(seat.split(":")[0] for seat in seats) == ["fast", "fast", "fast", "slow"]


def test_ranks_behind_a_slow_switch_are_avoided() -> None:
    node = replace(plain("n0", 80, 80, 80, 80, disk=1000, pcie=50), switches=(Switch(gpus=(0, 1), bytes_per_s=5 * GB),))
    assert places(BestFitDecreasing(), request_for(Parallel(tp=2), [10, 10], node)) == ["n0:2", "n0:3"]


def test_the_largest_rank_gets_a_fast_link() -> None:
    node = plain("n0", 80, 80, 80, disk=1000)
    gpus = (replace(node.gpus[0], pcie_bytes_per_s=5 * GB), *node.gpus[1:])
    seats = places(BestFitDecreasing(), request_for(Parallel(pp=3), [30, 3, 30], replace(node, gpus=gpus)))
    assert seats[1] == "n0:0"


def test_equally_busy_nodes_give_way_to_idle_ones() -> None:
    nodes = [plain(f"n{i}", 80, 80) for i in range(6)]
    seats = places(BestFitDecreasing(), request_for(Parallel(pp=6), [10] * 6, *nodes))
    assert len({seat.split(":")[0] for seat in seats}) == 6


def test_a_seat_says_within_which_time_its_node_loads() -> None:
    slow, fast = plain("slow", 80, 80, disk=1), plain("fast", 80, 80, 80, disk=3)
    decision = BestFitDecreasing().place(request_for(Parallel(pp=4), [10] * 4, slow, fast))
    assert all(seat is not None and "that load within 10" in seat.reason for seat in decision.seats)


def test_the_exact_search_is_no_slower_and_no_looser_than_best_fit() -> None:
    nodes = plain("a", 80, 80, disk=2), plain("b", 40, 40, disk=3), plain("c", 80, disk=1)
    request = request_for(Parallel(pp=4), [20, 10, 15, 5], *nodes)
    assert seconds(Exact(), request) <= seconds(BestFitDecreasing(), request) * (1 + 1e-9)


def test_the_exact_search_finds_the_optimum() -> None:
    nodes = plain("a", 80, 80, disk=1), plain("b", 80, 80, disk=1)
    request = request_for(Parallel(pp=4), [8, 7, 6, 5], *nodes)
    every = slots(request.topology)
    worst = [every[0], every[1], every[2], every[3]]
    solution = solve(request, worst)
    # 8 + 5 on one node, 7 + 6 on the other.
    assert solution.is_proven
    assert solution.seconds == pytest.approx(13.0)


@settings(max_examples=40)
@given(
    rank_gb=st.lists(st.sampled_from([2.0, 3.0, 5.0, 8.0]), min_size=2, max_size=5),
    disks=st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=3),
    data=st.data(),
)
def test_the_exact_optimum_is_not_refuted_and_anything_sooner_is(
    rank_gb: list[float], disks: list[float], data: st.DataObject
) -> None:
    free = [data.draw(st.sampled_from([(80.0,), (80.0, 80.0), (80.0,) * 3])) for _ in disks]
    nodes = [plain(f"n{index}", *free[index], disk=disk) for index, disk in enumerate(disks)]
    request = request_for(Parallel(pp=len(rank_gb)), rank_gb, *nodes)
    every = slots(request.topology)
    if len(every) < len(rank_gb):
        return
    solution = solve(request, every[: len(rank_gb)], max_steps=100_000)
    assert solution.is_proven
    assert not refute(request, (), solution.seconds * (1 + 1e-5)).is_proven
    # Stages of their own, so whoever reads is who needs: what is looked at is all that counts.
    assert refute(request, (), solution.seconds * 0.999).is_proven


def copied(*nodes: Node) -> PlacementRequest:
    """Two stages of 10 GB, two copies of each."""
    request = request_for(Parallel(pp=2, dp=2), [10] * 4, *nodes)
    load = TransferLoad(
        first_rank=np.array([0, 2, 4]),
        ranks=np.arange(4),
        first_part=np.arange(3),
        part_set=np.arange(2),
        part_bytes=np.full(2, 10.0 * GB),
        class_bytes=np.full(2, 10.0 * GB),
    )
    return replace(request, load=load)


def improved(request: PlacementRequest, taken: list[int], max_steps: int) -> tuple[list[int], float, float]:
    """By rank its node after so many steps, and the seconds before and after."""
    assert request.costs is not None
    assert request.load is not None
    every = slots(request.topology)
    makespan = Makespan(request.costs, request.load, request.parallel.world)
    better = descend(request, every, [every[at] for at in taken], makespan, (), 0.0, max_steps)
    before, after = (
        makespan.seconds(np.array(orders, np.int64)) for orders in (taken, [slot.order for slot in better])
    )
    return [slot.node_index for slot in better], before, after


def test_copies_of_a_stage_are_brought_together_where_networks_are_slow() -> None:
    nodes = [plain(name, 80, 80, disk=10, nic=0.5) for name in "abc"]
    # Stage 0 on a and c, stage 1 on b and c: each change alone leaves one of the stages on two nodes.
    where, before, after = improved(copied(*nodes), [0, 4, 2, 5], max_steps=2_000)
    assert before > 10
    assert after == pytest.approx(1, rel=1e-2)
    assert where[0] == where[1] != where[2] == where[3]


def test_without_steps_left_a_placement_stays_as_it_is() -> None:
    nodes = [plain(name, 80, 80, disk=10, nic=0.5) for name in "abc"]
    where, before, after = improved(copied(*nodes), [0, 4, 2, 5], max_steps=0)
    assert (where, after) == ([0, 2, 1, 2], before)


@settings(max_examples=40)
@given(
    rank_gb=st.lists(st.sampled_from([2.0, 3.0, 5.0, 8.0]), min_size=2, max_size=5),
    disks=st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=3),
    data=st.data(),
)
def test_from_any_placement_some_hundred_changes_lead_near_the_optimum(
    rank_gb: list[float], disks: list[float], data: st.DataObject
) -> None:
    nodes = [plain(f"n{index}", *[80] * 3, disk=disk) for index, disk in enumerate(disks)]
    request = request_for(Parallel(pp=len(rank_gb)), rank_gb, *nodes)
    every = slots(request.topology)
    taken = data.draw(st.permutations(range(len(every))))[: len(rank_gb)]
    _, before, after = improved(request, taken, max_steps=10_000)
    optimum = solve(request, every[: len(rank_gb)], max_steps=100_000)
    assert optimum.is_proven
    assert after <= before
    assert after == pytest.approx(optimum.seconds, rel=1e-3)


def test_a_search_that_is_cut_short_says_so_and_gives_the_best_it_has() -> None:
    nodes = plain("a", 80, 80, disk=1), plain("b", 80, 80, disk=1)
    request = request_for(Parallel(pp=4), [8, 7, 6, 5], *nodes)
    every = slots(request.topology)
    solution = solve(request, every, max_steps=2)
    assert not solution.is_proven
    assert solution.seconds == pytest.approx(15.0)


def test_groups_are_kept_by_what_is_as_close_and_not_by_what_is_looser() -> None:
    topology = Topology(nodes=(plain("a", 80, 80), plain("b", 80, 80)))
    every = slots(topology)
    groups = groups_of(Parallel(tp=2, pp=2), [every[0], every[1], every[2], every[3]])
    assert is_kept(groups, [every[3], every[2], every[0], every[1]])
    assert not is_kept(groups, [every[0], every[2], every[1], every[3]])


def test_round_robin_deals_ranks_over_the_nodes() -> None:
    nodes = plain("a", 80, 80), plain("b", 80, 80)
    assert places(RoundRobin(), request_for(Parallel(tp=3), [10] * 3, *nodes)) == ["a:0", "b:0", "a:1"]


def test_round_robin_passes_a_node_without_room() -> None:
    nodes = plain("a", 80), plain("b", 5), plain("c", 80)
    assert places(RoundRobin(), request_for(Parallel(tp=2), [10] * 2, *nodes)) == ["a:0", "c:0"]


def test_largest_first_gives_the_largest_rank_the_emptiest_gpu() -> None:
    assert places(LargestFirst(), request_for(Parallel(pp=2), [5, 10], plain("a", 40, 80))) == ["a:0", "a:1"]


def test_topology_blind_tears_a_gang_apart_for_a_tighter_fit() -> None:
    nodes = plain("a", 80, 20), plain("b", 20, 80)
    assert places(TopologyBlind(), request_for(Parallel(tp=2), [10, 10], *nodes)) == ["a:1", "b:0"]


@pytest.mark.parametrize("name", sorted(PLACEMENT))
def test_what_fits_nowhere_is_left_unplaced_by_every_policy(name: str) -> None:
    decision = PLACEMENT[name]().place(request_for(Parallel(tp=2), [10, 70], plain("a", 20, 60)))
    assert decision.unplaced == (1,)


@pytest.mark.parametrize("name", sorted(PLACEMENT))
def test_every_policy_has_its_name_in_the_configuration(name: str) -> None:
    assert PLACEMENT[name]().name == name
