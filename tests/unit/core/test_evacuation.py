"""Last copies of a node that leaves: where they go, and that none is forgotten, whatever happens on the way."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.evacuation import Evacuation, HeldBlock, LastCopy, last_copies
from megamind_ray.core.ids import BlockId, LoadId, NodeId, Rank

LOAD = LoadId("llama#1")
A, B, C, D = map(NodeId, "abcd")
MANY = 10**9


def block(number: int, nbytes: int = 10, near: str = "") -> LastCopy:
    return LastCopy(load=LOAD, block=BlockId(number), nbytes=nbytes, near=frozenset(map(NodeId, near)))


def run(evacuation: Evacuation, *, max_bytes: int = MANY) -> None:
    """All goes well from here on."""
    while not evacuation.is_done:
        for node in evacuation.waiting:
            evacuation.begin(node, max_bytes=max_bytes)
            evacuation.arrived(node)


def safe(evacuation: Evacuation) -> dict[NodeId, list[int]]:
    return {node: sorted(copy.block for copy in copies) for node, copies in evacuation.safe.items()}


def test_only_what_no_other_node_keeps_has_to_go() -> None:
    held = {
        A: [HeldBlock(block=BlockId(number), nbytes=10, ranks=(Rank(number % 2),)) for number in range(4)],
        B: [HeldBlock(block=BlockId(1), nbytes=10)],
        D: [HeldBlock(block=BlockId(2), nbytes=10)],
    }
    found = last_copies(LOAD, held, {Rank(0): A, Rank(1): B}, leaving=A, staying=[B, C])

    # D keeps block 2, and leaves as well. Rank 0 lives on the node that leaves: nobody is near.
    assert found == [block(0), block(2), block(3, near="b")]


def test_a_block_goes_where_a_rank_needs_it() -> None:
    evacuation = Evacuation([block(0, near="b"), block(1, near="c"), block(2)], {B: 20, C: 1000})
    run(evacuation)

    assert safe(evacuation) == {B: [0], C: [1, 2]}


def test_where_they_that_need_it_are_full_it_goes_elsewhere() -> None:
    evacuation = Evacuation([block(0, near="b"), block(1, near="b")], {B: 10, C: 10})
    run(evacuation)

    assert safe(evacuation) == {B: [0], C: [1]}


def test_large_blocks_are_placed_before_small_ones_take_their_room() -> None:
    evacuation = Evacuation([block(0, 4, near="b"), block(1, 4, near="b"), block(2, 10)], {B: 10, C: 8})

    assert evacuation.homeless == []


def test_what_fits_nowhere_is_named_before_anything_moves() -> None:
    evacuation = Evacuation([block(0, 30), block(1, 5)], {B: 10, C: 20})

    assert evacuation.homeless == [block(0, 30)]
    run(evacuation)
    assert safe(evacuation) == {C: [1]}


def test_a_batch_has_so_many_bytes_or_one_block() -> None:
    evacuation = Evacuation([block(0, 50), block(1, 20), block(2, 10), block(3, 10)], {B: MANY})

    batches = []
    while not evacuation.is_done:
        batches.append([copy.block for copy in evacuation.begin(B, max_bytes=30)])
        assert evacuation.waiting == (), "one batch at a time"
        evacuation.arrived(B)
    assert batches == [[0], [1, 2], [3]]


def test_what_a_lost_node_had_taken_goes_to_another_one() -> None:
    evacuation = Evacuation([block(0), block(1), block(2)], {B: 100, C: 30})
    evacuation.begin(B, max_bytes=10)
    evacuation.arrived(B)
    evacuation.begin(B, max_bytes=10)

    evacuation.lose(B)
    run(evacuation)

    assert safe(evacuation) == {C: [0, 1, 2]}
    assert evacuation.lost == evacuation.homeless == []


def test_a_node_that_takes_no_more_keeps_what_it_took() -> None:
    evacuation = Evacuation([block(0), block(1)], {B: 100, C: 30})
    evacuation.begin(B, max_bytes=10)
    evacuation.arrived(B)

    evacuation.close(B)
    run(evacuation)

    assert safe(evacuation) == {B: [0], C: [1]}


def test_what_a_node_failed_to_take_it_tries_again_in_the_same_order() -> None:
    evacuation = Evacuation([block(0), block(1), block(2)], {B: 100})
    evacuation.begin(B, max_bytes=20)

    evacuation.failed(B)

    assert [copy.block for copy in evacuation.begin(B, max_bytes=30)] == [0, 1, 2]


def test_with_the_node_that_leaves_goes_what_is_not_safe() -> None:
    evacuation = Evacuation([block(number) for number in range(4)], {B: 100})
    evacuation.begin(B, max_bytes=10)
    evacuation.arrived(B)
    evacuation.begin(B, max_bytes=10)

    evacuation.lose_source()
    assert not evacuation.is_done, "a copy is under way, and may arrive all the same"
    evacuation.failed(B)

    assert evacuation.is_done
    assert safe(evacuation) == {B: [0]}
    assert sorted(copy.block for copy in evacuation.lost) == [1, 2, 3]


COPIES = st.lists(st.tuples(st.integers(1, 60), st.sets(st.sampled_from("bcd"))), min_size=1, max_size=20).map(
    lambda rows: [block(number, nbytes, "".join(near)) for number, (nbytes, near) in enumerate(rows)]
)
ROOMS = st.dictionaries(st.sampled_from([B, C, D]), st.integers(0, 400), min_size=1)
WHAT = st.lists(
    st.sampled_from(["begin", "begin", "begin", "arrived", "arrived", "failed", "close", "lose", "lose_source"]),
    max_size=40,
)


@given(COPIES, ROOMS, WHAT, st.integers(1, 100), st.randoms(use_true_random=False))
def test_whatever_happens_no_copy_is_forgotten_and_no_pool_overflows(
    copies: list[LastCopy], rooms: dict[NodeId, int], happens: list[str], max_bytes: int, random: object
) -> None:
    evacuation = Evacuation(copies, rooms)
    moving: dict[NodeId, tuple[LastCopy, ...]] = {}
    living = set(rooms)
    is_source_lost = False
    for what in [*happens, *["go on"] * 200]:
        if what == "lose_source":
            evacuation.lose_source()
            is_source_lost = True
        elif what in ("begin", "go on") and evacuation.waiting:
            node = evacuation.waiting[0]
            moving[node] = evacuation.begin(node, max_bytes=max_bytes)
            assert len(moving[node]) == 1 or sum(copy.nbytes for copy in moving[node]) <= max_bytes
        elif moving:
            node = random.choice(sorted(moving))  # type: ignore[attr-defined]
            del moving[node]
            getattr(evacuation, {"begin": "arrived", "go on": "arrived"}.get(what, what))(node)
            if what == "lose":
                living.discard(node)
        taken = {node: sum(copy.nbytes for copy in found) for node, found in evacuation.safe.items()}
        under_way = {node: sum(copy.nbytes for copy in found) for node, found in moving.items()}
        for node in rooms:
            assert taken.get(node, 0) + under_way.get(node, 0) <= rooms[node]

    assert evacuation.is_done
    ends = [copy for found in (*evacuation.safe.values(), evacuation.homeless, evacuation.lost) for copy in found]
    assert Counter(ends) == Counter(copies), "each is safe once, or named"
    assert set(evacuation.safe) <= living
    assert is_source_lost or not evacuation.lost


@given(COPIES, ROOMS)
def test_what_is_homeless_is_larger_than_any_room_that_is_left(
    copies: list[LastCopy], rooms: dict[NodeId, int]
) -> None:
    evacuation = Evacuation(copies, rooms)
    run(evacuation)

    left = {node: room - sum(copy.nbytes for copy in evacuation.safe.get(node, ())) for node, room in rooms.items()}
    assert all(copy.nbytes > max(left.values(), default=0) for copy in evacuation.homeless)
