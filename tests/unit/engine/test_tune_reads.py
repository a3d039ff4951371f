"""What is read to measure, and in which state of the page cache."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from megamind_ray.config import Config
from megamind_ray.engine.slice_reads import read_slices
from megamind_ray.engine.tune_reads import ReadMeter, default_values, read_knobs
from megamind_ray.engine.tune_sample import take_sample, temporary_checkpoint
from megamind_ray.errors import CapacityError, RequestError
from megamind_ray.io import open_manifest
from megamind_ray.io.local_source import DIRECT_ALIGNMENT_BYTES
from megamind_ray.io.mounts import mount_of
from megamind_ray.units import MIB


def clock() -> Callable[[], float]:
    """A second passes between two looks."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def write(folder: Path, num_bytes: int, *, deadline_s: float = 1e9) -> Path:
    """The temporary checkpoint, moved to where it stays."""
    kept = folder / "kept.safetensors"
    with temporary_checkpoint(folder, num_bytes, deadline_s=deadline_s, clock=clock(), on_bytes=lambda _: None) as path:
        path.rename(kept)
    return kept


@pytest.fixture
def three_files(tmp_path: Path) -> Path:
    """Three files of 6 MiB, each with tensors of odd sizes."""
    folder = tmp_path / "model"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(3):
        sizes = (5, 3 * MIB + 1, 0, 7, 3 * MIB - 13)
        tensors = {f"{number}.{index}": random.integers(0, 256, size, np.uint8) for index, size in enumerate(sizes)}
        save_file(tensors, folder / f"model-{number}.safetensors")
    return folder


def test_a_sample_reads_the_first_bytes_of_a_checkpoint_and_each_to_its_place(three_files: Path) -> None:
    manifest = open_manifest(three_files)
    sample = take_sample(manifest, 13 * MIB)

    summary = read_slices(manifest, sample.slices, sample.sink, Config())

    assert sample.nbytes == summary.totals.payload_bytes == 13 * MIB
    left, tensors = 13 * MIB, sorted(manifest.tensors.values(), key=lambda it: (it.file, it.begin))
    for number, info in enumerate(info for info in tensors if info.nbytes):
        data = Path(manifest.file_uri(info.file)).read_bytes()[info.begin : info.end][:left]
        buffer, offset = sample.sink.host(number)
        assert buffer[offset : offset + len(data)].tobytes() == data
        left -= len(data)
        if not left:
            break
    assert left == 0


def test_bytes_are_as_far_from_a_border_in_memory_as_in_their_file(three_files: Path) -> None:
    manifest = open_manifest(three_files)
    sample = take_sample(manifest, 18 * MIB)

    tensors = sorted(manifest.tensors.values(), key=lambda it: (it.file, it.begin))
    for number, info in enumerate(info for info in tensors if info.nbytes):
        buffer, offset = sample.sink.host(number)
        assert (buffer.ctypes.data + offset - info.begin) % DIRECT_ALIGNMENT_BYTES == 0


def test_a_checkpoint_that_is_too_small_says_what_to_do(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1000, np.uint8)}, tmp_path / "model.safetensors")

    with pytest.raises(RequestError, match=r"too little to measure with, take a checkpoint .* of 8.00 MiB or more"):
        take_sample(open_manifest(tmp_path), 1 << 30)


def test_the_temporary_checkpoint_is_one_that_others_read_too(tmp_path: Path) -> None:
    path = write(tmp_path, 130 * MIB)

    with safe_open(path, "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert shapes == {"tensor.0": [64 * MIB], "tensor.1": [64 * MIB], "tensor.2": [2 * MIB]}
    manifest = open_manifest(path)
    assert manifest.files[0].data_begin % DIRECT_ALIGNMENT_BYTES
    assert path.stat().st_size == manifest.files[0].data_begin + 130 * MIB


def test_a_slow_disk_gets_a_smaller_temporary_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, 512 * MIB, deadline_s=1.0)

    assert open_manifest(path).nbytes == 128 * MIB


@pytest.mark.parametrize("end", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_of_the_temporary_checkpoint_stays(tmp_path: Path, end: type[BaseException] | None) -> None:
    def use() -> None:
        with temporary_checkpoint(tmp_path, 8 * MIB, deadline_s=1e9, clock=clock(), on_bytes=lambda _: None) as path:
            assert path.exists()
            if end is not None:
                raise end

    if end is None:
        use()
    else:
        with pytest.raises(end):
            use()

    assert list(tmp_path.iterdir()) == []


def test_nothing_stays_when_writing_it_is_interrupted(tmp_path: Path) -> None:
    def interrupt(_bytes: int) -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        temporary_checkpoint(tmp_path, 8 * MIB, deadline_s=1e9, clock=clock(), on_bytes=interrupt),
    ):
        raise AssertionError("not reached")

    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(CapacityError, match="does not fit") as caught,
        temporary_checkpoint(tmp_path, 1 << 60, deadline_s=1e9, clock=clock(), on_bytes=lambda _: None),
    ):
        raise AssertionError("not reached")

    assert caught.value.missing_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(RequestError, match="name a folder that is there"),
        temporary_checkpoint(tmp_path / "no", 8 * MIB, deadline_s=1e9, clock=clock(), on_bytes=lambda _: None),
    ):
        raise AssertionError("not reached")


@pytest.fixture
def meter(tmp_path: Path) -> ReadMeter:
    return ReadMeter(take_sample(open_manifest(write(tmp_path, 16 * MIB)), 16 * MIB), Config())


def test_where_pages_can_be_dropped_both_conditions_are_measured(meter: ReadMeter, tmp_path: Path) -> None:
    if "tmpfs" in _file_system(tmp_path):
        pytest.skip("temporary files are in memory here")

    assert meter.conditions() == ("warm", "cold")
    assert all(meter.measure(default_values(), condition) > 0 for condition in ("warm", "cold"))


def test_where_pages_stay_only_warm_reads_are_measured(meter: ReadMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    meter.conditions()
    meter.measure({**default_values(), "io.direct": "never"}, "warm")
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)

    assert meter.conditions() == ("warm",)


def test_a_file_system_in_memory_is_always_warm() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or _file_system(shared) != "tmpfs":
        pytest.skip("no tmpfs")
    with temporary_checkpoint(shared, 8 * MIB, deadline_s=1e9, clock=clock(), on_bytes=lambda _: None) as path:
        meter = ReadMeter(take_sample(open_manifest(path), 8 * MIB), Config())

        assert meter.conditions() == ("warm",)


def _file_system(path: Path) -> str:
    mount = mount_of(path)
    return mount.kind if mount else ""


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"io.chunk_bytes": 64 * MIB}, "io.extent_bytes"),
        ({"io.read_threads": 16}, r"shows only in reads of 256.00 MiB or more, the checkpoint left room for 16.00 MiB"),
        ({"io.chunk_bytes": 16 * MIB}, "shows only in reads of 256.00 MiB"),
        ({"io.extent_bytes": 64 * MIB}, "shows only in reads of 2.00 GiB"),
    ],
)
def test_values_that_cannot_show_anything_are_refused(meter: ReadMeter, values: dict[str, object], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        meter.measure({**default_values(), **values}, "warm")


def test_chunks_of_recorded_checksums_are_not_measured() -> None:
    assert "io.chunk_bytes" in [knob.name for knob in read_knobs(has_sidecar=False)]
    assert "io.chunk_bytes" not in [knob.name for knob in read_knobs(has_sidecar=True)]
    for knob in read_knobs(has_sidecar=False):
        assert default_values()[knob.name] in knob.values, "a second pass must be able to go back"
