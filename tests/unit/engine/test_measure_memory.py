"""Memory and processors: what is moved, not how fast."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megamind_ray.device.memory import usable_cores
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.measure_memory import MemoryMeter
from megamind_ray.units import MIB


@pytest.fixture
def meter() -> Iterator[MemoryMeter]:
    with MemoryMeter(3, num_bytes=8 * MIB) as one:
        yield one


@pytest.mark.parametrize("figure", ["copy", "touch", "checksum", "memory", "fill", "run"])
def test_every_figure_is_more_than_nothing(meter: MemoryMeter, figure: str) -> None:
    assert getattr(meter, figure)() > 0


def test_all_threads_together_copy_every_byte(meter: MemoryMeter) -> None:
    assert (meter._target == 2).all()

    meter.memory()

    assert (meter._target == 1).all()


def test_the_shares_of_the_threads_are_disjoint_and_all() -> None:
    for num_threads in (1, 2, 3, 7):
        with MemoryMeter(num_threads, num_bytes=8 * MIB) as meter:
            covered = np.zeros(8 * MIB, np.uint8)
            for share in meter._shares:
                covered[share] += 1
            assert len(meter._shares) <= num_threads
            assert (covered == 1).all()


def test_a_put_is_measured_with_real_bytes_and_keeps_none(meter: MemoryMeter) -> None:
    put: list[int] = []

    def store(data: Bytes) -> None:
        put.append(data.nbytes)

    assert meter.put(store) > 0
    assert put == [MIB] * 8


def test_its_own_size_leaves_others_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from megamind_ray.device.memory import DeviceMemory
    from megamind_ray.engine import measure_memory

    monkeypatch.setattr(measure_memory, "host_memory", lambda: DeviceMemory(1024 * MIB, 160 * MIB))

    with MemoryMeter(2) as meter:
        assert meter._source.nbytes == 20 * MIB


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("99900000 100000", None), ("rubbish", None)],
)
def test_the_quota_of_the_control_group_counts(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")

    assert usable_cores(tmp_path / "cpu.max") == (cores or len(os.sched_getaffinity(0)))


def test_without_a_control_group_all_processors_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "cpu.max") == len(os.sched_getaffinity(0))
