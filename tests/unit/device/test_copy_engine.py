"""Copies on streams: what arrives, what is kept until it did, and what happens when the device does not answer."""

from __future__ import annotations

import gc
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from megamind_ray.device.copy_engine import CopyEngine
from megamind_ray.device.copy_engines import copy_engine
from megamind_ray.device.host_registry import HostRegistry
from megamind_ray.device.strided import Bytes, Runs
from megamind_ray.errors import CapacityError, ClusterError, RequestError
from megamind_ray.testing.fake_device import FakeHostRuntime, FakeStream

PAGE = mmap.PAGESIZE


class _Device:
    """An engine for memory of the CPU, and its streams: towards the device first, the way back last."""

    def __init__(self, num_streams: int = 1, deadline_s: float = 60.0, registry: HostRegistry | None = None) -> None:
        self.streams: list[FakeStream] = []
        self.runtime = FakeHostRuntime()
        self.engine = CopyEngine(
            torch.device("cpu"),
            self._open,
            self.runtime,
            registry=registry,
            num_streams=num_streams,
            deadline_s=deadline_s,
        )

    def _open(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]


def _numbers(count: int) -> Bytes:
    return np.arange(1, count + 1, dtype=np.uint8)


def test_packed_bytes_arrive_in_place() -> None:
    device, flat = _Device(), torch.zeros(10, dtype=torch.uint8)

    ticket = device.engine.to_device(flat, Runs(3, 4, 1, 4), _numbers(4))

    assert ticket is not None
    ticket.wait()
    assert flat.tolist() == [0, 0, 0, 1, 2, 3, 4, 0, 0, 0]


def test_runs_with_gaps_arrive_and_touch_nothing_else() -> None:
    device, whole = _Device(), torch.zeros(14, dtype=torch.uint8)

    device.engine.to_device(whole[2:], Runs(1, 2, 3, 4), _numbers(6))

    assert whole.tolist() == [0, 0, 0, 1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0]


def test_runs_come_back_packed() -> None:
    device, flat, back = _Device(), torch.arange(12, dtype=torch.uint8), np.zeros(6, np.uint8)

    ticket = device.engine.to_host(flat, Runs(1, 2, 3, 4), back)

    assert ticket is not None
    ticket.wait()
    assert back.tolist() == [1, 2, 5, 6, 9, 10]
    assert device.streams[-1].num_follows == 1  # after the work that made the bytes


def test_nothing_to_copy_gives_no_ticket() -> None:
    device, flat = _Device(), torch.zeros(4, dtype=torch.uint8)

    assert device.engine.to_device(flat, Runs(0, 0, 0, 0), np.empty(0, np.uint8)) is None
    assert device.engine.to_host(flat, Runs(0, 0, 0, 0), np.empty(0, np.uint8)) is None
    assert not device.streams[0].events


def test_streams_take_turns_and_the_way_back_has_its_own() -> None:
    device, flat = _Device(num_streams=2), torch.zeros(4, dtype=torch.uint8)

    for _ in range(4):
        device.engine.to_device(flat, Runs(0, 4, 1, 4), _numbers(4))
    device.engine.to_host(flat, Runs(0, 4, 1, 4), np.zeros(4, np.uint8))

    assert [len(stream.events) for stream in device.streams] == [2, 2, 1]


def test_the_source_lives_until_the_device_has_read_it_though_the_ticket_was_forgotten() -> None:
    device, flat = _Device(), torch.zeros(4, dtype=torch.uint8)
    device.streams[0].slow = True
    source = _numbers(4)
    gone = weakref.ref(source)

    device.engine.to_device(flat, Runs(0, 4, 1, 4), source)
    del source
    gc.collect()
    assert gone() is not None

    device.streams[0].events[0].passed = True
    device.engine.to_device(flat, Runs(0, 4, 1, 4), _numbers(4))
    gc.collect()
    assert gone() is None


def _block(folder: Path) -> Bytes:
    path = folder / "pool"
    path.write_bytes(bytes(range(256)) * (16 * PAGE // 256))
    with path.open("r+b") as file:
        block = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    block.flags.writeable = False
    return block


@pytest.mark.parametrize("dst", [Runs(5, 14 * PAGE, 1, 14 * PAGE), Runs(5, 1024, 56, 1500)], ids=["packed", "gaps"])
def test_a_block_of_the_pool_is_copied_from_registered_memory_until_the_event(tmp_path: Path, dst: Runs) -> None:
    runtime = FakeHostRuntime()
    registry = HostRegistry(runtime, max_bytes=16 * PAGE, granule_bytes=4 * PAGE)
    device, flat = _Device(registry=registry), torch.zeros(dst.end, dtype=torch.uint8)
    device.streams[0].slow = True
    block = _block(tmp_path)[PAGE : 15 * PAGE]

    ticket = device.engine.to_device(flat, dst, block)

    assert ticket is not None
    assert torch.equal(
        flat.as_strided((dst.num_runs, dst.run_bytes), (dst.stride_bytes, 1), dst.offset).flatten(),
        torch.tensor(block),
    )
    registry.close()
    assert runtime.registered  # in use
    device.streams[0].events[0].passed = True
    ticket.wait()
    registry.close()
    assert not runtime.registered


def test_threads_that_copy_from_one_pool_all_get_their_bytes_and_leave_nothing_held(tmp_path: Path) -> None:
    runtime = FakeHostRuntime()
    registry = HostRegistry(runtime, max_bytes=8 * PAGE, granule_bytes=4 * PAGE)  # half of the pool: others make room
    device, block = _Device(registry=registry), _block(tmp_path)

    def copy(thread: int) -> bool:
        right = True
        for number in range(60):
            begin = (thread * 7 + number * 13) % 12 * PAGE + thread
            flat = torch.zeros(3 * PAGE, dtype=torch.uint8)
            ticket = device.engine.to_device(flat, Runs(0, 3 * PAGE, 1, 3 * PAGE), block[begin : begin + 3 * PAGE])
            assert ticket is not None
            ticket.wait()
            right &= flat.numpy().tobytes() == block[begin : begin + 3 * PAGE].tobytes()
        return right

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(copy, range(4)))
    registry.close()
    assert not runtime.registered
    assert registry.counts.registered_bytes == 0


def test_what_may_be_written_to_is_not_registered(tmp_path: Path) -> None:
    runtime = FakeHostRuntime()
    registry = HostRegistry(runtime, max_bytes=16 * PAGE, granule_bytes=4 * PAGE)
    device, flat = _Device(registry=registry), torch.zeros(4, dtype=torch.uint8)

    device.engine.to_device(flat, Runs(0, 4, 1, 4), _numbers(4))

    assert runtime.num_calls == 0


def test_a_device_that_does_not_answer_is_named_and_gets_no_more_copies() -> None:
    device, flat = _Device(deadline_s=0.01), torch.zeros(4, dtype=torch.uint8)
    device.streams[0].slow = True
    ticket = device.engine.to_device(flat, Runs(0, 4, 1, 4), _numbers(4))
    assert ticket is not None

    with pytest.raises(ClusterError, match=r"device cpu: a copy of 4 B to the device did not end within 0.01 s"):
        ticket.wait()
    with pytest.raises(ClusterError, match="failed before .*start the worker again"):
        device.engine.to_device(flat, Runs(0, 4, 1, 4), _numbers(4))


def test_deadlines_of_copies_to_a_device_that_is_gone_do_not_add_up() -> None:
    """The second ticket is looked at once: two hundred of them would wait for hours."""
    device, flat = _Device(deadline_s=0.01), torch.zeros(4, dtype=torch.uint8)
    device.streams[0].slow = True
    tickets = [device.engine.to_device(flat, Runs(0, 4, 1, 4), _numbers(4)) for _ in range(2)]
    assert tickets[0] is not None
    assert tickets[1] is not None
    with pytest.raises(ClusterError, match="did not end within"):
        tickets[0].wait()

    with pytest.raises(ClusterError, match="failed before"):
        tickets[1].wait()


def test_a_device_that_fails_meanwhile_is_named_with_what_it_says() -> None:
    device, flat = _Device(), torch.zeros(4, dtype=torch.uint8)
    device.streams[0].slow = True
    ticket = device.engine.to_device(flat, Runs(0, 4, 1, 4), _numbers(4))
    assert ticket is not None
    device.streams[0].events[0].error = RuntimeError("CUDA error: uncorrectable ECC error\nmore")

    with pytest.raises(ClusterError, match=r"device cpu: a copy .* failed: CUDA error: uncorrectable ECC error;"):
        ticket.wait()


def test_a_copy_that_cannot_be_queued_keeps_its_memory_for_good() -> None:
    device, flat = _Device(), torch.zeros(4, dtype=torch.uint8)
    device.streams[0].error = RuntimeError("CUDA error: invalid argument")
    source = _numbers(4)
    gone = weakref.ref(source)

    with pytest.raises(ClusterError, match="invalid argument"):
        device.engine.to_device(flat, Runs(0, 4, 1, 4), source)
    del source
    gc.collect()

    assert gone() is not None


def test_an_interrupt_stays_an_interrupt() -> None:
    device, flat = _Device(), torch.zeros(4, dtype=torch.uint8)
    device.streams[0].error = KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        device.engine.to_device(flat, Runs(0, 4, 1, 4), _numbers(4))


def test_no_room_for_packed_bytes_is_a_capacity_error_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megamind_ray.device.copy_engine.cuda_memory", lambda index: type("Free", (), {"free_bytes": 1})()
    )
    device, flat = _Device(), torch.zeros(8, dtype=torch.uint8)
    device.streams[0].error = torch.OutOfMemoryError("no")

    with pytest.raises(
        CapacityError, match=r"needs 4 B beside the arena, 1 B are free; lower the device budget by 3 B"
    ):
        device.engine.to_device(flat, Runs(0, 2, 2, 4), _numbers(4))

    device.streams[0].error = None
    device.engine.to_device(flat, Runs(0, 2, 2, 4), _numbers(4))
    assert flat.tolist() == [1, 2, 0, 0, 3, 4, 0, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_a_request_error(device: str) -> None:
    with pytest.raises(RequestError, match=r"device cuda:\d: torch .* sees 0 CUDA devices"):
        copy_engine(torch.device(device))


def test_staging_memory_is_locked_by_the_engine_s_runtime() -> None:
    device = _Device()

    buffer = device.engine.staging(PAGE)

    assert device.runtime.registered == {buffer.ctypes.data: PAGE}


def test_memory_is_filled() -> None:
    device, flat = _Device(), torch.zeros(8, dtype=torch.uint8)

    device.engine.fill(flat[2:5], 0xA5).wait()

    assert flat.tolist() == [0, 0, 165, 165, 165, 0, 0, 0]
