"""What a node has to read: in order, once, and never after it was taken back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.ids import ExtentId
from megamind_ray.core.read_queue import ReadQueue
from megamind_ray.core.stragglers import ReadProgress


def queue_of(*extents: int, nbytes: int = 10) -> ReadQueue[str]:
    queue: ReadQueue[str] = ReadQueue()
    assert queue.add((ExtentId(extent), nbytes, f"read {extent}") for extent in extents) is bool(extents)
    return queue


def test_extents_come_in_order_and_then_no_more() -> None:
    queue = queue_of(3, 1)
    assert list(queue) == ["read 3", "read 1"]
    assert next(queue, None) is None


def test_progress_goes_from_waiting_to_begun_to_done() -> None:
    queue = queue_of(0, 1)
    next(queue)
    assert queue.progress == ReadProgress(waiting_bytes=20)
    assert queue.begin(ExtentId(0))
    assert queue.progress == ReadProgress(begun_bytes=10, waiting_bytes=10)
    assert queue.holds(ExtentId(0))
    queue.end(ExtentId(0))
    assert queue.progress == ReadProgress(done_bytes=10, waiting_bytes=10)
    assert not queue.holds(ExtentId(0))
    queue.end(ExtentId(1))
    assert queue.progress == ReadProgress(done_bytes=20), "one that failed before it was begun is given up"


def test_what_is_waiting_is_taken_back_from_the_end() -> None:
    queue = queue_of(0, 1, 2, 3)
    assert queue.begin(ExtentId(0))
    assert queue.take_back(15) == (3,)
    assert queue.take_back(0) == (1, 2)
    assert queue.take_back(0) == ()
    assert queue.progress == ReadProgress(begun_bytes=10)


def test_a_thread_that_waits_with_an_extent_that_was_taken_back_does_not_begin() -> None:
    queue = queue_of(0, 1)
    assert next(queue) == "read 0"
    assert queue.take_back(0) == (0, 1)
    assert not queue.begin(ExtentId(0))
    assert next(queue, None) is None


def test_what_is_given_back_is_read_once_even_if_a_thread_still_waits_with_it() -> None:
    queue = queue_of(0)
    next(queue)
    queue.take_back(0)
    assert not queue.add([(ExtentId(0), 10, "read 0 again")]), "the thread has not come back yet"
    assert queue.begin(ExtentId(0))
    assert next(queue, None) is None
    assert not queue.begin(ExtentId(0))


def test_who_adds_to_a_queue_that_everybody_has_left_has_to_see_to_it() -> None:
    queue = queue_of(0)
    assert not queue.add([(ExtentId(1), 10, "read 1")])
    assert list(queue) == ["read 0", "read 1"]
    assert not queue.add([])
    assert queue.add([(ExtentId(2), 10, "read 2")])
    assert list(queue) == ["read 2"]


@given(st.lists(st.tuples(st.sampled_from(["next", "begin", "end", "back", "add"]), st.integers(0, 40)), max_size=60))
def test_every_extent_is_done_or_taken_back_once(steps: list[tuple[str, int]]) -> None:
    queue: ReadQueue[ExtentId] = ReadQueue()
    held: list[ExtentId] = []
    begun: list[ExtentId] = []
    done: list[ExtentId] = []
    back: list[ExtentId] = []
    num = 0
    for step, value in steps:
        if step == "add":
            queue.add([(ExtentId(num), 10, ExtentId(num))])
            num += 1
        elif step == "next" and (taken := next(queue, None)) is not None:
            held.append(taken)
        elif step == "begin" and held:
            extent = held.pop(value % len(held))
            if queue.begin(extent):
                begun.append(extent)
        elif step == "end" and begun:
            done.append(begun.pop(value % len(begun)))
            queue.end(done[-1])
        elif step == "back":
            back += queue.take_back(value)
    left = [extent for extent in map(ExtentId, range(num)) if queue.holds(extent)]
    assert sorted([*done, *back, *left]) == list(range(num))
    assert queue.progress == ReadProgress(
        done_bytes=10 * len(done), begun_bytes=10 * len(begun), waiting_bytes=10 * (len(left) - len(begun))
    )
