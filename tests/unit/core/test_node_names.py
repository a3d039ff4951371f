"""Which node is meant."""

from __future__ import annotations

import pytest

from megamind_ray.core.ids import NodeId
from megamind_ray.core.node_names import NodeNames, find_node
from megamind_ray.errors import RequestError

FIRST = NodeId("ab" + "0" * 54)
SECOND = NodeId("ac" + "0" * 54)
THIRD = NodeId("10" + "0" * 54)
NODES = [
    NodeNames(node=FIRST, address="10.0.0.1", host="n1"),
    NodeNames(node=SECOND, address="10.0.0.2", host="n2"),
    NodeNames(node=THIRD, address="10.0.0.11", host="ab"),
]


@pytest.mark.parametrize(
    ("text", "node"),
    [
        (FIRST, FIRST),
        ("ac", SECOND),
        ("10", THIRD),
        ("10.0.0.1", FIRST),
        ("n2", SECOND),
        ("ab", THIRD),
        (" ab0 ", FIRST),
    ],
    ids=["id", "its beginning", "not that of an address", "address", "host", "a host before an id", "spaces"],
)
def test_a_node_is_found_by_what_it_is_called(text: str, node: NodeId) -> None:
    assert find_node(text, NODES) == node


def test_what_may_be_several_is_refused_with_their_names() -> None:
    with pytest.raises(RequestError, match=r"any of 2: ab000000 \(n1, 10\.0\.0\.1\), ac000000 \(n2, 10\.0\.0\.2\)"):
        find_node("a", NODES)


def test_nodes_of_one_address_are_told_apart_by_their_ids() -> None:
    nodes = [NodeNames(node=node, address="127.0.0.1") for node in (FIRST, SECOND)]

    with pytest.raises(RequestError, match=r"'127\.0\.0\.1': it may be any of 2"):
        find_node("127.0.0.1", nodes)
    assert find_node("ab", nodes) == FIRST


@pytest.mark.parametrize("text", ["n7", "", "10.0.0"])
def test_what_is_no_node_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(
        RequestError, match=r"has none of this id, address or name; it has ab000000 \(n1, 10\.0\.0\.1\)"
    ):
        find_node(text, NODES)
