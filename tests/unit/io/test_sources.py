import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megamind_ray.config import RetryConfig
from megamind_ray.core.manifest import FileInfo
from megamind_ray.errors import IntegrityError, RequestError, SourceError
from megamind_ray.io import (
    FsspecSource,
    LocalSource,
    ReadCounters,
    ReadKind,
    open_manifest,
    open_source,
)
from megamind_ray.io.source import FileVersion, ShortReadError
from megamind_ray.io.times import nanoseconds

DATA = bytes(range(256)) * 4


def info(size_bytes: int = 1024, **fields: Any) -> Any:
    return FileInfo(path="data", size_bytes=size_bytes, data_begin=8, **fields)


def read(source: Any, offset: int, size: int) -> Any:
    buffer = np.full(size, 255, np.uint8)
    source.read_into(offset, memoryview(buffer))
    return buffer.tobytes()


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["local", "fsspec"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The same 1,024 bytes in a local file and in a remote one."""
    if request.param == "local":
        (tmp_path / "data").write_bytes(DATA)
        return str(tmp_path / "data")
    memory = request.getfixturevalue("memory")
    memory.pipe_file("/bucket/data", DATA)
    return "memory://bucket/data"


@pytest.mark.parametrize(("offset", "size"), [(0, 1024), (1, 7), (1023, 1), (512, 0), (1024, 0)])
def test_a_range_is_read(uri: str, offset: int, size: int) -> None:
    with open_source(uri, info()) as source:
        assert source.size_bytes == 1024
        assert read(source, offset, size) == DATA[offset : offset + size]


@pytest.mark.parametrize(("offset", "size"), [(1020, 5), (1025, 0), (-1, 1)])
def test_a_range_outside_the_file_is_refused(uri: str, offset: int, size: int) -> None:
    with open_source(uri, info()) as source, pytest.raises(IntegrityError, match="are not in the file") as caught:
        read(source, offset, size)

    assert (caught.value.file, caught.value.begin, caught.value.end) == (uri, offset, offset + size)


def test_a_file_of_another_size_than_planned_is_refused(uri: str) -> None:
    with pytest.raises(IntegrityError, match=r"data: changed since it was planned \(size in bytes was 1000, is 1024\)"):
        open_source(uri, info(size_bytes=1000))


def test_a_file_of_another_time_than_planned_is_refused(uri: str) -> None:
    with pytest.raises(IntegrityError, match=r"data: changed since it was planned \(mtime in ns was 1, is \d+\)"):
        open_source(uri, info(mtime_ns=1))


def test_a_file_that_is_gone(uri: str) -> None:
    with pytest.raises(RequestError, match=r"data2: no such file or folder"):
        open_source(uri + "2", info())


def test_a_folder_is_not_a_file(uri: str) -> None:
    with pytest.raises(RequestError):
        open_source(uri.rpartition("/")[0], info())


def test_a_manifest_opens_its_own_files(uri: str, encode: Any, memory: Any, tmp_path: Path) -> None:
    raw = encode({"w": ("U8", [3], b"abc")})
    memory.pipe_file("/bucket/m.safetensors", raw)
    (tmp_path / "m.safetensors").write_bytes(raw)
    manifest = open_manifest(uri.rpartition("/")[0] + "/m.safetensors")
    tensor = manifest.tensors["w"]

    with open_source(manifest.file_uri(0), manifest.files[0]) as source:
        assert read(source, tensor.begin, tensor.nbytes) == b"abc"
        source.check_unchanged()


def test_a_local_file_that_is_written_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    with LocalSource(path) as source:
        with path.open("ab") as file:
            file.write(b"more")

        with pytest.raises(IntegrityError, match=r"changed while it was read \(size in bytes was 1024, is 1028"):
            source.check_unchanged()


def test_a_local_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    with LocalSource(path) as source:
        os.truncate(path, 10)

        with pytest.raises(IntegrityError, match=r"changed while it was read \(size in bytes was 1024, is 10"):
            read(source, 0, 100)


def test_a_remote_file_that_is_replaced_while_it_is_open(memory: Any) -> None:
    memory.pipe_file("/bucket/data", DATA)
    with open_source("memory://bucket/data", info()) as source:
        memory.pipe_file("/bucket/data", DATA[::-1])

        with pytest.raises(IntegrityError, match="changed while it was read"):
            source.check_unchanged()


def test_short_reads_of_the_kernel_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_bytes(DATA)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:100]], offset))

    with LocalSource(tmp_path / "data") as source:
        assert read(source, 5, 1000) == DATA[5:1005]


def test_a_closed_source_can_be_closed_again(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    source = LocalSource(tmp_path / "data")

    source.close()
    source.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        read(source, 0, 1)


def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(RequestError, match=r"pipe: is not a regular file"):
        LocalSource(tmp_path / "pipe")


class OddFileSystem:
    """Answers as told: what ``info`` says, and what ``cat_file`` gives or raises."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[tuple[str, int, int]] = []

    def info(self, path: Any) -> Any:
        return {"name": path, "size": len(DATA), "type": "file", "ETag": "v1"}

    def cat_file(self, path: Any, start: Any, end: Any) -> Any:
        self.calls.append((path, start, end))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_remote_short_read_is_an_error() -> None:
    filesystem = OddFileSystem(b"123")

    with pytest.raises(ShortReadError, match="3 bytes came of 8"):
        read(FsspecSource(filesystem, "p", "s3://b/p"), 2, 8)

    assert filesystem.calls == [("p", 2, 10)]


def test_a_server_without_byte_ranges_is_named() -> None:
    with pytest.raises(RequestError, match=r"http://h/p: gave 1024 bytes where 8 were asked for"):
        read(FsspecSource(OddFileSystem(DATA), "p", "http://h/p"), 0, 8)


def test_errors_of_a_storage_library_become_os_errors() -> None:
    class OddError(Exception):
        pass

    with pytest.raises(OSError, match="OddError: the first line$"):
        read(FsspecSource(OddFileSystem(OddError("the first line\nand details")), "p", "s3://b/p"), 0, 8)


def test_missing_credentials_are_the_users_to_give() -> None:
    class NoCredentialsError(Exception):
        pass

    with pytest.raises(RequestError, match=r"no permission to read it \(NoCredentialsError: set AWS_PROFILE\)"):
        read(FsspecSource(OddFileSystem(NoCredentialsError("set AWS_PROFILE")), "p", "s3://b/p"), 0, 8)


def test_the_version_tag_of_an_object_is_compared() -> None:
    source = FsspecSource(OddFileSystem(b""), "p", "s3://b/p")

    assert source.version == FileVersion(1024, None, "v1")
    assert source.version.difference(replace(source.version, etag="v2")) == "etag was v1, is v2"


@pytest.mark.parametrize(
    "moment",
    [1.5, datetime.fromtimestamp(1.5, UTC), "1970-01-01T00:00:01.500+00:00"],
)
def test_moments_in_the_forms_that_file_systems_use(moment: Any) -> None:
    assert nanoseconds(moment) == 1_500_000_000


def test_a_moment_as_in_http() -> None:
    assert nanoseconds("Thu, 01 Jan 1970 00:00:02 GMT") == 2_000_000_000


@pytest.mark.parametrize("moment", [None, "yesterday", object()])
def test_what_is_no_moment(moment: Any) -> None:
    assert nanoseconds(moment) is None


def test_counters_lose_nothing_between_threads() -> None:
    counters = ReadCounters()

    def count() -> None:
        for _ in range(2000):
            counters.add(ReadKind.PAYLOAD, 3)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counters.payload_bytes == 4 * 2000 * 3
    assert counters.num_reads == 8000


class _Handler(BaseHTTPRequestHandler):
    """Serves a dict of files by ranges."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: Any) -> None:
        data = self.server.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        begin, end = 0, len(data)
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            begin, end = int(first), int(last) + 1
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(end - begin))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.wfile.write(data[begin:end])

    def log_message(self, format: Any, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def web() -> Iterator[Any]:
    """(address, files by path) of a web server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.files = {}
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", server.files
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_checkpoint_on_a_web_server(web: Any, indexed_folder: Path) -> None:
    address, files = web
    files |= {f"/m/{path.name}": path.read_bytes() for path in indexed_folder.iterdir()}

    manifest = open_manifest(f"{address}/m")
    tensor = manifest.tensors["c"]
    with open_source(manifest.file_uri(tensor.file), manifest.files[tensor.file]) as source:
        content = read(source, tensor.begin, tensor.nbytes)

    assert manifest.tensors == open_manifest(indexed_folder).tensors
    assert content == files["/m/model-00002-of-00002.safetensors"][tensor.begin : tensor.end]


def test_a_file_on_a_web_server_with_a_query(web: Any, encode: Any) -> None:
    address, files = web
    files["/m/w.safetensors?key=a/b"] = encode({"w": ("U8", [3], b"abc")})

    manifest = open_manifest(f"{address}/m/w.safetensors?key=a/b")

    assert manifest.file_uri(0) == f"{address}/m/w.safetensors?key=a/b"
    assert list(manifest.tensors) == ["w"]


def test_a_web_server_without_a_checkpoint(web: Any) -> None:
    address, _ = web

    with pytest.raises(RequestError, match=f"{address}/m: serves neither model.safetensors.index.json nor"):
        open_manifest(f"{address}/m")


def test_a_server_that_cannot_be_reached_is_tried_again_and_not_called_a_missing_file() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # taken, but nobody listens
        uri = f"http://127.0.0.1:{held.getsockname()[1]}/model.safetensors"
        with pytest.raises(SourceError, match="127.0.0.1"):
            open_manifest(uri, retry=RetryConfig(attempts=2, first_wait_s=0.0, max_wait_s=0.0))
