"""Copies that are measured, on streams of a device that is not one."""

from __future__ import annotations

import pytest
import torch

from megamind_ray.device.copy_engine import CopyEngine
from megamind_ray.engine import tune_device
from megamind_ray.engine.tune_device import CopyMeter, tune_copies
from megamind_ray.errors import ClusterError, RequestError
from megamind_ray.testing.fake_device import FakeHostRuntime, FakeStream
from megamind_ray.units import MIB

CPU = torch.device("cpu")


class _Streams:
    def __init__(self) -> None:
        self.by_count: dict[int, list[FakeStream]] = {}

    def engine(self, count: int) -> CopyEngine:
        opened = self.by_count[count] = []

        def open_stream() -> FakeStream:
            opened.append(FakeStream())
            return opened[-1]

        return CopyEngine(CPU, open_stream, FakeHostRuntime(), num_streams=count)


def test_all_bytes_are_copied_in_copies_of_the_size_on_all_streams() -> None:
    streams = _Streams()
    meter = CopyMeter(CPU, streams.engine, 10 * MIB)

    seconds = meter.measure({"streams": 2, "copy_bytes": 3 * MIB}, "pinned")

    assert seconds > 0
    assert bool((meter._flat == 1).all())
    assert [len(stream.events) for stream in streams.by_count[2][:2]] == [2, 2]


def test_copies_that_would_be_more_than_there_is_are_refused() -> None:
    meter = CopyMeter(CPU, _Streams().engine, 4 * MIB)

    with pytest.raises(RequestError, match="more than the"):
        meter.measure({"streams": 2, "copy_bytes": 4 * MIB}, "pinned")


def test_a_device_without_room_is_an_error_that_the_measuring_of_a_disk_survives() -> None:
    with pytest.raises(RequestError, match="cpu: no room to measure copies .*end what else runs on it"):
        CopyMeter(CPU, _Streams().engine, 1 << 60)


def test_a_device_that_fails_is_an_error_that_the_measuring_of_a_disk_survives() -> None:
    def broken(_count: int) -> CopyEngine:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    with pytest.raises(ClusterError, match=r"copies cannot be measured \(CUDA error: an illegal memory access"):
        CopyMeter(CPU, broken, MIB)


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_device, "gpu_facts", lambda: ())

    assert tune_copies(deadline_s=1.0, clock=lambda: 0.0, on_trial=lambda *_: None) is None


@pytest.mark.gpu
def test_copies_to_a_gpu_are_measured() -> None:
    ticks = iter(range(1_000_000))

    tuned = tune_copies(deadline_s=1_000_000.0, clock=lambda: float(next(ticks)), on_trial=lambda *_: None)

    assert tuned is not None
    assert all(trial.verdict in ("taken", "kept") for trial in tuned.found.trials)
    assert {trial.knob for trial in tuned.found.trials} == {"streams", "copy_bytes"}
