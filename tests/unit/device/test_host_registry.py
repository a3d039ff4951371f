"""Blocks in shared memory are page-locked in place, within CUDA's rules and a bound."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.device.arena import host_buffer
from megamind_ray.device.host_registry import Held, HostRegistry, Piece
from megamind_ray.device.mappings import SharedMapping
from megamind_ray.device.strided import Bytes
from megamind_ray.testing.fake_device import FakeHostRuntime

PAGE = mmap.PAGESIZE
GRANULE = 4 * PAGE
SIZE = 64 * PAGE


def _pool(folder: Path, name: str = "pool", *, access: int = mmap.ACCESS_DEFAULT) -> Bytes:
    """A file in shared memory as Ray's: each call another one."""
    path = folder / name
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), SIZE, access=access), np.uint8)


def _block(pool: Bytes, begin: int, nbytes: int) -> Bytes:
    """A block as Ray gives it: a read-only array of its own, not a slice of another array."""
    block = np.frombuffer(memoryview(pool), np.uint8, nbytes, begin)
    block.flags.writeable = False
    return block


def _registry(runtime: FakeHostRuntime, max_bytes: int = SIZE) -> HostRegistry:
    return HostRegistry(runtime, max_bytes=max_bytes, granule_bytes=GRANULE)


def _check(view: Bytes, held: Held, runtime: FakeHostRuntime) -> None:
    """The pieces tile the view, and CUDA would copy each."""
    at = 0
    for piece in held.pieces:
        assert piece.begin == at
        at = piece.end
        assert piece.copy_first or runtime.may_copy(view.ctypes.data + piece.begin, view.ctypes.data + piece.end)
    assert at == view.nbytes


def test_a_block_is_registered_and_cut_at_the_borders_of_granules(tmp_path: Path) -> None:
    runtime, pool = FakeHostRuntime(), _pool(tmp_path)
    registry = _registry(runtime)
    block = _block(pool, 100, 2 * GRANULE)

    held = registry.hold(block)

    _check(block, held, runtime)
    assert len(held.pieces) in (3, 4)  # the mapping begins where the kernel put it
    assert registry.counts.in_place_bytes == block.nbytes
    assert min(runtime.registered) >= pool.ctypes.data


def test_blocks_that_share_a_page_do_not_collide(tmp_path: Path) -> None:
    runtime, pool = FakeHostRuntime(), _pool(tmp_path)
    registry = _registry(runtime)
    first, second = _block(pool, 0, 6 * PAGE + 64), _block(pool, 6 * PAGE + 64, 6 * PAGE)

    held = [registry.hold(first), registry.hold(second)]

    for block, pieces in zip((first, second), held, strict=True):
        _check(block, pieces, runtime)
    assert registry.counts.staged_bytes == 0


def test_memory_stays_registered_for_the_blocks_that_come_there_later(tmp_path: Path) -> None:
    runtime, pool = FakeHostRuntime(), _pool(tmp_path)
    registry = _registry(runtime)
    registry.hold(_block(pool, 0, 8 * PAGE)).release()
    num_calls = runtime.num_calls

    registry.hold(_block(pool, PAGE, 5 * PAGE))

    assert runtime.num_calls == num_calls


def test_private_memory_is_never_registered() -> None:
    """Its pages go back to the system and others come to the same addresses: a registration would keep the old ones."""
    runtime = FakeHostRuntime()
    registry = _registry(runtime)

    assert registry.hold(host_buffer(8 * PAGE)).pieces == (Piece(0, 8 * PAGE),)
    assert registry.hold(np.frombuffer(bytes(100), np.uint8)).pieces == (Piece(0, 100),)
    assert runtime.num_calls == 0


def test_the_least_recently_used_makes_room_and_what_is_in_use_does_not(tmp_path: Path) -> None:
    runtime, pool = FakeHostRuntime(), _pool(tmp_path)
    first = -pool.ctypes.data % GRANULE  # a granule that the mapping does not clip
    blocks = [_block(pool, first + number * GRANULE, GRANULE) for number in range(4)]
    registry = _registry(runtime, max_bytes=2 * GRANULE)

    in_use = registry.hold(blocks[0])
    registry.hold(blocks[1]).release()
    registry.hold(blocks[2]).release()
    assert set(runtime.registered) == {blocks[0].ctypes.data, blocks[2].ctypes.data}

    also_in_use = registry.hold(blocks[2])
    staged = registry.hold(blocks[3])
    _check(blocks[3], staged, runtime)
    assert registry.counts.staged_bytes == GRANULE
    staged.release()

    in_use.release()
    also_in_use.release()
    in_use.release()  # a second time: nothing
    registry.hold(blocks[3])
    assert blocks[3].ctypes.data in runtime.registered


def test_memory_that_a_copy_passes_unregistered_stays_so_until_the_copy_ends(tmp_path: Path) -> None:
    """Two copies of one block: the first found no room, the second does; the first must not come to depend on it."""
    runtime, pool = FakeHostRuntime(), _pool(tmp_path)
    first = -pool.ctypes.data % GRANULE
    blocks = [_block(pool, first + number * GRANULE, GRANULE) for number in range(2)]
    registry = _registry(runtime, max_bytes=GRANULE)
    room = registry.hold(blocks[0])
    unregistered = registry.hold(blocks[1])
    room.release()

    registry.hold(blocks[1]).release()
    assert blocks[1].ctypes.data not in runtime.registered

    unregistered.release()
    registry.hold(blocks[1])
    assert blocks[1].ctypes.data in runtime.registered


def test_what_failed_once_is_not_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime, pool, other = FakeHostRuntime(), _pool(tmp_path), _pool(tmp_path, "other")
    registry = _registry(runtime)
    runtime.error = 2

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            block = _block(pool, 0, 8 * PAGE)
            _check(block, registry.hold(block), runtime)

    assert runtime.num_calls == 2  # for reading only, and then plainly
    assert caplog.text.count("could not be page-locked: fake error 2") == 1
    assert "ulimit -l" in caplog.text
    runtime.error = 0
    registry.hold(_block(other, 0, PAGE))
    assert runtime.registered


def test_a_device_without_read_only_registrations_gets_plain_ones(tmp_path: Path) -> None:
    runtime, pool = FakeHostRuntime(), _pool(tmp_path)
    runtime.read_only_supported = False
    registry = _registry(runtime)

    registry.hold(_block(pool, 0, 64))
    registry.hold(_block(pool, 2 * GRANULE, 64))

    assert len(runtime.registered) == 2
    assert runtime.num_calls == 3  # one to find out, then one each


def test_memory_mapped_for_reading_is_left_where_the_device_cannot(tmp_path: Path) -> None:
    runtime, pool = FakeHostRuntime(), _pool(tmp_path, access=mmap.ACCESS_READ)
    runtime.read_only_supported = False
    registry = _registry(runtime)
    block = _block(pool, 0, 8 * PAGE)

    _check(block, registry.hold(block), runtime)

    assert not runtime.registered
    assert registry.counts.staged_bytes == block.nbytes


def test_pages_that_somebody_else_registered_are_read_on_the_host(tmp_path: Path) -> None:
    runtime, pool = FakeHostRuntime(), _pool(tmp_path)
    runtime.registered[pool.ctypes.data + PAGE] = PAGE
    registry = _registry(runtime)
    block = _block(pool, 0, 12 * PAGE)

    held = registry.hold(block)

    _check(block, held, runtime)
    assert [piece.copy_first for piece in held.pieces].count(True) == 1


def test_another_file_at_the_same_addresses_is_registered_anew(tmp_path: Path) -> None:
    """The worker unmapped a file and mapped another one there; the device would read the pages of the first."""
    runtime, pool = FakeHostRuntime(), _pool(tmp_path)
    begin = pool.ctypes.data
    inodes = iter((1, 2))

    def find(first: int, last: int) -> SharedMapping:
        return SharedMapping(begin, begin + SIZE, True, ("00:1a", next(inodes)), begin)

    registry = HostRegistry(runtime, max_bytes=SIZE, granule_bytes=GRANULE, find=find)
    registry.hold(_block(pool, 0, PAGE)).release()
    registry.hold(_block(pool, 0, PAGE)).release()

    assert runtime.num_calls == 2
    assert len(runtime.registered) == 1


def test_slices_of_a_block_cost_one_look_at_the_mappings(tmp_path: Path) -> None:
    pool = _pool(tmp_path)
    begin = pool.ctypes.data
    looks = []

    def find(first: int, last: int) -> SharedMapping:
        looks.append(first)
        return SharedMapping(begin, begin + SIZE, True, ("00:1a", 1), begin)

    registry = HostRegistry(FakeHostRuntime(), max_bytes=SIZE, granule_bytes=GRANULE, find=find)
    block = _block(pool, 0, 8 * PAGE)
    for number in range(8):
        registry.hold(block[number * PAGE : (number + 1) * PAGE])

    assert looks == [begin]


def _in_place(view: Bytes, held: Held, runtime: FakeHostRuntime) -> list[bool]:
    """Which pieces are registered: as long as they are held, that must not change under a copy."""
    begin = view.ctypes.data
    return [runtime.is_registered(begin + piece.begin, begin + piece.end) for piece in held.pieces]


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.integers(0, SIZE - 1), st.integers(1, SIZE)),
        st.tuples(st.just("release"), st.integers(0, 20), st.just(0)),
    ),
    max_size=30,
)


@given(steps=_STEPS, max_granules=st.integers(0, 6))
def test_copies_are_always_possible_and_the_bound_always_holds(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], max_granules: int
) -> None:
    runtime, pool = FakeHostRuntime(), _pool(tmp_path_factory.mktemp("pool"))
    registry = _registry(runtime, max_bytes=max_granules * GRANULE)
    held: list[tuple[Bytes, Held]] = []
    in_place: list[list[bool]] = []
    for step, where, nbytes in steps:
        if step == "hold":
            block = _block(pool, where, min(nbytes, SIZE - where))
            held.append((block, registry.hold(block)))
            in_place.append(_in_place(*held[-1], runtime))
        elif held:
            in_place.pop(where % len(held))
            held.pop(where % len(held))[1].release()
        assert in_place == [_in_place(block, pieces, runtime) for block, pieces in held]
        assert sum(runtime.registered.values()) == registry.counts.registered_bytes <= max_granules * GRANULE
        for block, pieces in held:
            _check(block, pieces, runtime)
    for _, pieces in held:
        pieces.release()
    registry.close()
    assert not runtime.registered
