from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamind_ray.config import Config
from megamind_ray.core.manifest import Manifest
from megamind_ray.engine.extent_reader import ExtentReader, tensors_in
from megamind_ray.engine.staging import StagingRing
from megamind_ray.engine.team import run_team
from megamind_ray.errors import ClusterError, IntegrityError, SourceError
from megamind_ray.io import open_manifest
from megamind_ray.planning.compile import file_table

CHUNK_BYTES = 64 << 10


@pytest.fixture
def folder(llama: Any, tmp_path: Path) -> Path:
    copy = tmp_path / "llama"
    shutil.copytree(llama.path, copy)
    return copy


@pytest.fixture
def recorded(folder: Path, record: Callable[[Path], Manifest]) -> Manifest:
    """The checkpoint with a sidecar of its checksums."""
    return record(folder)


def _reader(manifest: Manifest, config: Config, **options: Any) -> ExtentReader:
    return ExtentReader(file_table(manifest, CHUNK_BYTES), config, **options)


def _stored(manifest: Manifest, begin: int, end: int) -> bytes:
    return Path(manifest.file_uri(0)).read_bytes()[begin:end]


def test_an_extent_with_checksums_is_read_chunk_by_chunk_on_the_grid_of_the_file(
    recorded: Manifest, config: Config, storage: Any
) -> None:
    first = recorded.files[0].data_begin
    begin, end = first + 1000, first + 2 * CHUNK_BYTES + 5
    reader = _reader(recorded, config, opener=storage)

    with reader.staged(0, begin, end) as extent:
        assert extent.data.tobytes() == _stored(recorded, begin, end)
        assert extent.verified == "transit"

    assert storage.offsets == [begin, first + CHUNK_BYTES, first + 2 * CHUNK_BYTES]
    assert reader.counters.payload_bytes == end - begin


def test_an_extent_without_checksums_is_one_read(llama: Any, config: Config, storage: Any) -> None:
    manifest = open_manifest(llama.path)
    begin = manifest.files[0].data_begin + 1000
    end = begin + 2 * CHUNK_BYTES + 5
    reader = _reader(manifest, config, opener=storage)

    with reader.staged(0, begin, end) as extent:
        assert extent.data.tobytes() == _stored(manifest, begin, end)
        assert extent.verified == "transit"

    assert storage.offsets == [begin]
    assert reader.counters.payload_bytes == end - begin


def test_whole_chunks_with_a_recorded_checksum_are_verified(recorded: Manifest, config: Config) -> None:
    info = recorded.files[0]

    with _reader(recorded, config).staged(0, info.data_begin, info.size_bytes) as extent:
        assert extent.verified == "reference"


def test_part_of_a_chunk_cannot_be_verified(recorded: Manifest, config: Config) -> None:
    begin = recorded.files[0].data_begin

    with _reader(recorded, config).staged(0, begin, begin + CHUNK_BYTES + 1) as extent:
        assert extent.verified == "transit"


def test_a_flipped_bit_is_found_and_that_chunk_alone_read_again(
    recorded: Manifest, config: Config, storage: Any
) -> None:
    begin = recorded.files[0].data_begin
    end = begin + 3 * CHUNK_BYTES
    storage.flip_at, storage.flips_left = begin + CHUNK_BYTES + 17, 1
    reader = _reader(recorded, config, opener=storage)

    with reader.staged(0, begin, end) as extent:
        assert extent.data.tobytes() == _stored(recorded, begin, end)
        assert extent.verified == "reference"

    assert storage.offsets == [begin, begin + CHUNK_BYTES, begin + CHUNK_BYTES, begin + 2 * CHUNK_BYTES]
    assert reader.counters.payload_bytes == 3 * CHUNK_BYTES
    assert reader.counters.retried_bytes == CHUNK_BYTES
    (fault,) = reader.faults
    assert (fault.kind, fault.bytes_retried) == ("chunk_mismatch", CHUNK_BYTES)


def test_a_bit_that_stays_flipped_is_an_error_that_names_file_tensor_and_range(
    recorded: Manifest, config: Config, storage: Any
) -> None:
    wrong = list(recorded.tensors.values())[-1]
    storage.flip_at, storage.flips_left = wrong.end - 1, -1
    info = recorded.files[0]
    reader = _reader(recorded, config, opener=storage)

    with (
        pytest.raises(IntegrityError, match=r"model\.safetensors.*checksums\.json.*also after 3 reads") as caught,
        reader.staged(0, info.data_begin, info.size_bytes),
    ):
        pass

    error = caught.value
    assert error.file == recorded.file_uri(0)
    assert error.begin is not None
    assert error.end is not None
    assert error.begin <= storage.flip_at < error.end
    assert wrong.name in str(error)
    assert error.tensor in tensors_in(reader.files, 0, error.begin, error.end)


def test_a_failed_read_is_repeated_and_noted(llama: Any, config: Config, storage: Any) -> None:
    manifest = open_manifest(llama.path)
    begin = manifest.files[0].data_begin
    storage.errors_left = 2
    reader = _reader(manifest, config, opener=storage)

    with reader.staged(0, begin, begin + 100) as extent:
        assert extent.data.tobytes() == _stored(manifest, begin, begin + 100)

    (fault,) = reader.faults
    assert (fault.kind, fault.action, fault.bytes_retried) == ("chunk_retried", "read in attempt 3", 200)
    assert reader.counters.payload_bytes == 100


def test_storage_that_keeps_failing_is_a_source_error(llama: Any, config: Config, storage: Any) -> None:
    manifest = open_manifest(llama.path)
    begin = manifest.files[0].data_begin
    storage.errors_left = 100

    with (
        pytest.raises(SourceError, match="failed 3 times.*the cable was unplugged"),
        _reader(manifest, config, opener=storage).staged(0, begin, begin + 100),
    ):
        pass


def test_a_file_that_changes_in_the_middle_is_noticed(folder: Path, config: Config, storage: Any) -> None:
    manifest = open_manifest(folder)
    info = manifest.files[0]

    def touch(offset: int) -> None:
        if offset >= info.data_begin:
            os.utime(folder / "model.safetensors", ns=(1, 1))

    storage.before_read = touch

    with (
        pytest.raises(IntegrityError, match=r"model\.safetensors: changed while it was read \(mtime"),
        _reader(manifest, config, opener=storage).staged(0, info.data_begin, info.size_bytes),
    ):
        pass


def test_a_file_that_changed_since_the_plan_is_not_read(folder: Path, config: Config, storage: Any) -> None:
    manifest = open_manifest(folder)
    begin = manifest.files[0].data_begin
    os.utime(folder / "model.safetensors", ns=(1, 1))

    with (
        pytest.raises(IntegrityError, match="changed since it was planned"),
        _reader(manifest, config, opener=storage).staged(0, begin, begin + 900),
    ):
        pass
    assert storage.offsets == []


def test_a_closed_reader_gives_its_staging_buffers_back(llama: Any, config: Config) -> None:
    made: list[weakref.ref[Any]] = []

    def make(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        buffer = np.zeros(nbytes, np.uint8)
        made.append(weakref.ref(buffer))
        return buffer

    manifest = open_manifest(llama.path)
    begin = manifest.files[0].data_begin
    reader = _reader(manifest, config, ring=StagingRing(1 << 20, 1, make))
    with reader.staged(0, begin, begin + 900):
        pass
    assert [buffer() is not None for buffer in made] == [True]

    reader.close()

    assert [buffer() for buffer in made] == [None]


def test_the_first_error_of_a_team_ends_its_work() -> None:
    done: list[int] = []

    def act(item: int) -> None:
        if item == 3:
            raise ValueError("item 3")
        done.append(item)

    with pytest.raises(ValueError, match="item 3"):
        run_team(range(10**9), act, num_threads=3, name="test")
    assert len(done) < 10**6


def test_a_team_that_is_stopped_says_so() -> None:
    stop = threading.Event()

    with pytest.raises(ClusterError, match="test: stopped before all was done"):
        run_team(range(10**9), lambda _item: stop.set(), num_threads=2, name="test", stop=stop)
