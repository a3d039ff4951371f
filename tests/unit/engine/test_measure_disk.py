"""The disk behind a folder."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megamind_ray.engine import measure_disk as measuring
from megamind_ray.engine.measure_disk import DiskMeter, measure_disk
from megamind_ray.engine.measure_figures import Sampler
from megamind_ray.errors import ClusterError, RequestError
from megamind_ray.units import MIB


class _Clock:
    """A tenth of a second later each time somebody looks at it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenths = 0

    def __call__(self) -> float:
        with self._lock:
            self._tenths += 1
            return self._tenths / 10


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(17 * MIB))
    return path


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is read of the file: offset and bytes."""
    seen: list[tuple[int, int]] = []
    read_into = measuring.LocalSource.read_into

    def noted(source: measuring.LocalSource, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
        assert past_cache
        seen.append((offset, buffer.nbytes))
        read_into(source, offset, buffer, past_cache=past_cache)

    monkeypatch.setattr(measuring.LocalSource, "read_into", noted)
    return seen


def test_the_rate_counts_all_bytes_that_were_read_until_the_time_was_over(
    file: Path, places: list[tuple[int, int]]
) -> None:
    meter = DiskMeter(file, num_threads=1, clock=_Clock(), sample_s=0.45)
    try:
        rate = meter.rate()
    finally:
        meter.close()

    # Begun at 0.1; looked at before each read but the first: at 0.2, 0.3, 0.4, 0.5, and at 0.6 it is over.
    assert places == [(place * 8 * MIB, 8 * MIB) for place in (0, 1, 0, 1, 0)]
    assert rate == pytest.approx(5 * 8 * MIB / 0.6)


def test_a_slow_disk_is_read_at_least_once(file: Path, places: list[tuple[int, int]]) -> None:
    meter = DiskMeter(file, num_threads=1, clock=_Clock(), sample_s=0.0)
    try:
        assert meter.rate() > 0
    finally:
        meter.close()
    assert len(places) == 1


def test_small_reads_are_one_block_each_and_inside_the_file(file: Path, places: list[tuple[int, int]]) -> None:
    meter = DiskMeter(file, num_threads=2)
    try:
        assert meter.latency() > 0
    finally:
        meter.close()
    assert {nbytes for _, nbytes in places} == {4096}
    assert all(offset % 4096 == 0 and offset < 17 * MIB for offset, _ in places)


def test_a_disk_has_a_name_a_rate_and_a_latency_and_nothing_is_left_behind(tmp_path: Path) -> None:
    sampler = Sampler(deadline_s=1000.0, clock=lambda: 0.0)

    disk = measure_disk(tmp_path, sampler, max_bytes=8 * MIB)

    assert disk is not None
    assert disk.name
    assert [figure.name for figure in sampler.figures] == [
        f"disk {disk.name}, large reads",
        f"disk {disk.name}, a small read",
    ]
    assert (disk.bytes_per_s, disk.latency_s) == tuple(figure.value for figure in sampler.figures)
    assert list(tmp_path.iterdir()) == []


def test_without_time_nothing_is_written(tmp_path: Path) -> None:
    sampler = Sampler(deadline_s=0.0, clock=lambda: 0.0)

    assert measure_disk(tmp_path / "not there", sampler, max_bytes=8 * MIB) is None
    assert sampler.notes == [f"disk of {tmp_path / 'not there'}: not measured for want of time"]


def test_who_stops_it_while_it_writes_finds_nothing(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    sampler = Sampler(deadline_s=1000.0, clock=lambda: 0.0, stop=stop)

    with pytest.raises(ClusterError, match="measuring was stopped"):
        measure_disk(tmp_path, sampler, max_bytes=8 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--dir .*nowhere: No such file or directory"):
        measure_disk(tmp_path / "nowhere", Sampler(deadline_s=1e9, clock=lambda: 0.0), max_bytes=8 * MIB)


def test_memory_that_looks_like_a_disk_is_told(tmp_path: Path) -> None:
    (note,) = measuring._remarks(tmp_path, "shm", "tmpfs")

    assert note == "disk shm: tmpfs is memory, no disk; name a folder on one with --dir"


def test_a_file_system_without_direct_reads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_opens_direct", lambda _path: False)

    (note,) = measuring._remarks(tmp_path, "share", "9p")

    assert note == "disk share: 9p knows no direct reads; these passed the page cache"
