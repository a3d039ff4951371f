"""How much memory is out for staging, and whether that leaves enough to read."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from megamind_ray.config import Config, IoConfig
from megamind_ray.core.manifest import FileInfo
from megamind_ray.core.program import FileTable
from megamind_ray.engine.extent_reader import ExtentReader
from megamind_ray.engine.staging import StagingRing, staging_ring
from megamind_ray.engine.team import run_team
from megamind_ray.io.source import FileVersion, OpenSource

CHUNK_BYTES = 64 << 10
PAGE_BYTES = 4096
BOUND_S = 30.0


class Memory:
    """Makes buffers, and knows how many bytes of them are alive, and were at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: list[weakref.ref[Any]] = []
        self.num_made = self.peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for it in self._alive if (buffer := it()) is not None)

    def make(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        buffer = np.zeros(nbytes, np.uint8)
        with self._lock:
            self._alive.append(weakref.ref(buffer))
            self.num_made += 1
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return buffer


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_buffers_are_used_again(memory: Memory) -> None:
    ring = StagingRing(32, 16, memory.make)
    for nbytes in (10, 8, 16):
        with ring.lend(nbytes) as buffer:
            assert buffer.nbytes == nbytes

    assert memory.num_made == 1


@pytest.mark.parametrize(("threads_that_meet", "do_they"), [(2, True), (3, False)])
def test_who_comes_when_all_is_out_waits(threads_that_meet: int, do_they: bool) -> None:
    ring, barrier = StagingRing(200), threading.Barrier(threads_that_meet)
    met: list[bool] = []

    def use(_item: int) -> None:
        with ring.lend(100):
            try:
                barrier.wait(BOUND_S if do_they else 0.2)
                met.append(True)
            except threading.BrokenBarrierError:
                met.append(False)

    run_team(range(threads_that_meet), use, num_threads=threads_that_meet, name="test")

    assert met == [do_they] * threads_that_meet


def test_free_buffers_make_room_for_those_of_another_size(memory: Memory) -> None:
    ring = StagingRing(8 * PAGE_BYTES, PAGE_BYTES, memory.make)
    with ExitStack() as out:
        for _ in range(8):
            out.enter_context(ring.lend(PAGE_BYTES))
    with ExitStack() as out:
        for _ in range(2):
            out.enter_context(ring.lend(4 * PAGE_BYTES))
        assert memory.num_bytes == 2 * (4 + 1) * PAGE_BYTES  # each with a page for its place in one


def test_a_small_need_does_not_take_a_large_buffer(memory: Memory) -> None:
    ring = StagingRing(5 * PAGE_BYTES, PAGE_BYTES, memory.make)
    with ring.lend(4 * PAGE_BYTES):
        pass
    with ExitStack() as out:
        for _ in range(5):
            out.enter_context(ring.lend(10))
        assert memory.num_bytes == 5 * (10 + PAGE_BYTES)


def test_what_is_larger_than_the_whole_ring_is_lent_alone() -> None:
    with StagingRing(100).lend(500) as buffer:
        assert buffer.nbytes == 500


def test_a_buffer_that_cannot_be_made_takes_no_room() -> None:
    def fail(_nbytes: int) -> Any:
        raise MemoryError

    ring = StagingRing(100, 1, fail)
    for _ in range(2):
        with pytest.raises(MemoryError), ring.lend(100):
            pass


def files(root: str, size_bytes: int) -> FileTable:
    info = FileInfo(path="w.safetensors", size_bytes=size_bytes, data_begin=0)
    return FileTable(root=root, files=(info,), chunk_bytes=CHUNK_BYTES)


class GatedSource(OpenSource):
    """Answers when so many reads are under way at a time; remembers the most that there were."""

    def __init__(self, size_bytes: int, num_wanted: int) -> None:
        super().__init__("http://h/m/w.safetensors", FileVersion(size_bytes))
        self._num_wanted = num_wanted
        self._changed = threading.Condition()
        self._num_now = self.most = 0

    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
        with self._changed:
            self._num_now += 1
            self.most = max(self.most, self._num_now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._num_wanted, BOUND_S)
            self._num_now -= 1

    def current_version(self) -> FileVersion:
        return self.version

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("extent_chunks", "most_extents"), [(1, 8), (4, 4), (6, 3), (9, 3)])
def test_extents_of_remote_files_take_the_memory_of_the_requests_in_flight_and_two_more(
    extent_chunks: int, most_extents: int, memory: Memory
) -> None:
    io = IoConfig(chunk_bytes=CHUNK_BYTES, extent_bytes=extent_chunks * CHUNK_BYTES, remote_threads=6)
    extent_bytes, num_extents = extent_chunks * CHUNK_BYTES, 40
    table = files("http://h/m", num_extents * extent_bytes)
    source = GatedSource(num_extents * extent_bytes, num_wanted=6)
    ring = staging_ring(table, io, memory.make)
    reader = ExtentReader(table, Config(io=io), ring=ring, opener=lambda _uri, _info: source)

    def read(extent: int) -> None:
        with reader.staged(0, extent * extent_bytes, (extent + 1) * extent_bytes):
            pass

    run_team(range(num_extents), read, num_threads=io.reads_in_flight(table.root), name="test")

    assert source.most == 6
    assert memory.peak_bytes <= most_extents * (extent_bytes + PAGE_BYTES)


def test_short_extents_of_remote_files_do_not_wait_for_each_other(memory: Memory) -> None:
    io = IoConfig(chunk_bytes=CHUNK_BYTES, extent_bytes=4 * CHUNK_BYTES, remote_threads=6)
    table = files("http://h/m", 12 * CHUNK_BYTES)
    source = GatedSource(12 * CHUNK_BYTES, num_wanted=6)
    reader = ExtentReader(table, Config(io=io), opener=lambda _uri, _info: source)

    def read(chunk: int) -> None:
        with reader.staged(0, chunk * CHUNK_BYTES, chunk * CHUNK_BYTES + 1000):
            pass

    run_team(range(12), read, num_threads=io.reads_in_flight(table.root), name="test")

    assert source.most == 6


def test_each_thread_that_reads_local_files_has_an_extent() -> None:
    io = IoConfig(chunk_bytes=CHUNK_BYTES, extent_bytes=4 * CHUNK_BYTES, read_threads=3)
    ring = staging_ring(files("/models/m", 1), io)

    with ExitStack() as out:
        for _ in range(3):
            out.enter_context(ring.lend(4 * CHUNK_BYTES))


def test_a_ring_that_is_cleared_keeps_no_memory(memory: Memory) -> None:
    ring = StagingRing(100, 1, memory.make)
    with ring.lend(100):
        pass
    ring.clear()
    gc.collect()

    assert memory.num_bytes == 0
