"""Blocks handed on along a line: everybody who needs one takes it once, and nothing goes round in circles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.ids import NodeId, Rank
from megamind_ray.core.line import Budget, Line, credit_limits

NODES = [NodeId(name) for name in "abcde"]


def _ranks(*homes: str) -> dict[Rank, NodeId]:
    return {Rank(rank): NodeId(home) for rank, home in enumerate(homes)}


def test_a_block_goes_both_ways_and_each_neighbour_takes_it_for_all_further_on() -> None:
    node_of_rank = _ranks("a", "b", "c", "d", "e", "c")
    found = Line(NODES).takers(NODES[2], node_of_rank, node_of_rank)
    assert found == {"c": (2, 5), "d": (3, 4), "b": (1, 0)}


def test_nodes_that_need_nothing_are_passed_over() -> None:
    node_of_rank = _ranks("e", "c")
    assert Line(NODES).takers(NODES[0], node_of_rank, node_of_rank) == {"c": (1, 0)}
    assert Line(NODES).hops(NODES[0], {NODES[4], NODES[2]}) == [("a", "c"), ("c", "e")]


def test_without_a_line_each_node_is_served_by_itself() -> None:
    node_of_rank = _ranks("a", "b", "c")
    assert Line().takers(NODES[0], node_of_rank, node_of_rank) == {"a": (0,), "b": (1,), "c": (2,)}
    assert Line().hops(NODES[0], NODES[:3]) == [("a", "b"), ("a", "c")]
    assert Line().source(NODES[2], NODES[0], NODES[:3]) == "a"


def test_a_line_that_lacks_a_node_is_none() -> None:
    node_of_rank = _ranks("b", "c")
    assert Line(NODES[:2]).takers(NODES[0], node_of_rank, node_of_rank) == {"b": (0,), "c": (1,)}


@given(
    order=st.permutations(NODES),
    reader=st.sampled_from(NODES),
    homes=st.lists(st.sampled_from(NODES), min_size=1, max_size=12),
)
def test_every_rank_is_reached_once_over_the_planned_hops(
    order: list[NodeId], reader: NodeId, homes: list[NodeId]
) -> None:
    line, node_of_rank = Line(order), _ranks(*homes)
    reached: list[Rank] = []
    taken: list[tuple[NodeId, NodeId]] = []
    waiting = [(reader, tuple(node_of_rank))]
    while waiting:
        node, ranks = waiting.pop()
        for taker, wanted in line.takers(node, ranks, node_of_rank).items():
            if taker == node:
                assert {node_of_rank[rank] for rank in wanted} == {node}
                reached += wanted
            else:
                taken.append((node, taker))
                waiting.append((taker, wanted))
    assert sorted(reached) == list(node_of_rank)
    assert sorted(taken) == sorted(line.hops(reader, set(homes)))
    assert {target for _, target in taken} == set(homes) - {reader}
    for source, target in taken:
        assert line.source(target, reader, line.next_to(target, set(homes))) == source
        assert line.source(target, reader, set(homes)) == source
    assert len(taken) == len(set(homes) - {reader})
    # What is taken in from one side is only ever handed on to the other.
    both: tuple[Budget, ...] = ("up", "down")
    for source, target in taken:
        side = line.budget(target, source, both)
        assert all(line.budget(after, target, both) == side for before, after in taken if before == target)


@pytest.mark.parametrize(
    ("sides", "limits"),
    [
        ((), {"read": 100, "up": 0, "down": 0}),
        (("up",), {"read": 50, "up": 50, "down": 0}),
        (("up", "down"), {"read": 50, "up": 25, "down": 25}),
    ],
)
def test_credit_is_shared_among_the_sides_that_blocks_come_from(
    sides: tuple[Budget, ...], limits: dict[Budget, int]
) -> None:
    assert credit_limits(100, sides) == limits
