"""What a node keeps, and blocks that come from one that leaves."""

from __future__ import annotations

import numpy as np
import pytest

from megamind_ray.actors.block_pool import BlockPool, PooledBlock
from megamind_ray.actors.kept_blocks import BlockKey, Heirloom, KeptBlocks
from megamind_ray.actors.messages import node_consumer, rank_consumer
from megamind_ray.core.evacuation import HeldBlock
from megamind_ray.core.ids import BlockId, ExtentId, LoadId, Rank
from megamind_ray.core.report import Kept
from megamind_ray.errors import ClusterError, IntegrityError
from megamind_ray.testing.fakes import MemoryPlane

LOAD, OTHER = LoadId("llama#1"), LoadId("qwen#2")
BOUND_S = 10.0


def entry(plane: MemoryPlane, block: int, nbytes: int = 100) -> PooledBlock:
    data = np.full(nbytes, block, np.uint8)
    return PooledBlock(
        block=BlockId(block),
        extent=ExtentId(7),
        nbytes=nbytes,
        crc32s=np.array([block, 2], np.uint32),
        handle=plane.put(data),
        ranks=(Rank(3),),
    )


class Two:
    """Two nodes, the first of which keeps blocks 1 and 2 of a load, and block 1 of another one."""

    def __init__(self) -> None:
        self.wire = MemoryPlane()
        self.old, self.new = KeptBlocks(self.wire), KeptBlocks(self.wire)
        self.old.add(LOAD, {1: entry(self.wire, 1), 2: entry(self.wire, 2)})
        self.old.add(OTHER, {1: entry(self.wire, 1, nbytes=50)})
        self.asked: list[BlockKey] = []

    def hand(self, keys: object) -> tuple[Heirloom, ...]:
        assert isinstance(keys, list)
        self.asked += keys
        return self.old.hand(keys, timeout_s=BOUND_S)


KEYS = [(LOAD, BlockId(1)), (LOAD, BlockId(2)), (OTHER, BlockId(1))]


@pytest.fixture
def two() -> Two:
    return Two()


def test_blocks_taken_over_are_kept_as_they_were(two: Two) -> None:
    result = two.new.copy(KEYS, two.hand, timeout_s=BOUND_S)

    assert result.kept == {LOAD: Kept(num_blocks=2, num_bytes=200), OTHER: Kept(num_blocks=1, num_bytes=50)}
    assert two.new.holdings() == two.old.holdings()
    before, after = (kept.hand(KEYS, timeout_s=BOUND_S) for kept in (two.old, two.new))
    for old, new in zip(before, after, strict=True):
        assert (old.crc32, old.crc32s.tolist(), old.extent) == (new.crc32, new.crc32s.tolist(), new.extent)


def test_copies_are_bytes_of_their_own(two: Two) -> None:
    two.new.copy(KEYS, two.hand, timeout_s=BOUND_S)
    assert two.wire.live_bytes == 2 * 250
    for load in (LOAD, OTHER):
        two.old.drop(load)

    assert two.wire.live_bytes == 250
    two.new.hand(KEYS, timeout_s=BOUND_S)


def test_a_block_that_comes_with_other_bytes_is_not_kept_and_what_came_before_is(two: Two) -> None:
    two.new.copy(KEYS[:1], two.hand, timeout_s=BOUND_S)

    def damaging(keys: object) -> tuple[Heirloom, ...]:
        given = two.hand(keys)
        two.wire.corrupt_next_gets = 1
        return given

    with pytest.raises(IntegrityError, match=r"block 2 of load llama#1 came from another node with 100 bytes"):
        two.new.copy(KEYS[:2], damaging, timeout_s=BOUND_S)

    assert two.new.kept(LOAD) == Kept(num_blocks=1, num_bytes=100)


def test_the_same_order_again_asks_only_for_what_is_missing(two: Two) -> None:
    two.new.copy(KEYS[:1], two.hand, timeout_s=BOUND_S)
    two.new.copy(KEYS, two.hand, timeout_s=BOUND_S)

    assert two.asked == [*KEYS[:1], *KEYS[1:]]


def test_a_block_that_is_not_kept_cannot_be_handed_on(two: Two) -> None:
    with pytest.raises(ClusterError, match=r"does not keep block 9 of load llama#1"):
        two.old.hand([(LOAD, BlockId(9))], timeout_s=BOUND_S)


def test_an_unloaded_model_leaves_nothing(two: Two) -> None:
    two.old.drop(LOAD)

    assert set(two.old.holdings().blocks) == {OTHER}
    assert two.old.kept(LOAD) == Kept()
    assert two.wire.live_bytes == 50


def test_a_kept_block_knows_the_ranks_that_took_it() -> None:
    pool = BlockPool(credit_bytes=1000, keep=[1])
    pool.reserve(100)
    one = entry(MemoryPlane(), 1)
    pool.publish(one, [(rank_consumer(0), (Rank(0),)), (node_consumer("b"), (Rank(2), Rank(1)))])
    for consumer in (rank_consumer(0), node_consumer("b")):
        (delivery,) = pool.exchange(consumer, 0, acked=[], limit=1, timeout_s=BOUND_S)
        pool.exchange(consumer, 0, acked=[delivery.serial], limit=1, timeout_s=0)
    kept = KeptBlocks(MemoryPlane())

    kept.add(LOAD, pool.close())

    (held,) = kept.holdings().blocks[LOAD]
    assert held == HeldBlock(block=BlockId(1), nbytes=100, ranks=(Rank(0), Rank(1), Rank(2)))
