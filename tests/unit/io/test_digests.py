"""Checksums that a storage has of whole files: where they are found, and what is held to them."""

from __future__ import annotations

import base64
import hashlib
import shutil
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.core.location import parse_location
from megamind_ray.errors import IntegrityError, RequestError, SourceError
from megamind_ray.io import open_manifest, open_source, read_sidecar, record_checksums, verify_checksums, write_sidecar
from megamind_ray.io.copies import mirror_of
from megamind_ray.io.digests import FileDigest, digest_in_info, file_digest, new_hasher, planned_digest
from megamind_ray.io.filesystems import fsspec_filesystem
from megamind_ray.testing.range_server import RangeServer

CHUNK_BYTES = 64 << 10


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


@pytest.fixture
def plain(tmp_path: Path, write_file: Any) -> Path:
    """A folder of two files of several chunks."""
    folder = tmp_path / "plain"
    write_file("a.safetensors", {"a": 3 * CHUNK_BYTES + 100, "b": 50}, folder)
    write_file("b.safetensors", {"c": CHUNK_BYTES}, folder)
    return folder


@pytest.fixture
def hub(tmp_path: Path, plain: Path) -> Path:
    """The same as the hub's client leaves it: a snapshot of links to blobs that are named after their SHA-256."""
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in plain.iterdir():
        shutil.copy(path, blobs / sha256(path))
        (snapshot / path.name).symlink_to(Path("../../blobs") / sha256(path))
    return snapshot


# --- where they are found --------------------------------------------------------------------------------------------


def test_a_blob_of_the_hubs_cache_is_named_after_its_sha256(hub: Path) -> None:
    digest = file_digest(parse_location(hub / "a.safetensors"))

    assert digest is not None
    assert (digest.algorithm, digest.value) == ("sha256", sha256(hub / "a.safetensors"))


@pytest.mark.parametrize(
    "target", ["../../blobs/" + "0" * 40, "../../other/" + "0" * 64, "../../blobs/" + "0" * 63 + "G", "elsewhere"]
)
def test_a_link_to_something_else_says_nothing(tmp_path: Path, target: str) -> None:
    (tmp_path / "w.safetensors").symlink_to(target)

    assert file_digest(parse_location(tmp_path / "w.safetensors")) is None


def test_a_plain_file_has_no_digest(plain: Path) -> None:
    assert file_digest(parse_location(plain / "a.safetensors")) is None


def test_a_web_server_knows_none_and_is_not_asked(plain: Path) -> None:
    with RangeServer(plain) as server:
        assert file_digest(parse_location(f"{server.uri}/a.safetensors")) is None
        assert server.num_requests == 0


def test_a_web_server_is_no_file_system() -> None:
    with pytest.raises(RequestError, match="http://h/w: a web server is no file system"):
        fsspec_filesystem(parse_location("http://h/w"))


def test_a_storage_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    silent = SimpleNamespace(info=lambda _path: released.wait(30))
    monkeypatch.setattr("megamind_ray.io.digests.fsspec_filesystem", lambda *_: (silent, "c/p"))
    retry = RetryConfig(attempts=2, first_wait_s=0.0, max_wait_s=0.0, request_s=0.02)
    try:
        with pytest.raises(SourceError, match=r"az://c/p: asking for its checksum failed 2 times.*within 0.06 s"):
            file_digest(parse_location("az://c/p"), retry=retry)
    finally:
        released.set()


def test_a_file_system_that_tells_none_has_none(encode: Any) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/digests/w.safetensors", encode({"w": ("U8", [1], b"x")}))

    assert file_digest(parse_location("memory://digests/w.safetensors")) is None


MD5 = hashlib.md5(b"weights", usedforsecurity=False)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"md5Hash": base64.b64encode(MD5.digest()).decode()}, ("md5", MD5.hexdigest())),
        ({"content_settings": {"content_md5": bytearray(MD5.digest())}}, ("md5", MD5.hexdigest())),
        ({"content_settings": SimpleNamespace(content_md5=bytearray(MD5.digest()))}, ("md5", MD5.hexdigest())),
        ({"content_md5": MD5.digest()}, ("md5", MD5.hexdigest())),
        ({"lfs": {"sha256": "ab" * 32, "size": 7}}, ("sha256", "ab" * 32)),
        ({"lfs": None, "size": 7, "etag": "0x8DC"}, None),
        ({"md5Hash": "no base64!"}, None),
        ({"md5Hash": base64.b64encode(b"too short").decode()}, None),
        ({"content_settings": {"content_md5": None}}, None),
        ({}, None),
    ],
)
def test_what_file_systems_say_of_a_file(info: Any, expected: Any) -> None:
    digest = digest_in_info(info)

    assert (digest and (digest.algorithm, digest.value)) == expected


def test_the_hub_says_the_sha256_of_large_files() -> None:
    from huggingface_hub.hf_api import BlobLfsInfo

    digest = digest_in_info({"size": 7, "lfs": BlobLfsInfo(size=7, sha256="cd" * 32, pointer_size=1)})

    assert digest is not None
    assert digest.value == "cd" * 32


@pytest.mark.parametrize(
    ("etag", "expected"),
    [
        ('"5D41402ABC4B2A76B9719D911017C592"', "5d41402abc4b2a76b9719d911017c592"),
        ('"5d41402abc4b2a76b9719d911017c592-12"', None),  # in parts: a checksum of checksums
        ('W/"5d41402abc4b2a76b9719d911017c592"', None),
        (None, None),
    ],
)
def test_what_a_manifest_kept_of_an_object(etag: str | None, expected: str | None) -> None:
    digest = planned_digest(parse_location("s3://bucket/w.safetensors"), etag)

    assert (digest and digest.value) == expected


def test_tags_of_other_storages_are_no_checksums() -> None:
    assert planned_digest(parse_location("https://host/w.safetensors"), '"5d41402abc4b2a76b9719d911017c592"') is None


@pytest.mark.parametrize("algorithm", ["sha256", "md5", "crc32"])
def test_a_file_is_summed_piece_by_piece(algorithm: str) -> None:
    hasher = new_hasher(algorithm)
    for piece in (b"12345", b"", b"6789"):
        hasher.update(memoryview(piece))

    expected = {
        "sha256": hashlib.sha256(b"123456789").hexdigest(),
        "md5": hashlib.md5(b"123456789", usedforsecurity=False).hexdigest(),
        "crc32": f"{zlib.crc32(b'123456789'):08x}",
    }
    assert hasher.hexdigest() == expected[algorithm]


@pytest.mark.parametrize(("module", "check"), [("google_crc32c", "crc32c"), ("awscrt", "crc64nvme")])
def test_what_cannot_be_computed_here_counts_as_none(module: str, check: str) -> None:
    if _is_installed(module):
        expected = {"crc32c": "e3069283", "crc64nvme": "ae8b14860a799888"}[check]
        hasher = new_hasher(check)
        hasher.update(memoryview(b"1234"))
        hasher.update(memoryview(b"56789"))
        assert hasher.hexdigest() == expected
    elif not _is_installed("awscrt"):
        with pytest.raises(RequestError, match=f"{check} cannot be computed here; install .*{module}"):
            new_hasher(check)
        assert digest_in_info({"crc32c": base64.b64encode(b"1234").decode()}) is None or _is_installed("google_crc32c")


def _is_installed(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def test_only_a_cryptographic_digest_shows_that_two_files_are_the_same() -> None:
    assert FileDigest("sha256", "a" * 64, "x").same_bytes(FileDigest("sha256", "a" * 64, "y"))
    assert not FileDigest("sha256", "a" * 64, "x").same_bytes(FileDigest("sha256", "b" * 64, "y"))
    assert not FileDigest("crc32", "a" * 8, "x").same_bytes(FileDigest("crc32", "a" * 8, "x"))


# --- S3 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """A client of an S3 server on loopback, with a bucket of that name."""
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from botocore.config import Config

    from megamind_ray.testing.s3_server import S3Server

    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        # Else the client adds a CRC-32 of its own to everything.
        client = boto3.client(
            "s3", endpoint_url=server.uri, config=Config(request_checksum_calculation="when_required")
        )
        client.create_bucket(Bucket="bucket")
        yield client
        client.close()


def test_an_object_in_one_part_has_its_md5_as_etag(bucket: Any) -> None:
    bucket.put_object(Bucket="bucket", Key="single", Body=b"weights")

    digest = file_digest(parse_location("s3://bucket/single"))

    assert digest is not None
    assert (digest.algorithm, digest.value) == ("md5", MD5.hexdigest())


def test_an_object_with_a_sha256_of_its_own_has_that(bucket: Any) -> None:
    bucket.put_object(Bucket="bucket", Key="summed", Body=b"weights", ChecksumAlgorithm="SHA256")

    digest = file_digest(parse_location("s3://bucket/summed"))

    assert digest is not None
    assert (digest.algorithm, digest.value) == ("sha256", hashlib.sha256(b"weights").hexdigest())


def test_an_object_in_parts_has_no_md5(bucket: Any) -> None:
    upload = bucket.create_multipart_upload(Bucket="bucket", Key="parts")["UploadId"]
    parts = []
    for number, body in ((1, bytes(5 << 20)), (2, b"rest")):
        part = bucket.upload_part(Bucket="bucket", Key="parts", UploadId=upload, PartNumber=number, Body=body)
        parts.append({"ETag": part["ETag"], "PartNumber": number})
    bucket.complete_multipart_upload(Bucket="bucket", Key="parts", UploadId=upload, MultipartUpload={"Parts": parts})

    assert file_digest(parse_location("s3://bucket/parts")) is None


def test_an_object_that_is_not_there_is_named(bucket: Any) -> None:
    with pytest.raises(RequestError, match="s3://bucket/nothing: no such file"):
        file_digest(parse_location("s3://bucket/nothing"))


def test_a_checkpoint_on_s3_is_held_to_its_objects_checksums(bucket: Any, plain: Path) -> None:
    for path in plain.iterdir():
        bucket.put_object(Bucket="bucket", Key=f"model/{path.name}", Body=path.read_bytes())
    manifest = open_manifest("s3://bucket/model")

    result = verify_checksums(manifest)

    assert result.ok
    assert [(check.algorithm, check.ok) for check in result.digests] == [("md5", True)] * 2


# --- what is held to them --------------------------------------------------------------------------------------------


def test_without_a_sidecar_whole_files_are_held_to_their_digests(hub: Path) -> None:
    manifest = open_manifest(hub)

    result = verify_checksums(manifest)

    assert result.ok
    assert result.origin == ""
    assert [
        check.expected == check.actual == sha256(hub / name)
        for check, name in zip(result.digests, ("a.safetensors", "b.safetensors"), strict=True)
    ] == [True, True]
    assert result.num_bytes == sum(file.size_bytes for file in manifest.files)
    assert result.unchecked == ()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("offset", [-1, -CHUNK_BYTES - 1000])
def test_a_flipped_bit_in_a_blob_is_found(hub: Path, threads: int, offset: int) -> None:
    flip((hub / "a.safetensors").resolve(), offset)

    result = verify_checksums(open_manifest(hub), threads=threads)

    assert not result.ok
    assert [check.ok for check in result.digests] == [False, True]
    assert "a.safetensors: sha256 is" in str(result.digests[0])


def test_sidecar_and_digest_are_both_reported(hub: Path, tmp_path: Path) -> None:
    sidecar = tmp_path / "sums.json"
    write_sidecar(record_checksums(open_manifest(hub), chunk_bytes=CHUNK_BYTES), sidecar)
    flip((hub / "b.safetensors").resolve(), -5)

    result = verify_checksums(open_manifest(hub, sidecar=sidecar))

    assert [mismatch.tensors for mismatch in result.mismatches] == [("c",)]
    assert [check.ok for check in result.digests] == [True, False]


def test_files_without_any_checksum_are_listed_and_not_read(hub: Path, plain: Path) -> None:
    (hub / "b.safetensors").unlink()
    shutil.copy(plain / "b.safetensors", hub / "b.safetensors")
    manifest = open_manifest(hub)

    result = verify_checksums(manifest)

    assert result.unchecked == (str(hub / "b.safetensors"),)
    assert (result.num_files, result.num_bytes) == (1, manifest.files[0].size_bytes)


def test_damaged_files_are_not_recorded(hub: Path) -> None:
    flip((hub / "a.safetensors").resolve(), -1)

    with pytest.raises(IntegrityError, match=r"a\.safetensors: sha256 is .* checksums are not recorded"):
        record_checksums(open_manifest(hub))


def test_good_files_are_recorded_as_ever(hub: Path, plain: Path, tmp_path: Path) -> None:
    write_sidecar(record_checksums(open_manifest(hub), chunk_bytes=CHUNK_BYTES), tmp_path / "hub.json")
    write_sidecar(record_checksums(open_manifest(plain), chunk_bytes=CHUNK_BYTES), tmp_path / "plain.json")

    assert read_sidecar(tmp_path / "hub.json").files == read_sidecar(tmp_path / "plain.json").files


def test_a_mirror_is_held_to_the_checksums_of_the_checkpoint(hub: Path, plain: Path) -> None:
    flip(plain / "a.safetensors", -1)
    manifest = open_manifest(hub)
    expected = {file: digest for file in (0, 1) if (digest := file_digest(parse_location(manifest.file_uri(file))))}

    result = verify_checksums(mirror_of(manifest, str(plain)), digests=expected)

    assert [(check.file, check.ok) for check in result.digests] == [
        (str(plain / "a.safetensors"), False),
        (str(plain / "b.safetensors"), True),
    ]


@pytest.mark.parametrize("direct", ["never", "always"])
def test_files_are_read_as_the_settings_say(
    plain: Path, hub: Path, direct: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_and_tell(uri: str, file: Any, *, io: Any, retry: Any) -> Any:
        opened.append(io.direct)
        return open_source(uri, file, io=io, retry=retry)

    monkeypatch.setattr("megamind_ray.io.scan.open_source", open_and_tell)
    record_checksums(open_manifest(plain), io=IoConfig(direct=direct))
    verify_checksums(open_manifest(hub), io=IoConfig(direct=direct))

    assert set(opened) == {direct}
