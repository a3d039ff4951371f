"""Mirrors looked at before they are needed, and what is said where they will be of no help."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.errors import IntegrityError, RequestError
from megamind_ray.io import default_sidecar_path, open_manifest, record_checksums, write_sidecar
from megamind_ray.io.copies import check_mirrors, reference_notes, require_mirrors
from megamind_ray.testing.fault_server import Fault
from megamind_ray.testing.range_server import RangeServer

ONCE = RetryConfig(attempts=1, request_s=5.0)


@pytest.fixture
def mirror(indexed_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(indexed_folder, tmp_path / "mirror"))


def test_a_mirror_that_holds_the_files_passes(indexed_folder: Path, mirror: Path) -> None:
    check_mirrors(str(indexed_folder), [str(mirror), f"file://{mirror}"])


def test_a_mistyped_mirror_is_refused(indexed_folder: Path, mirror: Path) -> None:
    mistyped = [str(mirror), str(mirror.with_name("mirrro"))]

    with pytest.raises(RequestError, match=r"the mirror .*/mirrro cannot be used for .*no such file .*name a folder"):
        check_mirrors(str(indexed_folder), mistyped)
    with pytest.raises(RequestError, match=r"the mirror .*/mirrro cannot be used for "):
        require_mirrors(open_manifest(indexed_folder), mistyped)


def test_a_mirror_of_another_checkpoint_is_refused(indexed_folder: Path, mirror: Path, write_file: Any) -> None:
    write_file("model-00001-of-00002.safetensors", {"a": 101, "b": 50}, mirror)

    with pytest.raises(RequestError, match=r"model-00001-of-00002.safetensors has \d+ bytes there and \d+ here"):
        check_mirrors(str(indexed_folder), [str(mirror)])


def test_a_mirror_that_is_down_for_now_passes(indexed_folder: Path, mirror: Path) -> None:
    with RangeServer(mirror, faults=lambda _request: Fault.UNAVAILABLE) as server:
        check_mirrors(str(indexed_folder), [server.uri], retry=ONCE)

        assert server.num_requests > 0


def test_who_names_mirrors_is_told_that_they_hold_no_headers(indexed_folder: Path, mirror: Path) -> None:
    io = IoConfig(mirrors=(str(mirror),))
    second = indexed_folder / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=f"mirrors do not help here: .*give that as the checkpoint: {mirror}"):
        open_manifest(indexed_folder, io=io)

    second.unlink()
    with pytest.raises(RequestError, match=f"mirrors do not help here: .*give that as the checkpoint: {mirror}"):
        open_manifest(indexed_folder, io=io)
    with pytest.raises(RequestError, match="fetch the checkpoint again$"):
        open_manifest(indexed_folder)


def test_a_report_says_that_a_mirror_cannot_be_used(indexed_folder: Path, mirror: Path) -> None:
    manifest = open_manifest(indexed_folder)
    write_sidecar(record_checksums(manifest), default_sidecar_path(manifest))

    (note,) = reference_notes(manifest, [str(mirror)])

    assert note.startswith("mirror not usable: no recorded checksums")
    assert reference_notes(open_manifest(indexed_folder), [str(mirror)]) == ()
    assert reference_notes(replace(manifest, root="s3://bucket"), ["s3://other"]) == ()


def test_a_report_of_a_cached_model_says_which_checksums_there_are(tmp_path: Path, encode: Any) -> None:
    blob = tmp_path / "models--org--name" / "blobs" / ("0" * 64)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "f00d"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    blob.write_bytes(encode({"w": ("U8", [3], b"abc")}))
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")

    (note,) = reference_notes(open_manifest(snapshot), [])

    assert "the storage has some of whole files, which `megamind verify` checks" in note
