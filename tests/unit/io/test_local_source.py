"""Local files are read past the page cache where their bytes are not in it, whatever the alignment."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamind_ray.config import DirectMode
from megamind_ray.io import LocalSource, ShortReadError, crc32, local_source, page_cache
from megamind_ray.io.page_cache import PageCacheProbe
from megamind_ray.units import KIB, MIB

SIZE = 6 * MIB + 1234
MODES: list[DirectMode] = ["auto", "always", "never"]


@pytest.fixture(scope="module")
def data() -> bytes:
    return np.random.default_rng(7).bytes(SIZE)


@pytest.fixture(scope="module")
def path(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("local") / "data"
    path.write_bytes(data)
    return path


def evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def is_cached(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return PageCacheProbe(fd, SIZE).is_cached(MIB, 4 * MIB)
    finally:
        os.close(fd)


@pytest.fixture
def cold_path(path: Path) -> Path:
    evict(path)
    if is_cached(path):
        pytest.skip(f"{path} is on a file system whose pages stay in memory")
    return path


def destination(size: int, phase: int) -> memoryview:
    """Memory whose address is ``phase`` past a border of 4 KiB."""
    room = np.zeros(size + 2 * 4096, np.uint8)
    start = -room.ctypes.data % 4096 + phase
    return memoryview(room)[start : start + size]


@settings(max_examples=60, deadline=None)
@given(
    offset=st.integers(0, SIZE),
    size=st.one_of(st.integers(0, 20_000), st.integers(0, SIZE)),
    phase=st.one_of(st.none(), st.integers(0, 4095)),
    mode=st.sampled_from(MODES),
    past_cache=st.booleans(),
    cold=st.booleans(),
)
def test_any_range_arrives_at_any_address(
    path: Path, data: bytes, offset: int, size: int, phase: int | None, mode: DirectMode, past_cache: bool, cold: bool
) -> None:
    size = min(size, SIZE - offset)
    if cold:
        evict(path)
    # None: as far from a border as the bytes are in the file, so that they are read into place.
    buffer = destination(size, offset % 4096 if phase is None else phase)

    with LocalSource(path, direct=mode) as source:
        source.read_into(offset, buffer, past_cache=past_cache)
        assert buffer == data[offset : offset + size]
        buffer[:] = bytes(size)
        assert source.read_summed(offset, buffer, past_cache=past_cache) == crc32(data[offset : offset + size])
    assert buffer == data[offset : offset + size]


def test_bytes_around_a_destination_are_left_alone(path: Path, data: bytes) -> None:
    room = destination(SIZE, 0)
    room[:] = b"\xee" * SIZE

    with LocalSource(path, direct="always") as source:
        source.read_into(5000, room[5000 : 5000 + MIB])

    assert room[5000 : 5000 + MIB] == data[5000 : 5000 + MIB]
    assert set(room[:5000]) == set(room[5000 + MIB :]) == {0xEE}


@pytest.mark.parametrize(("mode", "cached_after"), [("auto", False), ("always", False), ("never", True)])
def test_cold_bytes_are_read_past_the_page_cache(cold_path: Path, mode: DirectMode, cached_after: bool) -> None:
    with LocalSource(cold_path, direct=mode) as source:
        source.read_into(0, memoryview(bytearray(SIZE)))

    assert is_cached(cold_path) == cached_after


def test_bytes_in_the_page_cache_are_taken_from_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.read_bytes()

    with LocalSource(path) as source:
        monkeypatch.setattr(source, "_open_direct", lambda: pytest.fail("opened for direct reads"))
        source.read_into(0, memoryview(bytearray(SIZE)))


@pytest.mark.parametrize("mode", MODES)
def test_reading_again_past_the_cache_asks_the_disk(path: Path, mode: DirectMode) -> None:
    """The first page of the cache is dropped or bypassed: a copy in memory that is wrong is not trusted twice."""
    path.read_bytes()
    with LocalSource(path, direct=mode) as source:
        before = blocks_read()
        source.read_into(0, memoryview(bytearray(SIZE)), past_cache=True)
        if blocks_read() == before and not cold_reads_are_counted(path):
            pytest.skip("this kernel does not count what is read from the disk")
        assert blocks_read() > before


def blocks_read() -> int:
    """Bytes that this process had fetched from block devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def cold_reads_are_counted(path: Path) -> bool:
    evict(path)
    before = blocks_read()
    path.read_bytes()
    return blocks_read() > before


def test_a_file_that_became_shorter_is_a_short_read_or_a_change(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(MIB))
    for mode in MODES:
        with LocalSource(path, direct=mode) as source:
            source.check_unchanged = lambda: None  # type: ignore[method-assign]
            os.truncate(path, MIB // 2)
            with pytest.raises(ShortReadError, match="end of file at byte 524288"):
                source.read_into(256 * KIB, memoryview(bytearray(512 * KIB)))
        os.truncate(path, MIB)


def test_a_file_system_without_direct_reads_is_read_through_the_cache(
    path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    evict(path)
    real_open = os.open

    def refuse(name: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(name, flags)

    monkeypatch.setattr(os, "open", refuse)
    buffer = bytearray(SIZE)
    with LocalSource(path, direct="always") as source:
        source.read_into(0, memoryview(buffer))

    assert buffer == data


def test_a_probe_that_may_not_ask_for_residency_reads_a_page(cold_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamind_ray.io.page_cache._mincore_is_honest", lambda _fd: False)
    fd = os.open(cold_path, os.O_RDONLY)
    try:
        probe = PageCacheProbe(fd, SIZE)
        assert not probe.is_cached(MIB, 4 * MIB)
        cold_path.read_bytes()
        assert probe.is_cached(MIB, 4 * MIB)
    finally:
        os.close(fd)


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_reading_a_part_again_past_the_cache_forgets_the_pages_at_its_ends(cold_path: Path, mode: DirectMode) -> None:
    """The kernel ignores partial pages when it is told to forget: a wrong copy of one would be read for ever."""
    cold_path.read_bytes()
    fd = os.open(cold_path, os.O_RDONLY)
    probe = PageCacheProbe(fd, SIZE)
    try:
        with LocalSource(cold_path, direct=mode) as source:
            source._no_direct = True  # as on a network file system
            begin, size = 4096 * 100 + 17, 4096 * 3
            source.read_into(begin, memoryview(bytearray(size)))
            assert probe.is_cached(begin, size)
            forgotten = []
            source._read_buffered = lambda *_: forgotten.append(probe.is_cached(begin, 1))  # type: ignore[method-assign]
            source.read_into(begin, memoryview(bytearray(size)), past_cache=True)
        assert forgotten == [False]
    finally:
        probe.close()
        os.close(fd)


def test_threads_have_one_bounce_buffer_however_many_files_they_read(tmp_path: Path, data: bytes) -> None:
    sources = []
    for number in range(3):
        (tmp_path / str(number)).write_bytes(data[:MIB])
        sources.append(LocalSource(tmp_path / str(number), direct="always"))
        sources[-1].read_into(3, destination(MIB // 2, 0))
    buffers = {id(local_source._bounce()) for _ in sources}
    assert len(buffers) == 1
    for source in sources:
        source.close()


def test_a_closed_source_keeps_no_descriptor(path: Path) -> None:
    before = {entry.name for entry in Path("/proc/self/fd").iterdir()}
    source = LocalSource(path)
    source.read_into(0, memoryview(bytearray(SIZE)))
    source.read_into(0, memoryview(bytearray(SIZE)), past_cache=True)
    source.close()
    source.close()

    assert {entry.name for entry in Path("/proc/self/fd").iterdir()} == before


def test_a_probe_without_a_mapping_asks_with_a_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Address space is limited on some clusters; that must cost time, not the load."""
    path.read_bytes()
    fd = os.open(path, os.O_RDONLY)
    try:
        probe = PageCacheProbe(fd, 1 << 62)  # more than any address space
        assert probe._address is None
        assert probe.is_cached(MIB, MIB)
        probe.close()
    finally:
        os.close(fd)


def test_what_the_kernel_does_not_tell_is_read_neither_past_the_cache_nor_as_if_it_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of somebody else on an overlay: the one costs a copy that fails, the other most of the reads in flight."""

    def refuses(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "no such flag")

    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    monkeypatch.setattr(page_cache, "_mincore_is_honest", lambda _: False)
    monkeypatch.setattr(page_cache.os, "preadv", refuses)
    with LocalSource(path) as source:
        assert not source.is_in_memory(0, MIB)
        assert not source.prefers_long_reads(0, MIB)


def test_what_was_just_written_is_in_memory_unless_nobody_looks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with LocalSource(path) as source, LocalSource(path, direct="never") as unknown:
        assert source.is_in_memory(0, 1 << 20)
        assert not unknown.is_in_memory(0, 1 << 20)
