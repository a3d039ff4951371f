"""Credits and mailboxes in virtual time, held to what ``actors.block_pool`` does."""

from __future__ import annotations

import pytest

from megamind_ray.core.ids import Generation, NodeId, Rank
from megamind_ray.core.line import Budget
from megamind_ray.errors import CapacityError
from megamind_ray.sim.clock import Clock, Steps, Task
from megamind_ray.sim.pool import Letter, Pool, PooledBlock
from megamind_ray.sim.work import Block

HERE, FIRST = NodeId("n0"), Generation(0)
R0, R1 = Rank(0), Rank(1)


def new_pool(credit_bytes: int = 100, *, sides: tuple[Budget, ...] = ()) -> Pool:
    return Pool(HERE, credit_bytes, sides=sides, clock=Clock())


def entry(block: int = 0, nbytes: int = 10) -> PooledBlock:
    row = Block(block=block, unit=0, nbytes=nbytes, parts=1, bytes_of={R0: nbytes}, cuts=((0, nbytes),))
    return PooledBlock(row, nbytes, "read")


def reserve(pool: Pool, nbytes: int, into: list[int]) -> Task:
    def steps() -> Steps:
        yield from pool.reserve(nbytes)
        into.append(nbytes)

    return Task(steps())


def collect(pool: Pool, rank: Rank, generation: Generation = FIRST, max_parts: int = 8) -> tuple[Task, list[Letter]]:
    letters: list[Letter] = []

    def steps() -> Steps:
        yield from pool.collect(rank, generation, max_parts, letters)

    return Task(steps()), letters


def test_credit_comes_back_with_the_last_ack() -> None:
    pool, got = new_pool(10), list[int]()
    reserve(pool, 10, got)
    pool.publish(entry(), [(R0, (R0,)), (R1, (R1,))])
    reserve(pool, 10, got)
    for rank in (R0, R1):
        assert got == [10]
        _, letters = collect(pool, rank)
        pool.acknowledge(rank, FIRST, letters)
    assert got == [10, 10]


def test_half_of_the_credit_is_for_blocks_of_other_nodes_where_there_are_some() -> None:
    pool, got = new_pool(100, sides=("up",)), list[int]()
    reserve(pool, 50, got)
    waiting = reserve(pool, 1, got)
    assert got == [50]
    assert not waiting.is_done


def test_more_than_the_credit_as_a_whole_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"node n0: 101 B of blocks do not fit its pool"):
        list(new_pool(100).reserve(101))


def test_a_consumer_takes_no_more_than_it_asks_for() -> None:
    pool = new_pool()
    for block in range(5):
        pool.publish(entry(block), [(R0, (R0,))])
    _, letters = collect(pool, R0, max_parts=3)
    assert [letter.entry.block.block for letter in letters] == [0, 1, 2]


def test_a_consumer_waits_until_something_is_there() -> None:
    pool = new_pool()
    _, letters = collect(pool, R0)
    assert letters == []
    pool.publish(entry(), [(R0, (R0,))])
    assert len(letters) == 1


def test_what_a_lost_rank_was_handed_counts_as_acked_and_its_late_word_is_ignored() -> None:
    pool, got = new_pool(20), list[int]()
    reserve(pool, 20, got)
    pool.publish(entry(0), [(R0, (R0,))])
    _, handed = collect(pool, R0)
    pool.publish(entry(1), [(R0, (R0,))])
    pool.reset(R0, Generation(1))
    reserve(pool, 20, got)
    assert got == [20, 20]
    pool.acknowledge(R0, FIRST, handed)
    late, letters = collect(pool, R0, FIRST)
    assert late.is_done
    assert letters == []


def test_a_reset_ends_the_wait_of_the_generation_before() -> None:
    pool = new_pool()
    task, letters = collect(pool, R0)
    pool.reset(R0, Generation(1))
    assert task.is_done
    assert letters == []


def test_a_block_for_a_rank_that_has_all_holds_no_credit() -> None:
    pool, got = new_pool(10), list[int]()
    pool.retire(R0, FIRST)
    reserve(pool, 10, got)
    pool.publish(entry(), [(R0, (R0,))])
    reserve(pool, 10, got)
    assert got == [10, 10]


def test_the_use_of_credit_over_time_is_kept() -> None:
    pool, got = new_pool(), list[int]()
    reserve(pool, 30, got)
    pool.give_back(10)
    assert list(pool.series)[-1] == (0.0, 20.0)
