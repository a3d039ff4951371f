"""Which GPU each rank gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.config import PlacementConfig
from megamind_ray.core.ids import NodeId
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.errors import RequestError
from megamind_ray.planning.checks import check_placement
from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest, Seat
from megamind_ray.policies.placement.best_fit import BestFitDecreasing
from megamind_ray.policies.placement.first_fit import FirstFit
from megamind_ray.policies.registry import placement_policy

GIB = 1 << 30
MakeNode = Callable[..., Node]


def request_for(parallel: Parallel, gib: list[float] | float, *nodes: Node) -> PlacementRequest:
    sizes = [gib] * parallel.world if isinstance(gib, int | float) else gib
    return PlacementRequest(
        parallel=parallel, rank_bytes=tuple(int(size * GIB) for size in sizes), topology=Topology(nodes=nodes)
    )


def places(policy: BestFitDecreasing | FirstFit, request: PlacementRequest) -> list[str]:
    return [str(seat) for seat in policy.place(request).seats]


def best_fit(parallel: Parallel, gib: list[float] | float, *nodes: Node) -> list[str]:
    return places(BestFitDecreasing(), request_for(parallel, gib, *nodes))


def test_a_gang_stays_in_one_nvlink_group_though_another_gpu_is_freer(node: MakeNode) -> None:
    assert best_fit(Parallel(tp=2), 10, node("n0", [80, 12, 12, 12], groups=2)) == ["n0:2", "n0:3"]


def test_the_tightest_group_that_fits_is_taken(node: MakeNode) -> None:
    assert best_fit(Parallel(tp=2), 10, node("n0", [80, 80, 11, 11, 40, 40], groups=3)) == ["n0:2", "n0:3"]


def test_the_tightest_node_that_holds_the_whole_mesh_is_taken(node: MakeNode) -> None:
    roomy, tight = node("roomy", [80] * 4), node("tight", [30] * 4)
    assert best_fit(Parallel(tp=2, pp=2), 20, roomy, tight) == ["tight:0", "tight:1", "tight:2", "tight:3"]


def test_a_gang_too_large_for_a_group_stays_on_a_node(node: MakeNode) -> None:
    small = [node("n0", [80, 80], groups=1), node("n1", [80] * 4, groups=2)]
    assert best_fit(Parallel(tp=4), 10, *small) == ["n1:0", "n1:1", "n1:2", "n1:3"]


def test_numa_decides_where_there_is_no_nvlink(node: MakeNode) -> None:
    plain = node("n0", [80, 12, 12, 12], groups=2)
    gpus = tuple(replace(gpu, nvlink_group=None) for gpu in plain.gpus)
    decision = BestFitDecreasing().place(request_for(Parallel(tp=2), 10, replace(plain, gpus=gpus)))
    assert [str(seat) for seat in decision.seats] == ["n0:2", "n0:3"]
    assert "NUMA node 1 of node n0" in decision.seats[0].reason  # type: ignore[union-attr]


def test_a_gang_spans_nodes_as_a_last_resort_and_as_few_as_possible(node: MakeNode) -> None:
    nodes = [node("a", [80]), node("b", [80] * 3), node("c", [80] * 2)]
    assert best_fit(Parallel(tp=4), 10, *nodes) == ["a:0", "b:0", "b:1", "b:2"]


def test_larger_ranks_go_on_gpus_with_more_free_memory(node: MakeNode) -> None:
    assert best_fit(Parallel(tp=3), [5, 30, 10], node("n0", [40, 12, 20])) == ["n0:1", "n0:0", "n0:2"]


def test_equal_ranks_follow_the_order_of_the_gpus(node: MakeNode) -> None:
    assert best_fit(Parallel(tp=3), 5, node("n0", [10, 11, 10.5])) == ["n0:0", "n0:1", "n0:2"]


def test_neighbouring_stages_share_a_node_where_they_can(node: MakeNode) -> None:
    # Both nodes have two groups of two; three stages cannot share one node, so two are on one, and they are neighbours.
    seats = best_fit(Parallel(tp=2, pp=3), 10, node("n0", [80] * 4, groups=2), node("n1", [80] * 4, groups=2))
    stage_nodes = [seats[rank].split(":")[0] for rank in (0, 2, 4)]
    assert stage_nodes[0] == stage_nodes[1] or stage_nodes[1] == stage_nodes[2]


def test_neighbouring_stages_prefer_a_rack(node: MakeNode) -> None:
    far, near = replace(node("f", [80]), rack="x"), replace(node("n", [80]), rack="y")
    full = replace(node("o", [31]), rack="y")
    # The first stage fits "o" tightest; the second then prefers "n" of the same rack to "f", which comes first.
    assert best_fit(Parallel(pp=2), [30, 29], far, near, full) == ["o:0", "n:0"]


def test_a_rank_alone_takes_the_tightest_gpu_with_or_without_nvlink(node: MakeNode) -> None:
    bare = replace(node("bare", [80]), gpus=(Gpu(index=0, memory_bytes=80 * GIB, free_bytes=11 * GIB),))
    assert best_fit(Parallel(), 10, node("n0", [80]), bare) == ["bare:0"]


def test_an_expert_parallel_stage_stays_together(node: MakeNode) -> None:
    nodes = [node("n0", [80] * 2), node("n1", [80] * 4)]
    seats = best_fit(Parallel(tp=2, dp=2, ep=4), 10, *nodes)
    assert {seat.split(":")[0] for seat in seats} == {"n1"}


def test_an_expert_parallel_stage_that_no_node_holds_keeps_its_tp_gangs_together(node: MakeNode) -> None:
    seats = best_fit(Parallel(tp=2, dp=2, ep=4), 10, node("n0", [80] * 3), node("n1", [80] * 2))
    assert [seat.split(":")[0] for seat in seats] in (["n0", "n0", "n1", "n1"], ["n1", "n1", "n0", "n0"])


def test_ranks_are_placed_one_by_one_where_gangs_would_take_each_other_s_gpus(node: MakeNode) -> None:
    # The first gang has more bytes and fits the roomy group, which alone can hold the large rank of the second.
    nodes = [node("n0", [30, 21]), node("n1", [20, 20, 5])]
    request = request_for(Parallel(tp=2, pp=2), [20, 20, 30, 5], *nodes)
    decision = BestFitDecreasing().place(request)
    assert decision.unplaced == ()
    check_placement("best_fit", request, decision)


def test_a_rank_that_fits_nowhere_is_left_unplaced(node: MakeNode) -> None:
    decision = BestFitDecreasing().place(request_for(Parallel(tp=2), [10, 70], node("n0", [20, 60])))
    assert decision.unplaced == (1,)


def test_every_seat_says_why(node: MakeNode) -> None:
    seat = BestFitDecreasing().place(request_for(Parallel(tp=1), 10, node("n0", [12]))).seats[0]
    assert seat is not None
    assert (
        seat.reason
        == "1 rank of stage 0, dp=0 (10.00 GiB): tightest fit in NVLink group 0 of node n0; 2.00 GiB stays free"
    )


def test_first_fit_takes_gpus_in_order(node: MakeNode) -> None:
    assert places(FirstFit(), request_for(Parallel(tp=2), 10, node("n0", [5, 80, 11]))) == ["n0:1", "n0:2"]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"placement.policy = 'worst_fit'.*best_fit, first_fit"):
        placement_policy(PlacementConfig(policy="worst_fit"))


@pytest.mark.parametrize(
    ("seats", "complaint"),
    [
        ((("n0", 0), ("n0", 0)), "ranks 0 and 1 both on GPU n0:0"),
        ((("n0", 0), ("n0", 7)), "rank 1 on GPU n0:7, which the topology does not have"),
        ((("n0", 1), ("n0", 0)), r"rank 0 \(10.00 GiB\) on GPU n0:1 with 5.00 GiB free"),
        ((("n0", 0),), "1 seats for 2 ranks"),
    ],
)
def test_a_wrong_proposal_is_refused_with_the_reason(
    node: MakeNode, seats: tuple[tuple[str, int], ...], complaint: str
) -> None:
    request = request_for(Parallel(tp=2), [10, 5], node("n0", [20, 5]))
    proposal = PlacementDecision(seats=tuple(Seat(node=NodeId(n), gpu=g, reason="because") for n, g in seats))
    with pytest.raises(RequestError, match=f"policy 'mine' proposed {complaint}"):
        check_placement("mine", request, proposal)


@given(
    tp=st.integers(1, 4),
    pp=st.integers(1, 3),
    dp=st.integers(1, 2),
    fold=st.booleans(),
    data=st.data(),
)
def test_best_fit_finds_a_valid_placement_whenever_there_is_one(
    tp: int, pp: int, dp: int, fold: bool, data: st.DataObject
) -> None:
    parallel = Parallel(tp=tp, pp=pp, dp=dp, ep=tp * dp if fold else 1)
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=parallel.world, max_size=parallel.world))
    free = data.draw(st.lists(st.lists(st.integers(0, 8), max_size=6), min_size=1, max_size=4))
    nodes = tuple(
        Node(
            id=NodeId(f"n{i}"),
            gpus=tuple(
                Gpu(index=j, memory_bytes=8, free_bytes=b, nvlink_group=j // 2 if i % 2 else None)
                for j, b in enumerate(gpus)
            ),
            memory_bytes=1,
            pool_bytes=1,
        )
        for i, gpus in enumerate(free)
    )
    request = PlacementRequest(parallel=parallel, rank_bytes=tuple(sizes), topology=Topology(nodes=nodes))
    decision = BestFitDecreasing().place(request)
    check_placement("best_fit", request, decision)
    largest = sorted((b for gpus in free for b in gpus), reverse=True)[: parallel.world]
    possible = len(largest) == parallel.world and all(
        need <= room for need, room in zip(sorted(sizes, reverse=True), largest, strict=True)
    )
    assert (decision.unplaced == ()) == possible
    assert decision == BestFitDecreasing().place(request)
