"""Credits and mailboxes of a node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.actors.block_pool import BlockPool, PoolClosedError, PooledBlock
from megamind_ray.actors.messages import Consumer, node_consumer, rank_consumer
from megamind_ray.core.ids import BlockId, ExtentId, Generation, Rank
from megamind_ray.errors import CapacityError

FIRST = Generation(0)
BOUND_S = 10.0


def block(number: int, nbytes: int = 10) -> PooledBlock:
    return PooledBlock(
        block=BlockId(number),
        extent=ExtentId(0),
        nbytes=nbytes,
        crc32s=np.zeros(1, np.uint32),
        handle=object(),
    )


def to(*consumers: Consumer) -> list[tuple[Consumer, tuple[Rank, ...]]]:
    return [(consumer, (Rank(0),)) for consumer in consumers]


def take(pool: BlockPool, consumer: Consumer, acked: tuple[int, ...] = (), generation: Generation = FIRST) -> list[int]:
    """Serials that come without waiting."""
    deliveries = pool.exchange(consumer, generation, acked=acked, limit=100, timeout_s=0)
    return [delivery.serial for delivery in deliveries]


@pytest.fixture
def in_background() -> Iterator[Callable[[Callable[[], None]], threading.Thread]]:
    threads: list[threading.Thread] = []

    def start(action: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=action, daemon=True)
        thread.start()
        threads.append(thread)
        return thread

    yield start
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()


def test_a_block_goes_when_its_last_consumer_has_acked() -> None:
    pool = BlockPool(credit_bytes=100)
    one = block(1)
    pool.reserve(10)
    pool.publish(one, to(rank_consumer(0), node_consumer("b")))
    (first,) = take(pool, rank_consumer(0))
    take(pool, rank_consumer(0), acked=(first,))
    assert one.handle is not None
    assert pool.used_bytes == 10
    (second,) = take(pool, node_consumer("b"))
    take(pool, node_consumer("b"), acked=(second,))
    assert one.handle is None
    assert pool.used_bytes == 0


def test_a_block_that_a_consumer_found_damaged_is_not_kept_whoever_acks_it_last() -> None:
    pool = BlockPool(credit_bytes=100, keep=[1])
    damaged, again = block(1), block(1)
    pool.reserve(20)
    pool.publish(damaged, to(rank_consumer(0), rank_consumer(1)))
    (first,), (second,) = take(pool, rank_consumer(0)), take(pool, rank_consumer(1))
    pool.spoil(rank_consumer(0), first)
    take(pool, rank_consumer(0), acked=(first,))
    pool.publish(again, to(rank_consumer(0)))
    (third,) = take(pool, rank_consumer(0))
    take(pool, rank_consumer(0), acked=(third,))
    take(pool, rank_consumer(1), acked=(second,))
    assert pool.kept == {1: again}
    assert damaged.handle is None


def test_a_serial_acked_twice_counts_once() -> None:
    pool = BlockPool(credit_bytes=100)
    one = block(1)
    pool.reserve(10)
    pool.publish(one, to(rank_consumer(0), rank_consumer(1)))
    (serial,) = take(pool, rank_consumer(0))
    take(pool, rank_consumer(0), acked=(serial,))
    take(pool, rank_consumer(0), acked=(serial,))
    assert pool.used_bytes == 10


def test_a_kept_block_gives_its_credit_back_but_not_its_handle() -> None:
    pool = BlockPool(credit_bytes=10, keep=[1])
    one = block(1)
    pool.reserve(10)
    pool.publish(one, to(rank_consumer(0)))
    take(pool, rank_consumer(0), acked=tuple(take(pool, rank_consumer(0))))
    assert pool.used_bytes == 0
    assert pool.close() == {1: one}
    assert one.handle is not None


def test_a_reservation_waits_for_an_ack(in_background: Callable[[Callable[[], None]], threading.Thread]) -> None:
    pool = BlockPool(credit_bytes=10)
    pool.reserve(10)
    pool.publish(block(1), to(rank_consumer(0)))
    got_it = threading.Event()

    def reserve_more() -> None:
        pool.reserve(10)
        got_it.set()

    in_background(reserve_more)
    (serial,) = take(pool, rank_consumer(0))
    assert not got_it.is_set()
    take(pool, rank_consumer(0), acked=(serial,))
    assert got_it.wait(BOUND_S)
    assert pool.peak_bytes == 10


def test_more_than_the_whole_budget_is_refused_and_named() -> None:
    pool = BlockPool(credit_bytes=10, node="n0")
    with pytest.raises(CapacityError, match=r"node n0.*11 B.*10 B") as caught:
        pool.reserve(11)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (11, 10)


def test_reads_cannot_take_what_is_set_aside_for_relayed_blocks() -> None:
    pool = BlockPool(credit_bytes=10, sides=("up",))
    pool.reserve(5)
    with pytest.raises(CapacityError):
        pool.reserve(6)
    pool.reserve(5, "up")
    assert pool.used_bytes == 10


def test_closing_wakes_whoever_waits(in_background: Callable[[Callable[[], None]], threading.Thread]) -> None:
    pool = BlockPool(credit_bytes=10)
    pool.reserve(10)
    woken: list[str] = []

    def wait_for_credit() -> None:
        with pytest.raises(PoolClosedError):
            pool.reserve(1)
        woken.append("credit")

    def wait_for_block() -> None:
        with pytest.raises(PoolClosedError):
            pool.exchange(rank_consumer(0), FIRST, acked=(), limit=1, timeout_s=BOUND_S)
        woken.append("block")

    threads = [in_background(wait_for_credit), in_background(wait_for_block)]
    pool.close()
    for thread in threads:
        thread.join(BOUND_S)
    assert sorted(woken) == ["block", "credit"]


def test_a_reset_acks_what_the_lost_worker_had_and_its_successor_starts_empty() -> None:
    pool = BlockPool(credit_bytes=100)
    for number in (1, 2):
        pool.reserve(10)
        pool.publish(block(number), to(rank_consumer(0)))
    pool.exchange(rank_consumer(0), FIRST, acked=(), limit=1, timeout_s=0)
    pool.reset(rank_consumer(0), Generation(1))
    assert pool.used_bytes == 0
    assert take(pool, rank_consumer(0), generation=Generation(1)) == []


def test_acks_of_an_older_generation_do_not_touch_what_its_successor_was_handed() -> None:
    pool = BlockPool(credit_bytes=100)
    pool.reset(rank_consumer(0), Generation(1))
    pool.reserve(10)
    pool.publish(block(1), to(rank_consumer(0)))
    (serial,) = take(pool, rank_consumer(0), generation=Generation(1))
    assert take(pool, rank_consumer(0), acked=(serial,), generation=FIRST) == []
    assert pool.used_bytes == 10
    assert pool.stale_exchanges == 1


def test_a_reset_wakes_the_poll_of_the_lost_worker(
    in_background: Callable[[Callable[[], None]], threading.Thread],
) -> None:
    pool = BlockPool(credit_bytes=100)
    polling = in_background(lambda: take_for_long(pool))
    pool.reset(rank_consumer(0), Generation(1))
    polling.join(BOUND_S)
    assert not polling.is_alive()


def take_for_long(pool: BlockPool) -> None:
    assert pool.exchange(rank_consumer(0), FIRST, acked=(), limit=1, timeout_s=10 * BOUND_S) == ()


def test_what_comes_for_a_consumer_that_has_all_it_needs_holds_no_credit() -> None:
    """A lost worker's successor was given a block twice, took it once and is done: the other one must not stay."""
    pool = BlockPool(credit_bytes=100)
    for number in (1, 1):
        pool.reserve(10)
        pool.publish(block(number), to(rank_consumer(0)))
    pool.exchange(rank_consumer(0), FIRST, acked=(), limit=1, timeout_s=0)
    pool.retire(rank_consumer(0), FIRST)
    assert pool.used_bytes == 0
    pool.reserve(10)
    pool.publish(block(2), to(rank_consumer(0)))
    assert pool.used_bytes == 0


def test_the_successor_of_a_consumer_that_was_done_gets_blocks_again() -> None:
    pool = BlockPool(credit_bytes=100)
    pool.retire(rank_consumer(0), FIRST)
    pool.reset(rank_consumer(0), Generation(1))
    pool.reserve(10)
    pool.publish(block(1), to(rank_consumer(0)))
    assert len(take(pool, rank_consumer(0), generation=Generation(1))) == 1


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 4), st.sets(st.integers(0, 2), max_size=3)),
        st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 3)),
        st.tuples(st.just("ack"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("reset"), st.integers(0, 2), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS)
def test_never_over_credit_never_early_and_never_leaking(steps: list[tuple[str, int, object]]) -> None:
    """A model beside the pool: each consumer's undone blocks. A block is alive exactly while somebody has it undone."""
    pool = BlockPool(credit_bytes=20)
    generations = dict.fromkeys(range(3), 0)
    undone: dict[int, dict[int, PooledBlock]] = {rank: {} for rank in range(3)}
    handed: dict[int, list[int]] = {rank: [] for rank in range(3)}
    by_number: dict[int, PooledBlock] = {}
    for number, (step, value, extra) in enumerate(steps):
        if step == "publish" and pool.used_bytes + value <= 20:
            one = by_number[number] = block(number, value)
            pool.reserve(value)
            pool.publish(one, to(*(rank_consumer(rank) for rank in sorted(extra))))  # type: ignore[call-overload]
            for rank in extra:  # type: ignore[attr-defined]
                undone[rank][number] = one
        elif step == "take":
            deliveries = pool.exchange(
                rank_consumer(value),
                Generation(generations[value]),
                acked=(),
                limit=int(extra),
                timeout_s=0,  # type: ignore[call-overload]
            )
            handed[value] += [delivery.serial for delivery in deliveries]
        elif step == "ack" and handed[value]:
            serial = handed[value].pop()
            letter = pool._mailboxes[rank_consumer(value)].handed[serial]
            del undone[value][letter.entry.block]
            pool.exchange(rank_consumer(value), Generation(generations[value]), acked=(serial,), limit=0, timeout_s=0)
        elif step == "reset":
            generations[value] += 1
            undone[value].clear()
            handed[value].clear()
            pool.reset(rank_consumer(value), Generation(generations[value]))
        alive = {number for blocks in undone.values() for number in blocks}
        assert {number for number, one in by_number.items() if one.handle is not None} == alive
        assert pool.used_bytes == sum(by_number[number].nbytes for number in alive) <= 20
