"""Wrong bytes and failing storage: the chunk is read again, then taken from a mirror, or refused."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megamind_ray.config import Config
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.extent_reader import ExtentReader
from megamind_ray.engine.local_load import load_plan
from megamind_ray.engine.state_dict import load_tensors
from megamind_ray.errors import IntegrityError, RequestError, SourceError
from megamind_ray.io import (
    ShortReadError,
    default_sidecar_path,
    open_manifest,
    record_checksums,
    write_sidecar,
)
from megamind_ray.planning.compile import file_table
from megamind_ray.testing.injection import Damage, InjectingStorage, Read
from megamind_ray.testing.range_server import RangeServer

CHUNK_BYTES = 64 << 10


@pytest.fixture
def own(llama: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama.path, tmp_path / "own"))


@pytest.fixture
def mirror(llama: Any, tmp_path: Path) -> Path:
    """The same files, written at another time."""
    folder = Path(shutil.copytree(llama.path, tmp_path / "mirror"))
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))
    return folder


@pytest.fixture
def recorded(own: Path, record: Callable[[Path], Manifest]) -> Manifest:
    return record(own)


@pytest.fixture
def mirrored(config: Config, mirror: Path) -> Config:
    return _with(config, mirrors=(str(mirror),))


def _with(config: Config, **io: Any) -> Config:
    return replace(config, io=replace(config.io, **io))


def _reader(manifest: Manifest, config: Config, storage: Any = None) -> ExtentReader:
    return ExtentReader(file_table(manifest, CHUNK_BYTES), config, opener=storage)


def _flip(folder: Path, offset: int | None = None, *, times: int = 10**9) -> Damage:
    """Flips a bit of every read in a folder, or of those with a certain byte, in their first ``times`` reads."""

    def damage(read: Read) -> None:
        if not read.uri.startswith(f"{folder}/") or read.number > times:
            return
        if offset is None or read.offset <= offset < read.end:
            read.buffer[0 if offset is None else offset - read.offset] ^= 1

    return damage


def _fail(folder: Path) -> Damage:
    def damage(read: Read) -> None:
        if read.uri.startswith(f"{folder}/"):
            raise OSError("the cable was unplugged")

    return damage


def _stored(path: Path, begin: int, end: int) -> bytes:
    return path.read_bytes()[begin:end]


def _kinds(reader: ExtentReader) -> list[str]:
    return [fault.kind for fault in reader.faults]


# --- with recorded checksums -----------------------------------------------------------------------------------------


def test_a_chunk_that_stays_wrong_is_taken_from_the_mirror(
    recorded: Manifest, mirrored: Config, own: Path, mirror: Path
) -> None:
    begin = recorded.files[0].data_begin
    storage = InjectingStorage(_flip(own, begin + CHUNK_BYTES + 3))
    reader = _reader(recorded, mirrored, storage)

    with reader.staged(0, begin, begin + 3 * CHUNK_BYTES) as extent:
        assert extent.data.tobytes() == _stored(own / "model.safetensors", begin, begin + 3 * CHUNK_BYTES)
        assert extent.verified == "reference"

    ours, theirs = str(own / "model.safetensors"), str(mirror / "model.safetensors")
    wrong = begin + CHUNK_BYTES
    assert storage.reads == [(ours, begin), *[(ours, wrong)] * 3, (theirs, wrong), (ours, begin + 2 * CHUNK_BYTES)]
    assert reader.counters.payload_bytes == 3 * CHUNK_BYTES
    assert reader.counters.retried_bytes == 3 * CHUNK_BYTES
    (fault,) = reader.faults
    assert fault.kind == "chunk_mirrored"
    assert ours in fault.where
    assert theirs in fault.action
    assert fault.bytes_retried == 3 * CHUNK_BYTES


@pytest.mark.parametrize("damage", [_flip, _fail])
def test_what_faults_say_was_read_again_is_what_was_counted(
    recorded: Manifest, mirrored: Config, own: Path, mirror: Path, damage: Callable[[Path], Damage]
) -> None:
    begin = recorded.files[0].data_begin
    to_own, to_mirror = damage(own), _flip(mirror, begin + CHUNK_BYTES, times=1)

    def both(read: Read) -> None:
        to_mirror(read)
        to_own(read)

    reader = _reader(recorded, mirrored, InjectingStorage(both))
    with reader.staged(0, begin, begin + 3 * CHUNK_BYTES):
        pass

    assert {"chunk_mirrored", "chunk_mismatch"} <= set(_kinds(reader))
    assert sum(fault.bytes_retried for fault in reader.faults) == reader.counters.retried_bytes


def test_a_wrong_chunk_is_read_again_past_the_cache(recorded: Manifest, config: Config, own: Path) -> None:
    asked: list[bool] = []

    def damage(read: Read) -> None:
        asked.append(read.past_cache)
        read.buffer[5] ^= not read.past_cache  # what lies in the page cache is wrong, what is on the disk is not

    begin = recorded.files[0].data_begin
    with _reader(recorded, config, InjectingStorage(damage)).staged(0, begin, begin + CHUNK_BYTES) as extent:
        assert extent.data.tobytes() == _stored(own / "model.safetensors", begin, begin + CHUNK_BYTES)

    assert asked == [False, True]


def test_a_chunk_that_is_wrong_everywhere_names_each_source(
    recorded: Manifest, mirrored: Config, own: Path, mirror: Path
) -> None:
    first = next(iter(recorded.tensors.values()))
    storage = InjectingStorage(lambda read: read.buffer.__setitem__(0, read.buffer[0] ^ 1))
    reader = _reader(recorded, mirrored, storage)
    begin = recorded.files[0].data_begin

    with pytest.raises(IntegrityError) as caught, reader.staged(0, begin, begin + 2 * CHUNK_BYTES):
        pass

    error = caught.value
    assert (error.file, error.tensor) == (str(own / "model.safetensors"), first.name)
    assert (error.begin, error.end) == (begin, begin + CHUNK_BYTES)
    text = str(error)
    assert f"[{begin}, {begin + CHUNK_BYTES}) cannot be had from any of 2 sources" in text
    assert f"{own}/model.safetensors: CRC-32 is" in text
    assert f"{mirror}/model.safetensors: CRC-32 is" in text
    assert "after 3 reads" in text
    assert type(error) is IntegrityError
    assert len(storage.reads) == 6


def test_storage_that_keeps_failing_is_left_for_the_mirror(recorded: Manifest, mirrored: Config, own: Path) -> None:
    begin = recorded.files[0].data_begin
    reader = _reader(recorded, mirrored, InjectingStorage(_fail(own)))

    with reader.staged(0, begin, begin + CHUNK_BYTES) as extent:
        assert extent.data.tobytes() == _stored(own / "model.safetensors", begin, begin + CHUNK_BYTES)
        assert extent.verified == "reference"

    assert _kinds(reader) == ["chunk_mirrored"]
    assert "the cable was unplugged" in reader.faults[0].action


def test_sources_that_all_fail_are_a_source_error_with_all_of_them(
    recorded: Manifest, mirrored: Config, own: Path, mirror: Path
) -> None:
    begin = recorded.files[0].data_begin
    reader = _reader(recorded, mirrored, InjectingStorage(_fail(own.parent)))

    with pytest.raises(SourceError) as caught, reader.staged(0, begin, begin + CHUNK_BYTES):
        pass

    assert str(own / "model.safetensors") in str(caught.value)
    assert str(mirror / "model.safetensors") in str(caught.value)


def test_a_file_that_vanished_is_read_from_the_mirror(recorded: Manifest, mirrored: Config, own: Path) -> None:
    begin = recorded.files[0].data_begin
    expected = _stored(own / "model.safetensors", begin, begin + 2 * CHUNK_BYTES)
    (own / "model.safetensors").unlink()
    reader = _reader(recorded, mirrored)

    with reader.staged(0, begin, begin + 2 * CHUNK_BYTES) as extent:
        assert extent.data.tobytes() == expected

    assert _kinds(reader) == ["source_failed", "chunk_mirrored"]
    assert reader.counters.payload_bytes == 2 * CHUNK_BYTES
    assert reader.counters.retried_bytes == 0


def test_a_file_that_is_cut_short_meanwhile_goes_on_from_the_mirror(
    recorded: Manifest, mirrored: Config, own: Path
) -> None:
    path, info = own / "model.safetensors", recorded.files[0]
    expected = _stored(path, info.data_begin, info.size_bytes)
    storage = InjectingStorage(lambda _read: os.truncate(path, info.data_begin + CHUNK_BYTES))
    reader = _reader(recorded, mirrored, storage)

    with reader.staged(0, info.data_begin, info.size_bytes) as extent:
        assert extent.data.tobytes() == expected
        assert extent.verified == "reference"
    reader.check_unchanged()

    assert "source_failed" in _kinds(reader)


def test_a_file_that_is_written_over_meanwhile_goes_on_from_the_mirror(
    recorded: Manifest, mirrored: Config, own: Path
) -> None:
    path, info = own / "model.safetensors", recorded.files[0]
    expected = _stored(path, info.data_begin, info.size_bytes)

    def overwrite(read: Read) -> None:
        if read.offset == info.data_begin and read.uri == str(path):
            with path.open("r+b") as file:
                file.seek(info.data_begin)
                file.write(bytes(info.size_bytes - info.data_begin))
            os.utime(path, ns=(5, 5))

    reader = _reader(recorded, mirrored, InjectingStorage(overwrite))

    with reader.staged(0, info.data_begin, info.size_bytes) as extent:
        assert extent.data.tobytes() == expected

    assert [fault.kind for fault in reader.faults if fault.kind == "source_failed"] == ["source_failed"]
    assert "changed while it was read" in reader.faults[0].action


@pytest.mark.parametrize("state", ["lacks it", "has another size"])
def test_a_mirror_that_does_not_have_the_file_is_skipped_with_a_word(
    recorded: Manifest, mirrored: Config, own: Path, mirror: Path, state: str
) -> None:
    if state == "lacks it":
        (mirror / "model.safetensors").unlink()
    else:
        os.truncate(mirror / "model.safetensors", recorded.files[0].size_bytes - 1)
    begin = recorded.files[0].data_begin
    reader = _reader(recorded, mirrored, InjectingStorage(_flip(own, begin, times=3)))

    with pytest.raises(IntegrityError) as caught, reader.staged(0, begin, begin + CHUNK_BYTES):
        pass

    assert str(mirror / "model.safetensors") in str(caught.value)
    assert _kinds(reader) == ["mirror_skipped"]
    with reader.staged(0, begin, begin + CHUNK_BYTES) as extent:  # the fourth read is right
        assert extent.verified == "reference"
    assert _kinds(reader) == ["mirror_skipped"]


def test_threads_that_want_the_same_file_have_it_opened_once(recorded: Manifest, config: Config) -> None:
    opened: list[str] = []
    all_ask = threading.Barrier(4)

    def count(uri: str) -> None:
        opened.append(uri)

    reader = _reader(recorded, config, InjectingStorage(on_open=count))
    begin = recorded.files[0].data_begin

    def read(number: int) -> bytes:
        all_ask.wait(30)
        with reader.staged(0, begin + number * CHUNK_BYTES, begin + (number + 1) * CHUNK_BYTES) as extent:
            return bytes(extent.data)

    with ThreadPoolExecutor(4) as pool:
        chunks = list(pool.map(read, range(4)))

    path = recorded.file_uri(0)
    assert b"".join(chunks) == _stored(Path(path), begin, begin + 4 * CHUNK_BYTES)
    assert opened == [path]


def test_the_second_mirror_is_asked_after_the_first(
    recorded: Manifest, config: Config, own: Path, mirror: Path
) -> None:
    nowhere = mirror.parent / "nowhere"
    begin = recorded.files[0].data_begin
    reader = _reader(
        recorded, _with(config, mirrors=(str(nowhere), f"file://{mirror}/")), InjectingStorage(_flip(own, begin))
    )

    with reader.staged(0, begin, begin + CHUNK_BYTES) as extent:
        assert extent.verified == "reference"

    assert _kinds(reader) == ["mirror_skipped", "chunk_mirrored"]


def test_a_mirror_that_is_wrong_as_well_is_read_again_too(
    recorded: Manifest, mirrored: Config, own: Path, mirror: Path
) -> None:
    begin = recorded.files[0].data_begin

    def damage(read: Read) -> None:
        _flip(own)(read)
        _flip(mirror, times=2)(read)

    reader = _reader(recorded, mirrored, InjectingStorage(damage))

    with reader.staged(0, begin, begin + CHUNK_BYTES) as extent:
        assert extent.data.tobytes() == _stored(own / "model.safetensors", begin, begin + CHUNK_BYTES)


def test_part_of_a_chunk_comes_from_a_mirror_only_as_part_of_the_whole_chunk(
    recorded: Manifest, mirrored: Config, own: Path, mirror: Path
) -> None:
    begin = recorded.files[0].data_begin
    storage = InjectingStorage(_fail(own))
    reader = _reader(recorded, mirrored, storage)

    with reader.staged(0, begin + CHUNK_BYTES + 100, begin + CHUNK_BYTES + 300) as extent:
        assert extent.data.tobytes() == _stored(
            own / "model.safetensors", begin + CHUNK_BYTES + 100, begin + CHUNK_BYTES + 300
        )
        assert extent.verified == "reference"

    assert storage.reads[-1] == (str(mirror / "model.safetensors"), begin + CHUNK_BYTES)


def test_part_of_a_chunk_is_refused_where_the_mirror_is_wrong_outside_of_that_part(
    recorded: Manifest, mirrored: Config, own: Path, mirror: Path
) -> None:
    begin = recorded.files[0].data_begin

    def damage(read: Read) -> None:
        _flip(mirror, begin + 1)(read)
        _fail(own)(read)

    with (
        pytest.raises(IntegrityError, match="2 sources"),
        _reader(recorded, mirrored, InjectingStorage(damage)).staged(0, begin + 100, begin + 300),
    ):
        pass


class Script:
    """A source that fails in one way so many times for each chunk, then is right."""

    def __init__(self, way: str, times: int) -> None:
        self.way, self.times = way, times

    def __repr__(self) -> str:
        return f"{self.way} {self.times} times"

    @property
    def is_right_in_time(self) -> bool:
        return self.times < ATTEMPTS

    def __call__(self, read: Read) -> None:
        if read.number > self.times:
            return
        if self.way == "fails":
            raise OSError("the cable was unplugged")
        if self.way == "gives less":
            raise ShortReadError("the cable is loose")
        read.buffer[read.number % read.buffer.nbytes] ^= 1


ATTEMPTS = 3
scripts = st.builds(Script, st.sampled_from(["is wrong", "fails", "gives less"]), st.integers(0, 4))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])  # config is frozen
@given(scripts=st.tuples(scripts, scripts, scripts), num_chunks=st.integers(1, 3))
def test_bytes_are_right_if_any_source_can_give_them_and_refused_else(
    three_copies: tuple[Manifest, list[Path]], config: Config, scripts: tuple[Script, ...], num_chunks: int
) -> None:
    manifest, folders = three_copies
    by_folder = {str(folder): script for folder, script in zip(folders, scripts, strict=True)}
    storage = InjectingStorage(lambda read: by_folder[str(Path(read.uri).parent)](read))
    reader = _reader(manifest, _with(config, mirrors=tuple(map(str, folders[1:]))), storage)
    begin, end = manifest.files[0].data_begin, manifest.files[0].data_begin + num_chunks * CHUNK_BYTES
    expected = _stored(folders[0] / "model.safetensors", begin, end)

    if any(script.is_right_in_time for script in scripts):
        with reader.staged(0, begin, end) as extent:
            assert extent.data.tobytes() == expected
            assert extent.verified == "reference"
    else:
        wrong = any(script.way == "is wrong" for script in scripts)
        with pytest.raises(IntegrityError if wrong else SourceError) as caught:
            reader.staged(0, begin, end).__enter__()
        assert all(str(folder) in str(caught.value) for folder in folders)


@pytest.fixture(scope="module")
def three_copies(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, list[Path]]:
    """A recorded checkpoint and two mirrors."""
    base = tmp_path_factory.mktemp("copies")
    folders = [Path(shutil.copytree(llama.path, base / name)) for name in ("own", "first", "second")]
    manifest = open_manifest(folders[0])
    write_sidecar(record_checksums(manifest, chunk_bytes=CHUNK_BYTES), default_sidecar_path(manifest))
    return open_manifest(folders[0]), folders


# --- quarantine ------------------------------------------------------------------------------------------------------


def test_a_source_that_keeps_failing_is_not_asked_again(recorded: Manifest, mirrored: Config, own: Path) -> None:
    config = replace(mirrored, retry=replace(mirrored.retry, quarantine_reads=6, quarantine_share=0.5))
    info, storage = recorded.files[0], InjectingStorage(_flip(own))
    reader = _reader(recorded, config, storage)

    with reader.staged(0, info.data_begin, info.size_bytes) as extent:
        assert extent.data.tobytes() == _stored(own / "model.safetensors", info.data_begin, info.size_bytes)

    assert sum(uri.startswith(str(own)) for uri, _ in storage.reads) == 6
    quarantined = [fault for fault in reader.faults if fault.kind == "source_quarantined"]
    assert [fault.where for fault in quarantined] == [str(own)]
    assert "6 of 6 reads failed" in quarantined[0].action
    assert reader.counters.payload_bytes == info.size_bytes - info.data_begin


def test_a_source_in_quarantine_is_asked_where_no_other_can_help(
    recorded: Manifest, mirrored: Config, own: Path, mirror: Path
) -> None:
    config = replace(mirrored, retry=replace(mirrored.retry, quarantine_reads=3))
    begin = recorded.files[0].data_begin

    def damage(read: Read) -> None:
        _flip(own, begin)(read)
        _flip(mirror, begin + CHUNK_BYTES)(read)

    reader = _reader(recorded, config, InjectingStorage(damage))

    with reader.staged(0, begin, begin + 2 * CHUNK_BYTES) as extent:
        assert extent.data.tobytes() == _stored(own / "model.safetensors", begin, begin + 2 * CHUNK_BYTES)

    assert "source_quarantined" in _kinds(reader)


def test_a_checkpoint_without_mirrors_is_never_put_in_quarantine(recorded: Manifest, config: Config, own: Path) -> None:
    config = replace(config, retry=replace(config.retry, quarantine_reads=2))
    info = recorded.files[0]
    reader = _reader(recorded, config, InjectingStorage(_flip(own, times=2)))

    with reader.staged(0, info.data_begin, info.size_bytes) as extent:
        assert extent.verified == "reference"

    assert set(_kinds(reader)) == {"chunk_mismatch"}


def test_failures_of_one_file_count_for_its_storage_and_not_for_the_other(
    own: Path, mirror: Path, mirrored: Config, record: Callable[[Path], Manifest]
) -> None:
    for folder in (own, mirror):
        shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
        (folder / "config.json").unlink()
    _rename_tensors(own / "other.safetensors")
    shutil.copy(own / "other.safetensors", mirror / "other.safetensors")
    manifest = record(own)
    config = replace(mirrored, retry=replace(mirrored.retry, quarantine_reads=3))
    storage = InjectingStorage(_flip(own))
    reader = _reader(manifest, config, storage)

    for file in (0, 1):
        begin = manifest.files[file].data_begin
        with reader.staged(file, begin, begin + CHUNK_BYTES) as extent:
            assert extent.verified == "reference"

    assert [uri for uri, _ in storage.reads if uri.endswith("other.safetensors")] == [str(mirror / "other.safetensors")]


def _rename_tensors(path: Path) -> None:
    """Other names of the same length, so that the file stays as long as it is."""
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"model.', b'"xodel.').replace(b'"lm_head', b'"xm_head'))


# --- without recorded checksums --------------------------------------------------------------------------------------


def test_without_checksums_a_mirror_is_refused_since_nothing_shows_that_it_is_the_same(
    own: Path, mirror: Path, mirrored: Config
) -> None:
    # A fine-tuned model: the same header, the same size, other weights.
    path = mirror / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 1
    path.write_bytes(raw)
    manifest = open_manifest(own)
    begin = manifest.files[0].data_begin
    reader = _reader(manifest, mirrored, InjectingStorage(_fail(own)))

    with pytest.raises(SourceError, match=r"nothing shows that this mirror holds the bytes.*verify --record"):
        reader.staged(0, begin, begin + 100).__enter__()

    assert _kinds(reader) == ["mirror_skipped"]


def test_without_checksums_a_mirror_on_the_web_is_refused_since_it_knows_none(own: Path, config: Config) -> None:
    manifest = open_manifest(own)
    begin = manifest.files[0].data_begin
    with RangeServer(own) as server:
        reader = _reader(manifest, _with(config, mirrors=(server.uri,)), InjectingStorage(_fail(own)))

        with pytest.raises(
            SourceError, match=r"nothing shows that this mirror holds the bytes.*are not known for both"
        ):
            reader.staged(0, begin, begin + 100).__enter__()

    assert _kinds(reader) == ["mirror_skipped"]


def _hub_cache(folder: Path, source: Path, digest: str) -> Path:
    """A snapshot in a Hugging Face cache: a link into the blobs."""
    snapshot = folder / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    shutil.copy(source, folder / "blobs" / digest)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / digest)
    return snapshot


@pytest.mark.parametrize(("theirs", "used"), [("a" * 64, True), ("b" * 64, False)])
def test_without_checksums_a_mirror_is_used_where_both_storages_have_the_same_digest(
    llama: Any, config: Config, tmp_path: Path, theirs: str, used: bool
) -> None:
    own = _hub_cache(tmp_path / "own", llama.file, "a" * 64)
    mirror = _hub_cache(tmp_path / "mirror", llama.file, theirs)
    manifest = open_manifest(own)
    begin = manifest.files[0].data_begin
    reader = _reader(manifest, _with(config, mirrors=(str(mirror),)), InjectingStorage(_fail(own)))

    if used:
        with reader.staged(0, begin, begin + 100) as extent:
            assert extent.data.tobytes() == _stored(llama.file, begin, begin + 100)
            assert extent.verified == "transit"
    else:
        with pytest.raises(SourceError, match="checksums differ"):
            reader.staged(0, begin, begin + 100).__enter__()


def test_a_source_that_gave_bytes_without_a_checksum_must_stay_as_it_was(
    llama: Any, config: Config, tmp_path: Path
) -> None:
    own = _hub_cache(tmp_path / "own", llama.file, "a" * 64)
    mirror = _hub_cache(tmp_path / "mirror", llama.file, "a" * 64)
    manifest = open_manifest(own)
    begin = manifest.files[0].data_begin
    reader = _reader(manifest, _with(config, mirrors=(str(mirror),)))
    with reader.staged(0, begin, begin + 100):
        pass
    os.utime(own / "model.safetensors", ns=(1, 1))

    with pytest.raises(IntegrityError, match="changed while it was read"):
        reader.check_unchanged()


# --- whole loads -----------------------------------------------------------------------------------------------------


def test_a_state_dict_is_whole_though_its_own_storage_fails(
    recorded: Manifest, mirrored: Config, own: Path, llama: Any
) -> None:
    storage = InjectingStorage(_fail(own))

    loaded = load_tensors(recorded, list(recorded.tensors.values()), "cpu", mirrored, opener=storage)

    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in llama.tensors.items())
    assert loaded.summary.verified == "reference"
    assert {"chunk_mirrored", "source_quarantined"} <= {fault.kind for fault in loaded.summary.faults}


@pytest.mark.parametrize("through_pool", [False, True])
def test_a_plan_is_executed_though_its_own_storage_is_wrong(
    recorded: Manifest,
    mirrored: Config,
    pool_config: Config,
    own: Path,
    plan_for: Callable[..., Any],
    through_pool: bool,
    llama: Any,
) -> None:
    config = replace(mirrored, routing=pool_config.routing) if through_pool else mirrored
    plan, manifest = plan_for(own, Parallel(), config)

    done = load_plan(plan, manifest, config, [HostArena(16 << 20)], opener=InjectingStorage(_flip(own)))

    tensors = done.sessions[0].state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in llama.tensors.items())
    assert done.report.verified == "reference"
    assert {"chunk_mirrored", "source_quarantined"} <= {fault.kind for fault in done.report.faults}
    assert done.report.bytes_from_storage == llama.nbytes


def test_a_mirror_may_be_of_another_kind_of_storage(
    recorded: Manifest, config: Config, own: Path, mirror: Path
) -> None:
    begin = recorded.files[0].data_begin
    with RangeServer(mirror) as server:
        reader = _reader(recorded, _with(config, mirrors=(server.uri,)), InjectingStorage(_flip(own, begin)))

        with reader.staged(0, begin, begin + CHUNK_BYTES) as extent:
            assert extent.data.tobytes() == _stored(own / "model.safetensors", begin, begin + CHUNK_BYTES)
            assert extent.verified == "reference"
        reader.close()


def test_a_server_that_cannot_be_reached_is_left_for_a_folder(recorded: Manifest, mirrored: Config, own: Path) -> None:
    begin = recorded.files[0].data_begin
    reader = _reader(replace(recorded, root="http://127.0.0.1:9"), mirrored)

    with reader.staged(0, begin, begin + CHUNK_BYTES) as extent:
        assert extent.data.tobytes() == _stored(own / "model.safetensors", begin, begin + CHUNK_BYTES)

    assert _kinds(reader) == ["chunk_mirrored"]


def test_a_mirror_that_is_the_checkpoint_itself_is_no_further_source(
    recorded: Manifest, config: Config, own: Path
) -> None:
    begin = recorded.files[0].data_begin
    reader = _reader(recorded, _with(config, mirrors=(f"{own}/",)), InjectingStorage(_flip(own)))

    with pytest.raises(IntegrityError, match="are wrong: CRC-32"):
        reader.staged(0, begin, begin + CHUNK_BYTES).__enter__()


def test_a_mirror_of_an_unknown_kind_is_refused_at_once(config: Config) -> None:
    with pytest.raises(RequestError, match="ftp:// is not supported"):
        _with(config, mirrors=("ftp://host/models",))
