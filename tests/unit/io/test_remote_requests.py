"""How many requests are in flight, and how long each may take, whatever serves them."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem

import megamind_ray as mm
from megamind_ray.config import Config, IoConfig, RetryConfig
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.local_load import load_plan
from megamind_ray.errors import RequestError, SourceError, masked
from megamind_ray.io import FsspecSource, ReadCounters, read_with_retry
from megamind_ray.io.request_pool import run_requests
from megamind_ray.io.retry import read_bound_s, request_bound_s
from megamind_ray.planning.build import build_plan
from megamind_ray.planning.demands import build_demands
from megamind_ray.testing.fault_server import Answer, Fault, Request, parse_range, scripted
from megamind_ray.testing.range_server import RangeServer

CHUNK_BYTES = 64 << 10
BOUND_S = 30.0


class Gate:
    """Answers ranges of weights when so many are asked for at a time; remembers the most that there were."""

    def __init__(self, server: RangeServer, num_wanted: int) -> None:
        self._files = server.answer
        self._num_wanted = num_wanted
        self._changed = threading.Condition()
        self._num_now = self.most = 0
        server.answer = self.answer

    def answer(self, request: Request) -> Answer:
        begin, _ = parse_range(request.headers.get("range", "")) or (0, None)
        if begin <= 8:  # the header of the file
            return self._files(request)
        with self._changed:
            self._num_now += 1
            self.most = max(self.most, self._num_now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._num_wanted, BOUND_S)
        try:
            return self._files(request)
        finally:
            with self._changed:
                self._num_now -= 1


def checkpoint(folder: Path, num_chunks: int, encode: Any) -> bytes:
    data = np.random.default_rng(1).bytes(num_chunks * CHUNK_BYTES)
    (folder / "model.safetensors").write_bytes(encode({"w": ("U8", [len(data)], data)}))
    return data


def load(server: RangeServer, **settings: Any) -> bytes:
    io = IoConfig(chunk_bytes=CHUNK_BYTES, **settings)
    loaded = mm.load_state_dict(f"{server.uri}/model.safetensors", config=Config(io=io))
    return bytes(loaded["w"].numpy())


@pytest.mark.parametrize("extent_chunks", [1, 4])
def test_as_many_requests_are_in_flight_as_the_setting_says(tmp_path: Path, encode: Any, extent_chunks: int) -> None:
    data = checkpoint(tmp_path, 32, encode)
    with RangeServer(tmp_path) as server:
        gate = Gate(server, num_wanted=6)

        assert load(server, extent_bytes=extent_chunks * CHUNK_BYTES, remote_threads=6, read_threads=1) == data
        assert gate.most == 6


def test_the_chunks_of_one_extent_are_requested_side_by_side(tmp_path: Path, encode: Any) -> None:
    data = checkpoint(tmp_path, 4, encode)
    with RangeServer(tmp_path) as server:
        gate = Gate(server, num_wanted=4)

        assert load(server, extent_bytes=4 * CHUNK_BYTES, remote_threads=4) == data
        assert gate.most == 4


@pytest.mark.parametrize(
    ("root", "threads", "gap"), [("/models/m", 3, 4096), ("s3://b/m", 9, 65536), ("http://h/m", 9, 65536)]
)
def test_settings_differ_by_what_is_between(root: str, threads: int, gap: int) -> None:
    io = IoConfig(read_threads=3, remote_threads=9, max_gap_bytes=4096, remote_gap_bytes=65536)

    assert (io.reads_in_flight(root), io.gap_bytes(root)) == (threads, gap)


def test_a_gap_is_never_longer_than_a_chunk() -> None:
    assert IoConfig(chunk_bytes=64 << 10, remote_gap_bytes=1 << 20).gap_bytes("s3://b/m") == 64 << 10


@pytest.mark.parametrize("remote_gap_bytes", [0, 50_000])
def test_a_small_gap_in_remote_storage_is_read_over(tmp_path: Path, encode: Any, remote_gap_bytes: int) -> None:
    tensors = {name: ("U8", [size], bytes(size)) for name, size in (("a", 1000), ("b", 20_000), ("c", 1000))}
    (tmp_path / "model.safetensors").write_bytes(encode(tensors))
    config = Config(io=IoConfig(chunk_bytes=CHUNK_BYTES, extent_bytes=CHUNK_BYTES, remote_gap_bytes=remote_gap_bytes))
    with RangeServer(tmp_path) as server:
        mm.load_state_dict(f"{server.uri}/model.safetensors", include=["a", "c"], config=config)

        weights = [it for it in server.asked if it.method == "GET"][2:]
        assert len(weights) == (2 if remote_gap_bytes == 0 else 1)


def test_results_of_requests_come_in_order() -> None:
    assert run_requests(lambda item: item * item, range(50), num_in_flight=4) == [item * item for item in range(50)]


def test_an_error_ends_the_requests_and_is_raised_when_the_last_one_has_ended() -> None:
    begun, ended, failed = [], [], threading.Event()

    def ask(item: int) -> None:
        begun.append(item)
        if item == 1:
            failed.set()
            raise OSError("no")
        failed.wait(BOUND_S)
        ended.append(item)

    with pytest.raises(OSError, match="no"):
        run_requests(ask, range(100), num_in_flight=2)

    assert sorted(begun) == sorted([*ended, 1])
    assert len(begun) < 100


class SilentFileSystem(AsyncFileSystem):
    """Knows a file and never gives a byte of it."""

    def __init__(self) -> None:
        super().__init__(skip_instance_cache=True)
        self.cancelled = threading.Event()

    async def _info(self, path: str, **_options: Any) -> dict[str, Any]:
        return {"name": path, "size": 100, "type": "file", "etag": "v1"}

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **_options: Any) -> bytes:
        try:
            await asyncio.sleep(3600)
        finally:
            self.cancelled.set()
        return b""


def test_a_silent_file_system_is_given_up_and_its_call_cancelled() -> None:
    retry = RetryConfig(attempts=2, first_wait_s=0.0, max_wait_s=0.0, request_s=0.02)
    filesystem = SilentFileSystem()
    source = FsspecSource(filesystem, "p", "gs://b/p", retry)

    with pytest.raises(
        SourceError, match=r"gs://b/p: reading bytes \[0, 8\) failed 2 times, last with: FSTimeoutError"
    ):
        read_with_retry(source, 0, memoryview(bytearray(8)), retry, ReadCounters())

    assert filesystem.cancelled.wait(BOUND_S)


class StuckFileSystem:
    """Not asynchronous; knows a file and never comes back with a byte of it."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def info(self, path: str) -> dict[str, Any]:
        return {"name": path, "size": 100, "type": "file", "etag": "v1"}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.released.wait(BOUND_S)
        return bytes(end - start)


def test_a_file_system_that_cannot_be_cancelled_is_left_behind() -> None:
    retry = RetryConfig(attempts=2, first_wait_s=0.0, max_wait_s=0.0, request_s=0.02)
    filesystem = StuckFileSystem()
    try:
        with pytest.raises(SourceError, match=r"hf://m/p: reading .* failed 2 times, last with: no answer within 0.06"):
            read_with_retry(
                FsspecSource(filesystem, "p", "hf://m/p", retry), 0, memoryview(bytearray(8)), retry, ReadCounters()
            )
    finally:
        filesystem.released.set()


def test_the_bound_of_a_read_is_what_the_settings_allow() -> None:
    retry = RetryConfig(attempts=4, max_wait_s=5.0, request_s=30.0)

    assert request_bound_s(retry, 8 << 20) == 3 * 30 + 128
    assert read_bound_s(retry, 8 << 20) == 4 * (3 * 30 + 128 + 5)


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("the library's words")
        self.status = status


class OddFileSystem:
    """Refuses every read, in the way of aiohttp and those who imitate it."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.num_calls = 0

    def info(self, path: str) -> dict[str, Any]:
        return {"name": path, "size": 100, "type": "file"}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.num_calls += 1
        raise StatusError(self.status)


@pytest.mark.parametrize(
    ("status", "error", "calls"),
    [(403, RequestError, 1), (404, RequestError, 1), (429, SourceError, 3), (500, SourceError, 3)],
)
def test_the_status_in_a_librarys_error_decides(status: int, error: type[Exception], calls: int) -> None:
    retry = RetryConfig(attempts=3, first_wait_s=0.0, max_wait_s=0.0)
    filesystem = OddFileSystem(status)

    with pytest.raises(error, match="az://c/p"):
        read_with_retry(FsspecSource(filesystem, "p", "az://c/p"), 0, memoryview(bytearray(8)), retry, ReadCounters())

    assert filesystem.num_calls == calls


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://u:pw@h/p?X-Sig=ab/c+d=&x=1: no such file", "http://***@h/p?X-Sig=***&x=***: no such file"),
        ("https://token@h/p, then", "https://***@h/p, then"),
        ("s3://key:secret@bucket/x", "s3://***@bucket/x"),
        ("https://u:p@ss@host/x and a@b", "https://***@host/x and a@b"),
        # Where the password ends cannot be told: it may be before the last "@".
        ("s3://key:sec@ret@bucket/x@y", "s3://***@y"),
        ("http://u:s3c/ret@host/x failed", "http://***@host/x failed"),
        ("http://u:s3c?r#et@host/x", "http://***@host/x"),
        ("http://u:/s3cret@host/x", "http://***@host/x"),
        ("http://u:12345678/x@host/y", "http://***@host/y"),
        ("http://u:s3cret @host/x: no such file", "http://***@host/x: no such file"),
        ("http://u:s3cret @host/x and http://v:t0p @h/y", "http://***@host/x and http://***@h/y"),
        ("/work/http:/u:pw@host/x: no such file", "/work/http:/***@host/x: no such file"),
        ("HTTP:u:pw@host/x", "HTTP:***@host/x"),
        ("https:///u:pw@host/x", "https:///***@host/x"),
        ("http://[::1]:80/m@v1 and http://u:pw@[::1]:80/m", "http://[::1]:80/m@v1 and http://***@[::1]:80/m"),
        ("https://h/p#T0KEN: no such file", "https://h/p#***: no such file"),
        ("'w.safetensors#T0KEN' is missing", "'w.safetensors#***' is missing"),
        ("http://host:8080/models@v1/x", "http://host:8080/models@v1/x"),
        ("http://host:8080: no answer, tell ada@h", "http://host:8080: no answer, tell ada@h"),
        ("['http://h:80', 's3://b/x@y']", "['http://h:80', 's3://b/x@y']"),
        ("http://***@h:80/x?sig=***", "http://***@h:80/x?sig=***"),
        ("/models/a#1.bin: item #3 is wrong", "/models/a#1.bin: item #3 is wrong"),
        ("https://u:it's@host/x", "https://***@host/x"),
        ("s3://:secret@bucket/x", "s3://***@bucket/x"),
        ("(https://h/p?sig=a%3Ab); check", "(https://h/p?sig=***); check"),
        ("hf://gpt2@main/x and http://h:80/p", "hf://gpt2@main/x and http://h:80/p"),
        ("what? a=b", "what? a=b"),
    ],
)
def test_secrets_in_addresses_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert str(RequestError(text)) == shown
    assert SourceError("failed", file=text).file == shown


def test_a_report_has_no_secret_of_the_address(tmp_path: Path, encode: Any) -> None:
    (tmp_path / "w.safetensors").write_bytes(encode({"w": ("U8", [3000], bytes(3000))}))
    config = Config(retry=RetryConfig(first_wait_s=0.0, max_wait_s=0.0))
    gpu = Gpu(index=0, memory_bytes=1 << 30, free_bytes=1 << 30)
    topology = Topology(nodes=(Node(id="n0", gpus=(gpu,), memory_bytes=8 << 30, pool_bytes=1 << 30),))
    with RangeServer(tmp_path) as server:
        manifest = mm.inspect(f"{server.uri}/w.safetensors?sig=f00d42")
        plan = build_plan(manifest, build_demands(manifest, Parallel()), topology, config=config)
        server.faults = scripted(Fault.UNAVAILABLE)
        report = load_plan(plan, manifest, config, [HostArena(1 << 20)]).report

    assert [fault.kind for fault in report.faults] == ["chunk_retried"]
    assert "w.safetensors?sig=***" in repr(report)
    assert "f00d42" not in repr(report)
