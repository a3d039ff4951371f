"""Who reads each extent, and by which route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.config import RoutingConfig
from megamind_ray.core.topology import Node, Topology
from megamind_ray.errors import RequestError
from megamind_ray.planning.checks import check_routing
from megamind_ray.planning.cost import CostModel
from megamind_ray.planning.transfers import transfer_costs
from megamind_ray.policies.registry import routing_policy
from megamind_ray.policies.routing.balanced import Balanced
from megamind_ray.policies.routing.base import RoutingDecision, RoutingRequest

MIB = 1 << 20
MakeNode = Callable[..., Node]


def request_for(nodes: list[Node], extents: list[tuple[int, int, list[int]]], **options: object) -> RoutingRequest:
    """Extents as (bytes, only rank or -1, consumer nodes)."""
    topology = Topology(nodes=tuple(nodes))
    return RoutingRequest(
        topology=topology,
        costs=transfer_costs(CostModel(topology)),
        nbytes=np.array([nbytes for nbytes, _, _ in extents], np.int64),
        only_rank=np.array([rank for _, rank, _ in extents], np.int64),
        first_node=np.cumsum([0, *(len(members) for _, _, members in extents)]).astype(np.int64),
        nodes=np.array([index for _, _, members in extents for index in members], np.int64),
        **options,  # type: ignore[arg-type]
    )


def read_bytes(request: RoutingRequest, decision: RoutingDecision) -> list[int]:
    return (
        np.bincount(decision.node, weights=request.nbytes, minlength=len(request.topology.nodes)).astype(int).tolist()
    )


def test_an_extent_of_one_rank_is_read_by_that_rank(node: MakeNode) -> None:
    request = request_for([node("a", [80]), node("b", [80])], [(8 * MIB, 1, [1])], min_direct_bytes=MIB)
    decision = Balanced().route(request)
    assert (decision.direct.tolist(), decision.node.tolist()) == ([True], [1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"min_direct_bytes": 9 * MIB}, "smaller than routing.min_direct_bytes"), ({"allow_direct": False}, "as asked")],
)
def test_small_extents_and_forced_ones_go_through_the_pool(
    node: MakeNode, options: dict[str, object], reason: str
) -> None:
    decision = Balanced().route(request_for([node("a", [80])], [(8 * MIB, 0, [0])], **options))
    assert not decision.direct.any()
    assert reason in decision.reasons[decision.reason[0]]


def test_shared_extents_are_spread_by_the_speed_of_the_disks(node: MakeNode) -> None:
    nodes = [node("slow", [80], disk=1e9), node("fast", [80], disk=3e9)]
    request = request_for(nodes, [(MIB, -1, [0, 1])] * 400)
    assert read_bytes(request, Balanced().route(request)) == [100 * MIB, 300 * MIB]


def test_a_node_that_reads_for_itself_gets_less_of_what_is_shared(node: MakeNode) -> None:
    nodes = [node("a", [80]), node("b", [80])]
    request = request_for(nodes, [(MIB, -1, [0])] * 100 + [(MIB, -1, [0, 1])] * 300)
    assert read_bytes(request, Balanced().route(request)) == [200 * MIB, 200 * MIB]


def test_a_slow_network_reads_as_much_as_it_takes_in(node: MakeNode) -> None:
    # Sending is a reason to read less there, taking in what the other reads one to read more.
    nodes = [node("a", [80], disk=10e9), node("b", [80], disk=10e9)]
    slow = replace(nodes[0], nics=(replace(nodes[0].nics[0], bytes_per_s=5e9),))
    request = request_for([slow, nodes[1]], [(MIB, -1, [0, 1])] * 300)
    assert read_bytes(request, Balanced().route(request)) == [150 * MIB, 150 * MIB]


def test_kept_blocks_fill_the_pools_by_their_room(node: MakeNode) -> None:
    nodes = [node("a", [80]), node("b", [80])]
    room = np.array([50 * MIB, 500 * MIB], np.int64)
    request = request_for(nodes, [(MIB, -1, [0, 1])] * 300, allow_direct=False, pool_room_bytes=room)
    assert read_bytes(request, Balanced().route(request)) == [50 * MIB, 250 * MIB]


def test_what_fits_no_pool_is_spread_by_time(node: MakeNode) -> None:
    nodes = [node("a", [80]), node("b", [80])]
    room = np.array([40 * MIB, 0], np.int64)
    request = request_for(nodes, [(MIB, -1, [0, 1])] * 100, allow_direct=False, pool_room_bytes=room)
    assert read_bytes(request, Balanced().route(request)) == [50 * MIB, 50 * MIB]


def test_no_extents_no_readers(node: MakeNode) -> None:
    assert len(Balanced().route(request_for([node("a", [80])], [])).node) == 0


@given(st.lists(st.tuples(st.integers(1, 40), st.sets(st.integers(0, 2), min_size=1)), max_size=60))
def test_no_extent_moved_to_another_consumer_would_finish_earlier_by_more_than_two_extents(
    extents: list[tuple[int, set[int]]],
) -> None:
    from megamind_ray.core.ids import NodeId
    from megamind_ray.core.topology import Disk

    nodes = [
        Node(id=NodeId(f"n{i}"), gpus=(), memory_bytes=1, pool_bytes=1, disks=(Disk(name="d", bytes_per_s=1.0),))
        for i in range(3)
    ]
    request = request_for(nodes, [(nbytes, -1, sorted(members)) for nbytes, members in extents])
    decision = Balanced().route(request)
    load = read_bytes(request, decision)
    largest = max((nbytes for nbytes, _ in extents), default=0)
    for (_, members), reader in zip(extents, decision.node.tolist(), strict=True):
        assert reader in members
        if len(members) == 3:  # the last class to be spread: it levels what the others left
            assert load[reader] <= min(load) + 2 * largest


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"routing.policy = 'random'.*balanced"):
        routing_policy(RoutingConfig(policy="random"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"node": [0, 5]}, "for extent 1 a reader that is no node"),
        ({"direct": [True, True]}, "for extent 1 the direct route, though several ranks need it"),
        ({"node": [1, 0]}, "for extent 0 the direct route on another node than that of its rank"),
        ({"reason": [0, 3]}, "for extent 1 no reason"),
        ({"node": [0]}, "columns that are not of length 2"),
    ],
)
def test_a_wrong_proposal_is_refused_with_the_reason(
    node: MakeNode, change: dict[str, list[int]], complaint: str
) -> None:
    request = request_for([node("a", [80]), node("b", [80])], [(MIB, 0, [0]), (MIB, -1, [0, 1])])
    columns = {"direct": [True, False], "node": [0, 1], "reason": [0, 0]} | change
    proposal = RoutingDecision(
        direct=np.array(columns["direct"], np.bool_),
        node=np.array(columns["node"], np.int64),
        reason=np.array(columns["reason"], np.int64),
        reasons=("because",),
    )
    with pytest.raises(RequestError, match=f"policy 'mine' proposed {complaint}"):
        check_routing("mine", request, proposal, np.array([0, 1], np.int64))
