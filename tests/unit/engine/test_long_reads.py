"""Chunks of one extent that come by one read: checked one by one, read again one by one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.config import Config
from megamind_ray.core.manifest import Manifest
from megamind_ray.engine.extent_reader import ExtentReader
from megamind_ray.errors import ClusterError, IntegrityError, SourceError
from megamind_ray.io.local_source import LocalSource
from megamind_ray.planning.compile import file_table
from megamind_ray.testing.injection import InjectingStorage, Read

CHUNK_BYTES = 64 << 10


@pytest.fixture
def recorded(llama: Any, tmp_path: Path, record: Callable[[Path], Manifest]) -> Manifest:
    """A checkpoint with a sidecar of its checksums."""
    return record(Path(shutil.copytree(llama.path, tmp_path / "llama")))


@pytest.fixture
def long(storage: Any) -> Any:
    """Storage that prefers long reads."""
    storage.long_reads = True
    return storage


def _reader(manifest: Manifest, config: Config, opener: Any) -> ExtentReader:
    return ExtentReader(file_table(manifest, CHUNK_BYTES), config, opener=opener)


def _stored(manifest: Manifest, begin: int, end: int) -> bytes:
    return Path(manifest.file_uri(0)).read_bytes()[begin:end]


def test_an_extent_is_one_read_and_every_chunk_of_it_is_checked(recorded: Manifest, config: Config, long: Any) -> None:
    begin = recorded.files[0].data_begin
    end = begin + 3 * CHUNK_BYTES
    reader = _reader(recorded, config, long)

    with reader.staged(0, begin, end) as extent:
        assert extent.data.tobytes() == _stored(recorded, begin, end)
        assert extent.verified == "reference"

    assert long.offsets == [begin]
    totals = reader.counters.totals()
    assert (totals.payload_bytes, totals.retried_bytes, totals.num_reads) == (end - begin, 0, 1)
    assert not reader.faults


def test_the_parts_of_chunks_at_the_ends_are_not_called_verified(recorded: Manifest, config: Config, long: Any) -> None:
    begin = recorded.files[0].data_begin + 1000
    end = begin + 2 * CHUNK_BYTES
    reader = _reader(recorded, config, long)

    with reader.staged(0, begin, end) as extent:
        assert extent.data.tobytes() == _stored(recorded, begin, end)
        assert extent.verified == "transit"

    assert long.offsets == [begin]


@pytest.mark.parametrize("times", [1, 2])
def test_a_wrong_chunk_alone_is_read_again(recorded: Manifest, config: Config, long: Any, times: int) -> None:
    begin = recorded.files[0].data_begin
    wrong = begin + CHUNK_BYTES
    long.flip_at, long.flips_left = wrong + 17, times
    reader = _reader(recorded, config, long)

    with reader.staged(0, begin, begin + 3 * CHUNK_BYTES) as extent:
        assert extent.data.tobytes() == _stored(recorded, begin, begin + 3 * CHUNK_BYTES)
        assert extent.verified == "reference"

    assert long.offsets == [begin, *[wrong] * times]
    assert reader.counters.payload_bytes == 3 * CHUNK_BYTES
    assert reader.counters.retried_bytes == times * CHUNK_BYTES
    (fault,) = reader.faults
    assert (fault.kind, fault.bytes_retried) == ("chunk_mismatch", times * CHUNK_BYTES)


def test_a_chunk_that_stays_wrong_was_read_as_often_as_allowed(recorded: Manifest, config: Config, long: Any) -> None:
    begin = recorded.files[0].data_begin
    wrong = begin + 2 * CHUNK_BYTES
    long.flip_at, long.flips_left = wrong, -1
    reader = _reader(recorded, config, long)

    with pytest.raises(IntegrityError) as caught, reader.staged(0, begin, begin + 3 * CHUNK_BYTES):
        pass

    assert (caught.value.begin, caught.value.end) == (wrong, wrong + CHUNK_BYTES)
    assert f"after {config.retry.attempts} reads" in caught.value.message
    assert long.offsets == [begin, *[wrong] * (config.retry.attempts - 1)]


def test_a_long_read_that_fails_is_made_again_chunk_by_chunk(recorded: Manifest, config: Config, long: Any) -> None:
    begin = recorded.files[0].data_begin
    end = begin + 2 * CHUNK_BYTES
    long.errors_left = 1
    reader = _reader(recorded, config, long)

    with reader.staged(0, begin, end) as extent:
        assert extent.data.tobytes() == _stored(recorded, begin, end)
        assert extent.verified == "reference"

    assert long.offsets == [begin, begin, begin + CHUNK_BYTES]
    assert reader.counters.payload_bytes == reader.counters.retried_bytes == end - begin
    assert [(fault.kind, fault.bytes_retried) for fault in reader.faults] == [("chunk_retried", CHUNK_BYTES)] * 2


def test_storage_that_keeps_failing_is_a_source_error(recorded: Manifest, config: Config, long: Any) -> None:
    begin = recorded.files[0].data_begin
    long.errors_left = 100
    reader = _reader(recorded, config, long)

    with pytest.raises(SourceError, match="unplugged"), reader.staged(0, begin, begin + 2 * CHUNK_BYTES):
        pass

    assert len(long.offsets) == config.retry.attempts


def test_a_file_that_is_gone_is_told_as_without_long_reads(recorded: Manifest, config: Config, long: Any) -> None:
    begin = recorded.files[0].data_begin
    Path(recorded.file_uri(0)).write_bytes(b"")

    with (
        pytest.raises(IntegrityError, match="changed"),
        _reader(recorded, config, long).staged(0, begin, begin + 2 * CHUNK_BYTES),
    ):
        pass


def test_a_reader_that_was_stopped_asks_for_nothing(recorded: Manifest, config: Config, long: Any) -> None:
    begin = recorded.files[0].data_begin
    reader = _reader(recorded, config, long)
    reader.stop()

    with pytest.raises(ClusterError, match="stopped"), reader.staged(0, begin, begin + 2 * CHUNK_BYTES):
        pass

    assert long.offsets == []


def test_one_failed_read_of_many_chunks_is_one_failure_of_the_source(
    recorded: Manifest, config: Config, long: Any
) -> None:
    config = replace(config, retry=replace(config.retry, quarantine_reads=4, quarantine_share=0.5))
    begin = recorded.files[0].data_begin
    long.errors_left = 1
    reader = _reader(recorded, config, long)

    with reader.staged(0, begin, begin + 3 * CHUNK_BYTES):
        pass

    assert {fault.kind for fault in reader.faults} == {"chunk_retried"}, "nothing was put in quarantine"


def test_what_a_mirror_wrote_over_a_long_read_is_not_taken_for_it(recorded: Manifest, config: Config) -> None:
    """The first chunk is wrong, so that the source is in quarantine when the second one's turn comes."""
    own = Path(recorded.root)
    mirror = Path(shutil.copytree(own, own.parent / "mirror"))
    begin = recorded.files[0].data_begin
    second = (begin + CHUNK_BYTES, begin + 2 * CHUNK_BYTES)
    config = replace(
        config,
        io=replace(config.io, mirrors=(str(mirror),)),
        retry=replace(config.retry, quarantine_reads=1, quarantine_share=0.1),
    )

    def damage(read: Read) -> None:
        is_own = Path(read.uri).parent == own
        if is_own and read.offset <= begin < read.end:
            read.buffer[begin - read.offset] ^= 1
        elif not is_own and read.offset == second[0]:
            read.buffer[:] = bytes(read.buffer.nbytes)

    storage = InjectingStorage(damage, long_reads=True)
    reader = _reader(recorded, config, storage)

    with reader.staged(0, begin, second[1]) as extent:
        assert extent.data.tobytes() == _stored(recorded, begin, second[1])
        assert extent.verified == "reference"

    assert [fault.kind for fault in reader.faults] == ["source_quarantined"]


def test_a_local_file_prefers_long_reads_where_its_bytes_are_not_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    with LocalSource(path) as source:
        assert not source.prefers_long_reads(0, 4 << 20)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    with LocalSource(path) as source, LocalSource(path, direct="never") as buffered:
        if not source.prefers_long_reads(0, 4 << 20):
            pytest.skip("this file system knows no direct reads, or keeps all in memory")
        assert not buffered.prefers_long_reads(0, 4 << 20)
