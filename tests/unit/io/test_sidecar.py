import json
import os
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.config import RetryConfig
from megamind_ray.core.manifest import FileChecksums
from megamind_ray.errors import IntegrityError, RequestError
from megamind_ray.io import (
    default_sidecar_path,
    open_manifest,
    read_sidecar,
    record_checksums,
    require_sidecar_place,
    to_reference,
    verify_checksums,
    write_sidecar,
)
from megamind_ray.io.sidecar import num_chunks
from megamind_ray.testing.fault_server import Answer, Request
from megamind_ray.testing.range_server import RangeServer
from megamind_ray.units import KIB

CHUNK = 64 * KIB
BIG = {"a": 100_000, "b": 50_000, "c": 7}  # three chunks: a; a, b; b, c


@pytest.fixture
def folder(tmp_path: Path, write_file: Any) -> Any:
    """Two files with a sidecar at the default place."""
    folder = tmp_path / "model"
    write_file("one.safetensors", BIG, folder)
    write_file("two.safetensors", {"d": 10}, folder)
    record(folder)
    return folder


def record(uri: str) -> Any:
    manifest = open_manifest(uri, sidecar=False)
    path = default_sidecar_path(manifest)
    write_sidecar(record_checksums(manifest, chunk_bytes=CHUNK), path)
    return path


def flip(path: Any, offset: int, bit: int = 0) -> None:
    """Flips one bit and leaves size and time as they were."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ (1 << bit)]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def edit(folder: Path, change: Any) -> None:
    """Changes the JSON of the sidecar."""
    path = folder / "megamind-checksums.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_the_checksums_are_those_of_the_header_and_of_each_chunk_of_the_grid(folder: Path) -> None:
    raw = (folder / "one.safetensors").read_bytes()
    manifest = open_manifest(folder)
    begin = manifest.files[0].data_begin

    assert manifest.reference.chunk_bytes == CHUNK
    assert manifest.reference.origin == str(folder / "megamind-checksums.json")
    assert manifest.reference.files[0] == FileChecksums(
        header_crc32=zlib.crc32(raw[:begin]),
        chunks_crc32=tuple(zlib.crc32(raw[at : at + CHUNK]) for at in range(begin, len(raw), CHUNK)),
    )
    assert len(manifest.reference.files[0].chunks_crc32) == 3


@given(st.integers(0, 10**6), st.integers(8, 1000), st.integers(1, 10**5))
def test_the_chunks_of_a_file_cover_its_data(data_bytes: Any, data_begin: Any, chunk_bytes: int) -> None:
    count = num_chunks(data_begin + data_bytes, data_begin, chunk_bytes)

    assert (count - 1) * chunk_bytes < data_bytes <= count * chunk_bytes or (count, data_bytes) == (0, 0)


def test_what_is_written_is_read_again(folder: Path, tmp_path: Path) -> None:
    sidecar = read_sidecar(folder / "megamind-checksums.json")

    write_sidecar(sidecar, tmp_path / "other.json")

    assert read_sidecar(tmp_path / "other.json") == replace(sidecar, origin=str(tmp_path / "other.json"))
    assert sidecar.created_at.endswith("+00:00")


def test_a_good_checkpoint_verifies(folder: Path) -> None:
    progress = []

    result = verify_checksums(open_manifest(folder), threads=2, on_progress=lambda *now: progress.append(now))

    assert result.ok
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert (result.num_files, result.num_chunks, result.num_bytes) == (2, 4, total)
    assert progress[-1] == (total, total)
    assert progress == sorted(progress)


def test_a_flipped_bit_is_found_and_named(folder: Path) -> None:
    tensor = open_manifest(folder).tensors["c"]
    path = folder / "one.safetensors"
    flip(path, tensor.begin)

    manifest = open_manifest(folder)
    (mismatch,) = verify_checksums(manifest).mismatches

    begin = manifest.files[0].data_begin + 2 * CHUNK
    assert (mismatch.file, mismatch.begin, mismatch.end) == (str(path), begin, path.stat().st_size)
    assert mismatch.tensors == ("b", "c")
    assert mismatch.expected_crc32 != mismatch.actual_crc32
    assert "one.safetensors" in str(mismatch)
    assert "tensors b, c" in str(mismatch)


def test_all_mismatches_are_found_not_only_the_first(folder: Path) -> None:
    manifest = open_manifest(folder)
    flip(folder / "one.safetensors", manifest.tensors["a"].begin)
    flip(folder / "one.safetensors", manifest.tensors["c"].begin, bit=7)
    flip(folder / "two.safetensors", manifest.tensors["d"].end - 1)

    result = verify_checksums(open_manifest(folder))

    assert not result.ok
    assert [item.tensors for item in result.mismatches] == [("a",), ("b", "c"), ("d",)]


def test_a_header_that_was_damaged_after_it_was_opened_is_found(folder: Path) -> None:
    manifest = open_manifest(folder)
    flip(folder / "two.safetensors", 9)

    (mismatch,) = verify_checksums(manifest).mismatches

    assert mismatch.is_header
    assert (mismatch.begin, mismatch.end) == (0, manifest.files[1].data_begin)
    assert "(header)" in str(mismatch)


@pytest.mark.parametrize("offset", [0, 3, 7, 8, 30])
def test_a_damaged_header_is_refused_before_it_is_believed(folder: Path, offset: int) -> None:
    flip(folder / "one.safetensors", offset)

    with pytest.raises(IntegrityError, match=r"one.safetensors: the header, bytes \[0, \d+\), has CRC-32") as caught:
        open_manifest(folder)

    assert caught.value.file == str(folder / "one.safetensors")
    assert caught.value.begin == 0


def test_a_digit_of_the_header_that_still_parses_is_found_only_with_the_sidecar(folder: Path) -> None:
    path = folder / "two.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"U8"', b'"I8"'))

    assert open_manifest(folder, sidecar=False).tensors["d"].dtype.label == "I8"
    with pytest.raises(IntegrityError, match=r"two.safetensors: the header"):
        open_manifest(folder)


def test_a_sidecar_of_another_size_of_file(folder: Path, write_file: Any) -> None:
    write_file("two.safetensors", {"d": 11}, folder)

    with pytest.raises(IntegrityError, match=r"two.safetensors: size is \d+ bytes, the sidecar .* says \d+"):
        open_manifest(folder)


def test_a_file_that_the_sidecar_does_not_have(folder: Path, write_file: Any) -> None:
    write_file("three.safetensors", {"e": 1}, folder)

    with pytest.raises(IntegrityError, match=r"the sidecar has no file 'three.safetensors'"):
        open_manifest(folder)


def test_a_file_that_only_the_sidecar_has(folder: Path) -> None:
    (folder / "two.safetensors").unlink()

    with pytest.raises(IntegrityError, match=r"the sidecar has the file 'two.safetensors', the checkpoint has not"):
        open_manifest(folder)


def test_a_sidecar_of_another_begin_of_the_data(folder: Path) -> None:
    sidecar = read_sidecar(folder / "megamind-checksums.json")
    files = open_manifest(folder).files
    moved = replace(files[0], data_begin=files[0].data_begin + 8)

    with pytest.raises(IntegrityError, match=r"one.safetensors: data_begin is \d+, the sidecar .* says \d+"):
        to_reference(sidecar, [moved, files[1]])


def test_a_sidecar_can_be_left_out(folder: Path) -> None:
    assert open_manifest(folder, sidecar=False).reference is None


def test_a_sidecar_at_a_given_path(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.json"
    (folder / "megamind-checksums.json").rename(moved)

    assert open_manifest(folder).reference is None
    assert open_manifest(folder, sidecar=moved).reference.origin == str(moved)


@pytest.mark.parametrize("sidecar", [True, "/nowhere/sums.json"])
def test_a_sidecar_that_was_asked_for_must_be_there(folder: Path, sidecar: Any) -> None:
    (folder / "megamind-checksums.json").unlink()

    with pytest.raises(RequestError, match=r"(megamind-checksums|sums).json: no such sidecar; record one first"):
        open_manifest(folder, sidecar=sidecar)


def test_the_sidecar_of_a_single_file_is_beside_it(write_file: Any) -> None:
    path = write_file("w.safetensors", {"w": 10})

    assert record(path) == f"{path}.megamind.json"
    assert open_manifest(path).reference.origin == f"{path}.megamind.json"
    write_file("x.safetensors", {"x": 10})
    assert open_manifest(path.parent).reference is None  # it says nothing of the other file


def test_the_sidecar_of_an_index_is_in_its_folder(indexed_folder: Path) -> None:
    path = record(indexed_folder / "model.safetensors.index.json")

    assert path == str(indexed_folder / "megamind-checksums.json")
    assert open_manifest(indexed_folder).reference is not None


def test_a_sidecar_beside_remote_files(encode: Any) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/sidecar/w.safetensors", encode({"w": ("U8", [3], b"abc")}))

    record("memory://sidecar")

    assert open_manifest("memory://sidecar").reference.origin == "memory://sidecar/megamind-checksums.json"
    assert verify_checksums(open_manifest("memory://sidecar")).ok
    memory.rm("/sidecar", recursive=True)


def test_reading_the_sidecar_counts_as_header_bytes(folder: Path) -> None:
    without, within = open_manifest(folder, sidecar=False), open_manifest(folder)

    sidecar_bytes = (folder / "megamind-checksums.json").stat().st_size
    assert within.header_bytes == without.header_bytes + sidecar_bytes


def test_recording_replaces_the_old_sidecar_and_leaves_nothing_else(folder: Path, write_file: Any) -> None:
    before = sorted(path.name for path in folder.iterdir())
    write_file("two.safetensors", {"d": 20}, folder)

    record(folder)

    assert sorted(path.name for path in folder.iterdir()) == before
    assert verify_checksums(open_manifest(folder)).ok


def test_a_sidecar_that_cannot_be_written_says_where_else(folder: Path) -> None:
    sidecar = read_sidecar(folder / "megamind-checksums.json")

    with pytest.raises(RequestError, match=r"one.safetensors/sums.json: the sidecar cannot be written .*give a path"):
        write_sidecar(sidecar, folder / "one.safetensors" / "sums.json")


def test_a_storage_that_takes_nothing_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, writes = threading.Event(), []

    def take(path: str, raw: bytes) -> None:
        writes.append((path, len(raw)))
        released.wait(30)

    monkeypatch.setattr(
        "megamind_ray.io.sidecar.fsspec_filesystem", lambda *_: (SimpleNamespace(pipe_file=take), "b/sums.json")
    )
    path = folder / "megamind-checksums.json"
    retry = RetryConfig(attempts=2, first_wait_s=0.0, max_wait_s=0.0, request_s=0.02)
    try:
        with pytest.raises(RequestError, match=r"gs://b/sums.json: the sidecar cannot be written .*failed 2 times"):
            write_sidecar(read_sidecar(path), "gs://b/sums.json", retry=retry)
    finally:
        released.set()

    assert writes == [("b/sums.json", path.stat().st_size)] * 2


def test_a_failed_write_leaves_the_old_sidecar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "megamind-checksums.json"
    before = path.read_bytes()

    def full(fd: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RequestError, match="No space left on device"):
        write_sidecar(read_sidecar(path), path)

    assert path.read_bytes() == before
    assert not list(folder.glob("*.tmp")) + list(folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.pop("chunk_bytes"), "chunk_bytes is missing"),
        (lambda d: d.update(chunk_bytes=0), "chunk_bytes"),
        (lambda d: d.update(chunk_bytes=True), "chunk_bytes must be a whole number"),
        (lambda d: d.update(files={}), "files must be a list"),
        (lambda d: d["files"].append({}), "has no path"),
        (lambda d: d["files"].append(d["files"][0]), "listed twice"),
        (lambda d: d["files"][0].update(header_crc32=2**32), "one.safetensors: header_crc32"),
        (lambda d: d["files"][0].pop("header_crc32"), "header_crc32 is missing"),
        (lambda d: d["files"][0]["chunks_crc32"].pop(), "one.safetensors: chunks_crc32 must be a list of 3"),
        (lambda d: d["files"][0]["chunks_crc32"].__setitem__(0, -1), "one.safetensors: chunks_crc32"),
        (lambda d: d["files"][0].update(data_begin=10**9), "one.safetensors: data_begin 1000000000 is not inside"),
    ],
)
def test_a_malformed_sidecar_is_refused_not_ignored(folder: Path, change: Any, problem: str) -> None:
    edit(folder, change)

    with pytest.raises(IntegrityError, match=problem) as caught:
        open_manifest(folder)

    assert caught.value.file == str(folder / "megamind-checksums.json")


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_sidecar_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / "megamind-checksums.json").write_text(text)

    with pytest.raises(
        IntegrityError, match=r"megamind-checksums.json: the sidecar is .*: record it again, or leave it out"
    ):
        open_manifest(folder)


@pytest.mark.parametrize(("field", "value"), [("schema", "megamind.sidecar/2"), ("algorithm", "md5")])
def test_a_sidecar_of_another_release(folder: Path, field: str, value: Any) -> None:
    edit(folder, lambda document: document.update({field: value}))

    with pytest.raises(RequestError, match=f"has {field} '{value}', this release reads"):
        open_manifest(folder)


def test_unknown_fields_of_a_sidecar_are_ignored(folder: Path) -> None:
    edit(folder, lambda document: document.update(comment="by hand"))

    assert open_manifest(folder).reference is not None


@pytest.mark.parametrize("chunk_bytes", [0, 1000, 64 * KIB + 1, -4096])
def test_a_chunk_size_off_the_allowed_grid(folder: Path, chunk_bytes: int) -> None:
    with pytest.raises(RequestError, match="chunk_bytes"):
        record_checksums(open_manifest(folder), chunk_bytes=chunk_bytes)


def test_a_file_that_changed_since_the_manifest_is_not_recorded(folder: Path, write_file: Any) -> None:
    manifest = open_manifest(folder)
    write_file("two.safetensors", {"d": 11}, folder)

    with pytest.raises(IntegrityError, match=r"two.safetensors: changed since it was planned"):
        record_checksums(manifest)


def test_a_file_that_changes_while_it_is_recorded(folder: Path) -> None:
    def touch(done_bytes: Any, total_bytes: Any) -> None:
        os.utime(folder / "one.safetensors", ns=(1, 1))

    with pytest.raises(IntegrityError, match=r"one.safetensors: changed while it was read"):
        record_checksums(open_manifest(folder), on_progress=touch)


def test_verifying_needs_a_reference(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"no recorded checksums .*verify --record"):
        verify_checksums(open_manifest(folder, sidecar=False))


@pytest.mark.parametrize("place", ["http://127.0.0.1:1/sums.json", "/no/such/folder/sums.json"])
def test_a_place_that_takes_no_sidecar_is_refused_before_anything_is_read(place: str) -> None:
    with pytest.raises(RequestError, match="the sidecar cannot be written"):
        require_sidecar_place(place)


def test_a_header_longer_than_a_chunk(tmp_path: Path, write_file: Any) -> None:
    write_file("w.safetensors", {"w": 10}, padding=3 * CHUNK)

    record(tmp_path)

    assert verify_checksums(open_manifest(tmp_path)).ok


def test_a_file_without_data(tmp_path: Path, write_file: Any) -> None:
    write_file("w.safetensors", {"w": 0})

    record(tmp_path)
    manifest = open_manifest(tmp_path)

    assert manifest.reference.files[0].chunks_crc32 == ()
    assert verify_checksums(manifest).ok


class TestDefaultPlaces:
    """A file may be recorded alone or with its folder, and loaded alone or with its folder."""

    def test_one_file_is_held_to_the_sidecar_of_its_folder(self, folder: Path) -> None:
        manifest = open_manifest(folder / "two.safetensors")

        assert manifest.reference.origin == str(folder / "megamind-checksums.json")
        assert manifest.reference.files == (open_manifest(folder).reference.files[1],)
        assert verify_checksums(manifest).ok

    def test_a_damaged_file_of_a_recorded_folder_is_found_alone(self, folder: Path) -> None:
        path = folder / "two.safetensors"
        flip(path, path.stat().st_size - 1)

        assert not verify_checksums(open_manifest(path)).ok

    def test_its_own_sidecar_goes_first(self, folder: Path) -> None:
        path = record(folder / "one.safetensors")

        assert path == str(folder / "one.safetensors.megamind.json")
        assert open_manifest(folder / "one.safetensors").reference.origin == path
        assert open_manifest(folder).reference.origin == str(folder / "megamind-checksums.json")

    def test_a_folder_of_one_file_is_held_to_the_sidecar_of_that_file(self, tmp_path: Path, write_file: Any) -> None:
        path = record(write_file("model.safetensors", {"a": 10}))

        assert open_manifest(tmp_path).reference.origin == path

    def test_a_folder_that_was_recorded_before_the_file_came_says_nothing_of_it(
        self, folder: Path, write_file: Any
    ) -> None:
        path = write_file("three.safetensors", {"e": 10}, folder)

        assert open_manifest(path).reference is None
        with pytest.raises(RequestError, match=r"three.safetensors.megamind.json: no such sidecar; record one first"):
            open_manifest(path, sidecar=True)
        with pytest.raises(IntegrityError, match="the sidecar has no file 'three.safetensors'"):
            open_manifest(path, sidecar=folder / "megamind-checksums.json")

    def test_the_sidecar_of_a_folder_may_be_named_for_one_file(self, folder: Path) -> None:
        named = open_manifest(folder / "one.safetensors", sidecar=folder / "megamind-checksums.json")

        assert named.reference.files == (open_manifest(folder).reference.files[0],)

    @pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("gone.json")])
    def test_what_is_no_file_in_its_place_is_an_error(self, folder: Path, make: Any) -> None:
        place = folder / "megamind-checksums.json"
        place.unlink()
        make(place)

        with pytest.raises(RequestError, match=r"megamind-checksums.json: "):
            open_manifest(folder)
        assert open_manifest(folder, sidecar=False).reference is None

    def test_a_web_server_that_answers_everything_with_a_page_has_none(self, tmp_path: Path, write_file: Any) -> None:
        write_file("model.safetensors", {"a": 10})
        (tmp_path / "page.html").write_text("<!doctype html><title>Sign in</title>")
        with RangeServer(tmp_path) as server:
            files = server.answer
            server.answer = lambda it: files(
                it if it.path.endswith("/model.safetensors") else replace(it, path="/page.html")
            )

            for uri in (server.uri, f"{server.uri}/model.safetensors"):
                assert open_manifest(uri).reference is None
            with pytest.raises(IntegrityError, match=r"sums.json: the sidecar is not"):
                open_manifest(server.uri, sidecar=f"{server.uri}/sums.json")

    def test_a_recording_on_the_web_that_cannot_be_read_is_no_reason_to_load_unchecked(self, folder: Path) -> None:
        """A server that compresses JSON whatever it is asked for."""
        with RangeServer(folder) as server:
            files = server.answer

            def compressed(request: Request) -> Answer:
                answer = files(request)
                if request.path.endswith("/megamind-checksums.json"):
                    return Answer(answer.status, {**answer.headers, "Content-Encoding": "gzip"}, answer.body)
                return answer

            server.answer = compressed
            with pytest.raises(RequestError, match=r"megamind-checksums.json.* comes compressed"):
                open_manifest(f"{server.uri}/one.safetensors")
            assert open_manifest(f"{server.uri}/one.safetensors", sidecar=False).reference is None


def test_a_sidecar_is_written_through_a_link(folder: Path) -> None:
    sidecar, (target, link) = read_sidecar(folder / "megamind-checksums.json"), (folder / "sums", folder / "link.json")
    link.symlink_to(target)

    write_sidecar(sidecar, link)

    assert link.is_symlink()
    assert read_sidecar(target).files == sidecar.files


def test_a_sidecar_takes_the_place_of_no_pipe(folder: Path) -> None:
    sidecar, pipe = read_sidecar(folder / "megamind-checksums.json"), folder / "pipe"
    os.mkfifo(pipe)

    for refused in (lambda: require_sidecar_place(pipe), lambda: write_sidecar(sidecar, pipe)):
        with pytest.raises(RequestError, match="^sidecar .*pipe: is no regular file but a pipe; give the name of"):
            refused()

    assert pipe.is_fifo()
