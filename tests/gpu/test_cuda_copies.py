"""Copies, page-locked memory and the pool in place, on a real device."""

from __future__ import annotations

import gc
import mmap
import tempfile
from functools import partial

import numpy as np
import pytest
import torch

from megamind_ray.core.program import View
from megamind_ray.core.tensor import DType
from megamind_ray.device.copy_engine import CopyEngine
from megamind_ray.device.copy_engines import copy_engine
from megamind_ray.device.copy_stream import CudaCopyStream
from megamind_ray.device.cuda import CudaArena
from megamind_ray.device.host_registry import HostRegistry
from megamind_ray.device.pinned import ALREADY_REGISTERED, CudaHostRuntime, pinned_buffer
from megamind_ray.device.strided import Bytes, Runs
from megamind_ray.errors import ClusterError

pytestmark = pytest.mark.gpu

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def runtime() -> CudaHostRuntime:
    return CudaHostRuntime(DEVICE)


def _engine(registry: HostRegistry | None = None, *, num_streams: int = 1, deadline_s: float = 60.0) -> CopyEngine:
    return CopyEngine(
        DEVICE,
        partial(CudaCopyStream, DEVICE),
        CudaHostRuntime(DEVICE),
        registry=registry,
        num_streams=num_streams,
        deadline_s=deadline_s,
    )


def _pool(nbytes: int, *, access: int = mmap.ACCESS_DEFAULT) -> Bytes:
    """Shared memory as Ray's object store, filled with numbers, as a read-only array."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        np.arange(nbytes // 4, dtype=np.uint32).tofile(file)
        file.flush()
        pool = np.frombuffer(mmap.mmap(file.fileno(), nbytes, access=access), np.uint8)
    pool.flags.writeable = False
    return pool


class _Writable:
    """A read-only array that torch takes without a warning."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self.__array_interface__ = dict(data.__array_interface__, data=(data.ctypes.data, False))


def _is_pinned(data: Bytes) -> bool:
    return torch.from_numpy(np.asarray(_Writable(data))).is_pinned()


def test_memory_of_exact_size_is_page_locked_and_copies_right(runtime: CudaHostRuntime) -> None:
    buffer = pinned_buffer(12 * MIB + 5, runtime)
    buffer[:] = np.arange(buffer.nbytes) % 253

    assert _is_pinned(buffer)
    flat = torch.zeros(buffer.nbytes, dtype=torch.uint8, device=DEVICE)
    ticket = _engine().to_device(flat, Runs(0, buffer.nbytes, 1, buffer.nbytes), buffer)
    assert ticket is not None
    ticket.wait()
    assert torch.equal(flat.cpu(), torch.from_numpy(buffer))


def test_rings_of_page_locked_memory_come_and_go(runtime: CudaHostRuntime) -> None:
    for _ in range(20):
        buffer = pinned_buffer(8 * MIB, runtime)
        assert _is_pinned(buffer)
        del buffer
        gc.collect()


def test_a_failed_registration_leaves_no_error_behind(runtime: CudaHostRuntime) -> None:
    buffer = pinned_buffer(MIB, runtime)

    assert runtime.register(buffer.ctypes.data, MIB, read_only=False) == ALREADY_REGISTERED
    assert "712" in runtime.describe(ALREADY_REGISTERED)
    assert int(torch.ones(10, device=DEVICE).sum()) == 10
    assert runtime.unregister(buffer.ctypes.data + 4096) != 0
    assert int(torch.ones(10, device=DEVICE).sum()) == 10


@pytest.mark.parametrize("access", [mmap.ACCESS_DEFAULT, mmap.ACCESS_READ], ids=["rw", "ro"])
@pytest.mark.parametrize("dst", [Runs(7, 20 * MIB, 1, 20 * MIB), Runs(7, 4096, 5120, 5000)], ids=["packed", "gaps"])
def test_the_pool_is_read_in_place_across_registrations(runtime: CudaHostRuntime, access: int, dst: Runs) -> None:
    pool = _pool(64 * MIB, access=access)
    registry = HostRegistry(runtime, max_bytes=64 * MIB)
    block = pool[3 * MIB + 100 : 23 * MIB + 100]
    flat = torch.zeros(dst.end, dtype=torch.uint8, device=DEVICE)

    ticket = _engine(registry).to_device(flat, dst, block)

    assert ticket is not None
    ticket.wait()
    rows = flat.as_strided((dst.num_runs, dst.run_bytes), (dst.stride_bytes, 1), dst.offset)
    assert np.array_equal(rows.cpu().numpy().reshape(-1), block)
    if access == mmap.ACCESS_DEFAULT:
        assert registry.counts.staged_bytes == 0
        assert _is_pinned(block)
    registry.close()
    assert not _is_pinned(block)


def test_half_registered_pools_copy_right(runtime: CudaHostRuntime) -> None:
    """One granule fits the bound, the others are staged: no copy may touch both kinds of memory."""
    pool = _pool(64 * MIB)
    registry = HostRegistry(runtime, max_bytes=16 * MIB)
    flat = torch.zeros(pool.nbytes, dtype=torch.uint8, device=DEVICE)

    ticket = _engine(registry).to_device(flat, Runs(0, pool.nbytes, 1, pool.nbytes), pool)

    assert ticket is not None
    ticket.wait()
    assert registry.counts.staged_bytes > 0
    assert registry.counts.in_place_bytes > 0
    assert np.array_equal(flat.cpu().numpy(), pool)
    registry.close()


def test_pages_that_somebody_else_registered_are_read_right(runtime: CudaHostRuntime) -> None:
    pool = _pool(32 * MIB)
    assert runtime.register(pool.ctypes.data + 4 * MIB, MIB, read_only=False) == 0
    registry = HostRegistry(runtime, max_bytes=64 * MIB)
    flat = torch.zeros(pool.nbytes, dtype=torch.uint8, device=DEVICE)

    ticket = _engine(registry).to_device(flat, Runs(0, pool.nbytes, 1, pool.nbytes), pool)

    assert ticket is not None
    ticket.wait()
    assert np.array_equal(flat.cpu().numpy(), pool)
    registry.close()
    assert runtime.unregister(pool.ctypes.data + 4 * MIB) == 0


@pytest.mark.parametrize("num_streams", [1, 3])
def test_many_copies_on_few_streams_all_arrive(num_streams: int) -> None:
    engine = _engine(num_streams=num_streams)
    flat = torch.zeros(64, MIB, dtype=torch.uint8, device=DEVICE)
    engine.follow_current()
    sources = [engine.staging(MIB) for _ in range(64)]
    for number, source in enumerate(sources):
        source[:] = number

    tickets = [
        engine.to_device(flat.view(-1), Runs(number * MIB, MIB, 1, MIB), source)
        for number, source in enumerate(sources)
    ]
    for ticket in tickets:
        assert ticket is not None
        ticket.wait()

    expected = torch.arange(64, dtype=torch.uint8, device=DEVICE)[:, None]
    assert torch.equal(flat, expected.expand_as(flat))


@pytest.mark.parametrize("src", [Runs(3, 5000, 1, 5000), Runs(3, 50, 100, 64)], ids=["packed", "gaps"])
def test_bytes_come_back_after_the_work_that_makes_them(src: Runs) -> None:
    engine = _engine()
    back = engine.staging(src.nbytes)
    flat = torch.zeros(src.end, dtype=torch.uint8, device=DEVICE)
    torch.cuda._sleep(50_000_000)
    flat.copy_((torch.arange(src.end, device=DEVICE) % 251).to(torch.uint8))

    ticket = engine.to_host(flat, src, back)

    assert ticket is not None
    ticket.wait()
    rows = np.arange(src.num_runs)[:, None] * src.stride_bytes + np.arange(src.run_bytes) + src.offset
    assert np.array_equal(back, (rows % 251).astype(np.uint8).reshape(-1))


def test_a_device_that_is_late_is_a_cluster_error() -> None:
    streams: list[CudaCopyStream] = []

    def open_stream() -> CudaCopyStream:
        streams.append(CudaCopyStream(DEVICE))
        return streams[-1]

    engine = CopyEngine(DEVICE, open_stream, CudaHostRuntime(DEVICE), deadline_s=0.001)
    with streams[0].queueing():
        torch.cuda._sleep(2_000_000_000)
    flat = torch.zeros(MIB, dtype=torch.uint8, device=DEVICE)
    ticket = engine.to_device(flat, Runs(0, MIB, 1, MIB), engine.staging(MIB))

    assert ticket is not None
    with pytest.raises(ClusterError, match="device cuda:0: a copy of .* did not end within 0.001 s"):
        ticket.wait()
    torch.cuda.synchronize()


def test_memory_given_back_is_not_written_to_while_a_kernel_still_reads_it() -> None:
    arena = CudaArena(MIB)
    view = View(name="w", tensor=0, dtype=DType.U8, shape=(MIB,), offset=0, nbytes=MIB)
    runs = Runs(0, MIB, 1, MIB)
    allocation = arena.allocate(MIB)
    first = arena.write(allocation, runs, np.full(MIB, 1, np.uint8))
    assert first is not None
    first.wait()
    tensor = arena.tensor(allocation, view)
    torch.cuda._sleep(200_000_000)
    copied = tensor.clone()  # queued, not run
    del tensor
    gc.collect()
    arena.free(allocation)

    second = arena.write(arena.allocate(MIB), runs, np.full(MIB, 2, np.uint8))
    assert second is not None
    second.wait()

    assert bool((copied == 1).all())


def test_all_of_a_process_share_an_engine() -> None:
    assert copy_engine(torch.device("cuda")) is copy_engine(torch.device("cuda", torch.cuda.current_device()))
