"""NIXL as a data plane, with a NIXL of the tests' own: what it brings, and what happens where it fails."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megamind_ray.actors.messages import Offer
from megamind_ray.actors.nixl_endpoint import NixlEndpoint, WireError
from megamind_ray.actors.nixl_wire import NixlWire
from megamind_ray.errors import ClusterError
from megamind_ray.testing.contracts import DataPlaneContract
from megamind_ray.testing.fake_nixl import FakeFabric, SharedMemoryPlane
from megamind_ray.testing.fakes import MemoryPlane
from megamind_ray.units import KIB, MIB

TIMEOUT_S = 30.0
AT_ONCE_S = 0.02


class Two:
    """Two nodes with one object store, in which each block has its place, and an endpoint each."""

    def __init__(self, *, buffer_bytes: int = 4 * MIB, region_bytes: int = 64 * MIB) -> None:
        self.fabric = FakeFabric()
        self.store = SharedMemoryPlane()
        self.endpoints = [
            NixlEndpoint(
                buffer_bytes=buffer_bytes,
                pool_bytes=self.store.pool_bytes,
                region_bytes=region_bytes,
                start=self.fabric.start,
            )
            for _ in range(2)
        ]
        self.next_load()

    def next_load(self) -> None:
        self.source, self.target = (NixlWire(self.store, endpoint, where="n") for endpoint in self.endpoints)

    def block(self, nbytes: int = 300 * KIB, value: int = 7) -> object:
        return self.source.put(np.full(nbytes, value, np.uint8))

    def fetched(self, offer: object, timeout_s: float = TIMEOUT_S) -> int:
        """The value of a block's bytes, which are all the same."""
        with self.target.fetch(offer, timeout_s=timeout_s) as data:
            assert data.min() == data.max()
            return int(data[0])

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()


@pytest.fixture
def two() -> Iterator[Two]:
    nodes = Two()
    yield nodes
    nodes.close()


class TestNixlWire(DataPlaneContract):
    @pytest.fixture
    def plane(self, two: Two) -> NixlWire:
        """Its own blocks, offered to itself."""
        return two.source


def test_a_block_is_read_where_it_lies(two: Two) -> None:
    offer = two.source.offer(two.block())
    assert isinstance(offer, Offer)
    assert two.fetched(offer) == 7
    assert (two.target.bytes_read, two.fabric.num_reads, two.target.faults) == (300 * KIB, 1, ())


def test_memory_is_registered_once_for_all_blocks(two: Two) -> None:
    for value in range(20):
        assert two.fetched(two.source.offer(two.block(value=value))) == value
    assert two.fabric.num_registered == 3  # what each node reads into, and the pool
    assert two.target.bytes_read == 20 * 300 * KIB


def test_a_block_across_two_regions_comes_in_one_piece() -> None:
    nodes = Two(region_bytes=MIB)
    data = np.random.default_rng(1).integers(0, 256, 3 * MIB, np.uint8)
    offer = nodes.source.offer(nodes.source.put(data))
    assert len(offer.place.parts) in (3, 4)
    with nodes.target.fetch(offer, timeout_s=TIMEOUT_S) as got:
        assert np.array_equal(got, data)
    assert nodes.target.bytes_read == 3 * MIB
    nodes.close()


@pytest.mark.parametrize("method", ["add_remote_agent", "initialize_xfer", "transfer", "check_xfer_state"])
def test_where_nixl_fails_the_block_comes_by_the_object_store_and_a_fault_says_so(two: Two, method: str) -> None:
    two.fabric.refuses[method] = RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
    assert [two.fetched(two.source.offer(two.block(value=value))) for value in (1, 2, 3)] == [1, 2, 3]
    assert two.target.bytes_read == 0
    (fault,) = two.target.faults
    assert fault.kind == "wire_failed"
    assert "NIXL_ERR_REMOTE_DISCONNECT" in fault.where
    assert fault.action == "3 blocks by Ray's object store instead"
    assert two.fabric.num_held == 0


def test_a_transfer_that_fails_is_the_last_from_that_endpoint_in_a_load(two: Two) -> None:
    two.fabric.state = "ERR"
    assert two.fetched(two.source.offer(two.block())) == 7
    two.fabric.state = "DONE"
    assert two.fetched(two.source.offer(two.block())) == 7
    assert (two.fabric.num_reads, two.target.bytes_read) == (1, 0)
    two.next_load()
    assert two.fetched(two.source.offer(two.block())) == 7
    assert two.target.bytes_read == 300 * KIB


def test_memory_that_cannot_be_registered_leaves_the_object_store(two: Two) -> None:
    two.fabric.refuses["register_memory"] = RuntimeError("RLIMIT_MEMLOCK")
    offer = two.source.offer(two.block())
    assert not isinstance(offer, Offer)
    assert two.fetched(offer) == 7
    (fault,) = two.source.faults
    assert "RLIMIT_MEMLOCK" in fault.where


def test_blocks_that_are_not_in_the_pool_go_by_the_object_store() -> None:
    """Small objects of Ray are in the process's own memory, and overflow has mappings that come and go."""
    fabric = FakeFabric()
    wire = NixlWire(MemoryPlane(), NixlEndpoint(buffer_bytes=MIB, pool_bytes=1, start=fabric.start))
    offer = wire.offer(wire.put(np.full(1000, 3, np.uint8)))
    with wire.fetch(offer, timeout_s=TIMEOUT_S) as data:
        assert data[0] == 3
    assert (fabric.num_reads, wire.faults) == (0, ())


def test_a_mapping_that_is_not_the_pool_is_not_registered() -> None:
    """An object that has no room in the pool has a mapping of its own, which goes with it."""
    store, fabric = SharedMemoryPlane(MIB), FakeFabric()
    endpoint = NixlEndpoint(buffer_bytes=MIB, pool_bytes=2 * MIB, start=fabric.start)
    wire = NixlWire(store, endpoint)
    assert not isinstance(wire.offer(wire.put(np.zeros(1000, np.uint8))), Offer)
    assert fabric.num_registered == 1
    endpoint.close()


def test_late_bytes_of_a_transfer_that_was_given_up_hit_nobody(two: Two) -> None:
    """The memory that it may still write to is not used until NIXL says that it is over."""
    endpoint = two.endpoints[1]
    late, later = (two.source.offer(two.block(2 * MIB, value)) for value in (1, 2))
    two.fabric.state = "PROC"
    assert two.fetched(late, timeout_s=AT_ONCE_S) == 1, "by the object store"
    two.fabric.state = "DONE"  # the bytes arrive, whenever somebody looks
    with endpoint.read(later.place, timeout_s=TIMEOUT_S) as data:
        assert endpoint._late, "there was room beside it, so nobody looked"
        # Longer than a test may take: nothing else will come back, so it must not be waited for.
        with endpoint.read(later.place, timeout_s=1000) as beside:
            assert data.min() == data.max() == beside.min() == beside.max() == 2
        assert not endpoint._late, "its memory was needed"


def test_all_memory_comes_back_whatever_happens(two: Two) -> None:
    endpoint = two.endpoints[1]
    offer = two.source.offer(two.block(3 * MIB))
    for state in ("DONE", "ERR"):
        two.fabric.state = state  # type: ignore[assignment]
        two.fetched(offer)
        two.next_load()
    two.fabric.state = "DONE"
    with pytest.raises(RuntimeError, match="of the user"), two.target.fetch(offer, timeout_s=TIMEOUT_S):
        raise RuntimeError("of the user")
    assert endpoint._room._free == [(0, 4 * MIB)]


def test_who_finds_no_room_waits_for_it_and_then_goes_by_the_object_store(two: Two) -> None:
    offer = two.source.offer(two.block(3 * MIB))
    there, done = threading.Event(), threading.Event()

    def hold() -> None:
        with two.target.fetch(offer, timeout_s=TIMEOUT_S):
            there.set()
            done.wait(TIMEOUT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert there.wait(TIMEOUT_S)
    assert two.fetched(offer, timeout_s=AT_ONCE_S) == 7
    assert two.target.bytes_read == 3 * MIB, "the second came another way"
    waiter = threading.Thread(target=two.fetched, args=(offer,))
    waiter.start()
    done.set()
    waiter.join(TIMEOUT_S)
    holder.join(TIMEOUT_S)
    assert two.target.bytes_read == 6 * MIB


def test_a_block_larger_than_the_buffer_goes_by_the_object_store(two: Two) -> None:
    assert two.fetched(two.source.offer(two.block(5 * MIB))) == 7
    (fault,) = two.target.faults
    assert "a block of 5.00 MiB has no room in wire.buffer_bytes = 4.00 MiB" in fault.where


def test_a_block_lives_as_long_as_its_handle_and_no_longer(two: Two) -> None:
    handle = two.block()
    two.source.offer(handle)
    assert two.store.live_bytes == 300 * KIB
    del handle
    gc.collect()
    assert two.store.live_bytes == 0


def test_a_settled_block_is_the_stores_own_and_no_view_holds_it(two: Two) -> None:
    """Whoever keeps it has another plane, and the load's is gone."""
    handle = two.block()
    two.source.offer(handle)
    settled = two.source.settle(handle)
    (data,) = two.store.get([settled], timeout_s=TIMEOUT_S)
    assert data[0] == 7
    del handle, data
    gc.collect()
    assert two.store.live_bytes == 300 * KIB
    del settled
    gc.collect()
    assert two.store.live_bytes == 0


def test_to_other_processes_a_handle_is_the_ref_alone() -> None:
    class Store(MemoryPlane):
        def put(self, data: object) -> object:
            return "a ref"

    endpoint = NixlEndpoint(buffer_bytes=MIB, pool_bytes=1, start=FakeFabric().start)
    assert pickle.loads(pickle.dumps(NixlWire(Store(), endpoint).put(np.zeros(1, np.uint8)))) == "a ref"


def test_an_endpoint_that_makes_no_progress_says_so() -> None:
    nodes = Two()
    offer = nodes.source.offer(nodes.block())
    nodes.fabric.refuses["get_new_notifs"] = RuntimeError("gone")
    until = threading.Event()
    for _ in range(1000):
        if nodes.endpoints[1]._broken is not None:
            break
        until.wait(0.01)
    with pytest.raises(WireError, match="makes no progress"), nodes.endpoints[1].read(offer.place, timeout_s=1):
        pass
    assert nodes.fetched(offer) == 7
    nodes.close()


def test_a_block_whose_bytes_are_not_to_be_had_at_once_is_offered_all_the_same(two: Two) -> None:
    """Whoever was to get it is not asked twice: an error in its place would be the last that is heard of the block."""
    handle = two.block()
    get, two.store.get = two.store.get, lost  # type: ignore[method-assign]
    offer = two.source.offer(handle)
    two.store.get = get  # type: ignore[method-assign]
    assert not isinstance(offer, Offer)
    assert two.fetched(offer) == 7


def lost(handles: object, *, timeout_s: float) -> list[Any]:
    raise ClusterError(f"not fetched within {timeout_s:g} s")
