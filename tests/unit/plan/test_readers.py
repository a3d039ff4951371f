"""Plans of checkpoints that some nodes cannot read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from megamind_ray.core.topology import Node, Topology
from megamind_ray.errors import RequestError
from megamind_ray.planning.checks import check_routing
from megamind_ray.planning.cost import CostModel
from megamind_ray.planning.transfers import transfer_costs
from megamind_ray.policies.routing.balanced import Balanced
from megamind_ray.policies.routing.base import RoutingDecision, RoutingRequest

MIB = 1 << 20
MakeNode = Callable[..., Node]
# (only rank or -1, consumer nodes) of each extent; nodes b and c can read, d needs nothing.
EXTENTS = [(0, [0]), (1, [1]), (-1, [0, 1]), (-1, [0, 1, 2]), (-1, [0]), *[(-1, [1, 2])] * 40]


def _request(node: MakeNode, *names: str) -> RoutingRequest:
    topology = Topology(nodes=tuple(node(name, [80]) for name in "abcd"))
    return RoutingRequest(
        topology=topology,
        costs=transfer_costs(CostModel(topology)),
        nbytes=np.full(len(EXTENTS), 8 * MIB, np.int64),
        only_rank=np.array([rank for rank, _ in EXTENTS], np.int64),
        first_node=np.cumsum([0, *(len(members) for _, members in EXTENTS)]).astype(np.int64),
        nodes=np.array([index for _, members in EXTENTS for index in members], np.int64),
        readers=np.array([name in names for name in "abcd"]),
    )


def _check(request: RoutingRequest, decision: RoutingDecision) -> None:
    check_routing("balanced", request, decision, np.array([0, 1], np.int64))


def test_a_consumer_that_can_read_reads_else_any_node_that_can(node: MakeNode) -> None:
    request = _request(node, "b", "c")
    decision = Balanced().route(request)
    _check(request, decision)
    assert decision.node[1] == decision.node[2] == 1
    assert set(decision.node.tolist()) == {1, 2}
    assert decision.direct.tolist() == [False, True] + [False] * (len(EXTENTS) - 2)
    assert decision.reasons[decision.reason[0]] == "no node that needs it can read it: read once, by one that can"
    shares = np.bincount(decision.node[5:], minlength=4)
    assert min(shares[1], shares[2]) > 0, "both that can take part"


def test_a_node_that_needs_nothing_reads_all_where_it_alone_can(node: MakeNode) -> None:
    request = _request(node, "d")
    decision = Balanced().route(request)
    _check(request, decision)
    assert set(decision.node.tolist()) == {3}
    assert not decision.direct.any()


def test_where_all_can_read_it_is_as_if_nothing_had_been_said(node: MakeNode) -> None:
    every, nothing = _request(node, *"abcd"), _request(node, *"abcd")
    object.__setattr__(nothing, "readers", None)
    one, other = Balanced().route(every), Balanced().route(nothing)
    assert one.node.tolist() == other.node.tolist()
    assert one.reason.tolist() == other.reason.tolist()


@pytest.mark.parametrize(("extent", "reader"), [(2, 0), (2, 2), (0, 3)])
def test_a_reader_that_cannot_or_need_not_is_refused(node: MakeNode, extent: int, reader: int) -> None:
    request = _request(node, "b", "c")
    decision = Balanced().route(request)
    decision.node[extent] = reader
    with pytest.raises(RequestError, match=f"for extent {extent} a reader that needs nothing of it, or cannot read it"):
        _check(request, decision)
