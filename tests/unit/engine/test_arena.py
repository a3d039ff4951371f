from __future__ import annotations

import gc
import threading
import zlib

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from megamind_ray.core.program import View
from megamind_ray.core.tensor import DType
from megamind_ray.device.arena import POISON, Allocation, HostArena
from megamind_ray.device.holes import HoleList
from megamind_ray.device.strided import Runs
from megamind_ray.errors import CapacityError, RequestError

KIB = 1024


def _view(nbytes: int, shape: tuple[int, ...], dtype: DType = DType.U8, offset: int = 0) -> View:
    return View(name="w", tensor=0, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of allocating and freeing keeps allocations apart, inside the budget, and the holes merged."""

    BUDGET = 64 * KIB

    def __init__(self) -> None:
        super().__init__()
        self.arena = HostArena(self.BUDGET)
        self.live: list[tuple[Allocation, int]] = []
        self.fills = 0

    @rule(nbytes=st.integers(0, 24 * KIB), alignment=st.sampled_from([1, 16, 256, 4096]))
    def allocate(self, nbytes: int, alignment: int) -> None:
        free_before = self.arena.free_bytes
        refused: CapacityError | None = None
        try:
            allocation = self.arena.allocate(nbytes, alignment)
        except CapacityError as error:
            refused = error
        if refused is not None:
            assert (refused.needed_bytes, refused.free_bytes) == (nbytes, free_before)
            return
        assert allocation.offset % alignment == 0
        assert 0 <= allocation.offset <= allocation.offset + nbytes <= self.BUDGET
        for other, _ in self.live:
            before = allocation.offset + nbytes <= other.offset
            assert before or other.offset + other.nbytes <= allocation.offset or not (nbytes and other.nbytes)
            assert allocation.epoch != other.epoch
        self.fills = (self.fills + 1) % 251
        self.arena.host_bytes(allocation)[:] = self.fills
        self.live.append((allocation, self.fills))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.live:
            allocation, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
            self.arena.free(allocation)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.arena.free_bytes == self.BUDGET - sum(allocation.nbytes for allocation, _ in self.live)
        for allocation, fill in self.live:
            assert (self.arena.host_bytes(allocation) == fill).all()

    def teardown(self) -> None:
        for allocation, _ in self.live:
            self.arena.free(allocation)
        assert self.arena.allocate(self.BUDGET).nbytes == self.BUDGET


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_the_smallest_hole_that_fits_is_taken() -> None:
    holes = HoleList(100)
    taken = [(begin, holes.take(size, 1)) for begin, size in ((0, 30), (30, 10), (40, 20), (60, 40))]
    assert all(begin == offset for begin, offset in taken)
    holes.give(0, 30)
    holes.give(40, 60)

    assert holes.take(15, 1) == 40


def test_neighbouring_holes_become_one() -> None:
    holes = HoleList(30)
    assert [holes.take(10, 1) for _ in range(3)] == [0, 10, 20]
    holes.give(0, 10)
    holes.give(20, 30)

    assert holes.give(10, 20) == (0, 30)
    assert holes.ranges == [(0, 30)]


def test_what_does_not_fit_names_need_free_space_and_remedy() -> None:
    arena = HostArena(8 * KIB, where="arena of rank 3")
    arena.allocate(6 * KIB)

    with pytest.raises(CapacityError, match=r"arena of rank 3: 4\.00 KiB do not fit.*raise the budget by as much"):
        arena.allocate(4 * KIB)


def test_fragmentation_is_called_by_its_name() -> None:
    arena = HostArena(8 * KIB)
    parts = [arena.allocate(2 * KIB) for _ in range(4)]
    arena.free(parts[0])
    arena.free(parts[2])

    with pytest.raises(CapacityError, match="fragmented"):
        arena.allocate(3 * KIB)


def test_strided_writes_land_in_their_rows() -> None:
    arena = HostArena(KIB)
    allocation = arena.allocate(32)
    arena.host_bytes(allocation)[:] = 0

    arena.write(allocation, Runs(1, 2, 3, 4), np.arange(1, 7, dtype=np.uint8))

    assert arena.host_bytes(allocation)[:12].tolist() == [0, 1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0]


def test_checksum_is_over_the_bytes_in_place() -> None:
    arena = HostArena(KIB)
    allocation = arena.allocate(8)
    arena.write(allocation, Runs(0, 8, 1, 8), np.arange(8, dtype=np.uint8))

    assert arena.checksum(allocation, 2, 4) == zlib.crc32(bytes([2, 3, 4, 5]))


def test_a_tensor_is_a_writable_view_with_a_storage_of_its_own() -> None:
    arena = HostArena(4 * KIB)
    allocation = arena.allocate(KIB)
    values = torch.arange(6, dtype=torch.float32)
    arena.write(allocation, Runs(256, 24, 1, 24), values.view(torch.uint8).numpy())

    tensor = arena.tensor(allocation, _view(24, (2, 3), DType.F32, offset=256))
    tensor[0, 0] = 9

    assert tensor.tolist() == [[9, 1, 2], [3, 4, 5]]
    assert tensor.untyped_storage().nbytes() == 24
    assert arena.host_bytes(allocation)[256:260].view(np.float32)[0] == 9


def test_memory_is_not_given_back_while_a_tensor_or_a_view_of_it_lives() -> None:
    arena = HostArena(KIB)
    allocation = arena.allocate(64)
    row = arena.tensor(allocation, _view(64, (8, 8)))[3]

    with pytest.raises(RequestError, match=r"still in use by 1 tensors or leases.*drop the tensors"):
        arena.free(allocation)
    del row
    gc.collect()
    arena.free(allocation)

    assert arena.free_bytes == KIB


def test_a_tensor_outlives_its_arena() -> None:
    arena = HostArena(KIB)
    tensor = arena.tensor(arena.allocate(4), _view(4, (4,)))
    tensor[:] = 5
    del arena
    gc.collect()

    assert tensor.tolist() == [5, 5, 5, 5]


def test_giving_back_waits_for_a_lease_that_ends_in_time() -> None:
    arena = HostArena(KIB)
    allocation = arena.allocate(64)
    lease = arena.lease(allocation)
    ender = threading.Timer(0.05, lease.close)
    ender.start()

    arena.free(allocation, deadline_s=30)

    ender.join()
    assert arena.free_bytes == KIB


def test_a_stale_allocation_gives_no_lease_and_is_not_freed_twice() -> None:
    arena = HostArena(KIB)
    old = arena.allocate(64)
    arena.free(old)
    new = arena.allocate(64)
    assert new.offset == old.offset

    with pytest.raises(RequestError, match="given back"):
        arena.lease(old)
    with pytest.raises(RequestError, match="given back before"):
        arena.free(old)
    arena.lease(new).close()


def test_closing_a_lease_twice_counts_once() -> None:
    arena = HostArena(KIB)
    allocation = arena.allocate(64)
    first, second = arena.lease(allocation), arena.lease(allocation)
    first.close()
    first.close()

    with pytest.raises(RequestError, match="in use by 1"):
        arena.free(allocation)
    second.close()


def test_poison_shows_in_freed_memory() -> None:
    arena = HostArena(KIB, poison=True)
    allocation = arena.allocate(64)
    arena.host_bytes(allocation)[:] = 1
    left = arena.host_bytes(allocation)

    arena.free(allocation)

    assert (left == POISON).all()


def test_freed_pages_go_back_to_the_system_and_neighbours_stay() -> None:
    arena = HostArena(12 * KIB)
    first, middle, last = (arena.allocate(4 * KIB, 1) for _ in range(3))
    for number, allocation in enumerate((first, middle, last), 1):
        arena.host_bytes(allocation)[:] = number
    middle_bytes = arena.host_bytes(middle)

    arena.free(middle)

    assert not middle_bytes.any()
    assert (arena.host_bytes(first) == 1).all()
    assert (arena.host_bytes(last) == 3).all()


def test_an_empty_tensor_needs_no_lease() -> None:
    arena = HostArena(0)
    allocation = arena.allocate(0)

    tensor = arena.tensor(allocation, _view(0, (0, 5), DType.BF16))
    arena.free(allocation)

    assert tensor.shape == (0, 5)
    assert tensor.dtype == torch.bfloat16
