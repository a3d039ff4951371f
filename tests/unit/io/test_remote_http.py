"""Files on web servers, read by ranges from a server that misbehaves when told to."""

import base64
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megamind_ray.config import RetryConfig
from megamind_ray.errors import IntegrityError, MegamindError, RequestError, SourceError
from megamind_ray.io import ReadCounters, crc32, open_manifest, read_with_retry
from megamind_ray.io.failures import BusyError, retry_after_s
from megamind_ray.io.http_source import HttpSource
from megamind_ray.testing.fault_server import Answer, Fault, FaultServer, Request, scripted
from megamind_ray.testing.range_server import RangeServer

# Patient, so that a busy machine is not taken for a fault of the server's; where silence is the fault, less so.
RETRY = RetryConfig(attempts=3, first_wait_s=0.01, max_wait_s=0.02, request_s=10.0)
IMPATIENT = replace(RETRY, request_s=0.4)


LASTING = [fault for fault in Fault if fault not in (Fault.SLOW_START, Fault.DRIP)]


def retry_for(fault: Fault | None) -> RetryConfig:
    return IMPATIENT if fault in (Fault.STALL, Fault.DRIP) else RETRY


DATA = np.random.default_rng(0).bytes(3_000_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.bin").write_bytes(DATA)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[RangeServer]:
    with RangeServer(folder) as server:
        yield server


@pytest.fixture
def source(server: RangeServer) -> HttpSource:
    return open_file(server)


def open_file(server: FaultServer, retry: RetryConfig = RETRY) -> HttpSource:
    return HttpSource(f"{server.uri}/data.bin", retry)


def read(source: HttpSource, offset: int, size: int) -> bytes:
    """With retries, as the engine reads."""
    buffer = bytearray(size)
    read_with_retry(source, offset, memoryview(buffer), RETRY, ReadCounters())
    return bytes(buffer)


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (5, 2_000_000), (2_999_999, 1), (0, 3_000_000), (7, 0)])
def test_a_range_is_read(source: HttpSource, offset: int, size: int) -> None:
    assert source.size_bytes == len(DATA)
    assert read(source, offset, size) == DATA[offset : offset + size]


def test_a_range_is_summed_on_the_way(source: HttpSource) -> None:
    buffer = memoryview(bytearray(1_000_000))

    assert source.read_summed(10, buffer) == crc32(DATA[10:1_000_010])
    assert buffer == DATA[10:1_000_010]


def test_a_range_is_one_request_and_no_bytes_more(server: RangeServer, source: HttpSource) -> None:
    num_requests, bytes_sent = server.num_requests, server.bytes_sent

    read(source, 100, 1_000_000)

    assert (server.num_requests - num_requests, server.bytes_sent - bytes_sent) == (1, 1_000_000)


def test_threads_read_at_a_time(source: HttpSource) -> None:
    parts: dict[int, bytes] = {}

    def take(begin: int) -> None:
        parts[begin] = read(source, begin, 100_000)

    threads = [threading.Thread(target=take, args=(begin,)) for begin in range(0, len(DATA), 100_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert b"".join(parts[begin] for begin in sorted(parts)) == DATA


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name)
def test_a_fault_is_made_good_by_the_next_attempt(server: RangeServer, fault: Fault) -> None:
    source = open_file(server, retry_for(fault))
    server.faults = scripted(fault)
    num_requests = server.num_requests

    assert read(source, 1000, 20_000) == DATA[1000:21_000]
    assert server.given[fault] == 1
    assert server.num_requests - num_requests == (1 if fault is Fault.SLOW_START else 2)


@pytest.mark.parametrize("fault", LASTING, ids=lambda fault: fault.name)
def test_a_lasting_fault_is_a_source_error_after_all_attempts(server: RangeServer, fault: Fault) -> None:
    source = open_file(server, retry_for(fault))
    server.faults = lambda _request: fault
    num_requests = server.num_requests

    with pytest.raises(SourceError, match=r"reading bytes \[1000, 21000\) failed 3 times, last with: ") as caught:
        read(source, 1000, 20_000)

    assert caught.value.attempts == 3
    assert server.num_requests - num_requests == 3


def test_a_first_byte_later_than_the_bound_is_a_timeout(folder: Path) -> None:
    with RangeServer(folder, slow_s=60.0) as server:
        source = open_file(server, IMPATIENT)
        server.faults = scripted(Fault.SLOW_START)

        with pytest.raises(OSError, match="ReadTimeoutError: Read timed out"):
            source.read_into(0, memoryview(bytearray(8)))


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.STALL, Fault.TOO_MANY, Fault.UNAVAILABLE], ids=lambda it: it.name)
def test_opening_meets_a_fault(server: RangeServer, fault: Fault) -> None:
    server.faults = scripted(fault, methods=("HEAD",))
    with pytest.raises(OSError, match="answered|Error"):
        open_file(server, retry_for(fault))

    assert open_file(server).size_bytes == len(DATA)


def test_a_busy_server_says_when_to_come_again(folder: Path) -> None:
    with RangeServer(folder, retry_after="7") as server:
        source = open_file(server)
        server.faults = scripted(Fault.TOO_MANY)

        with pytest.raises(BusyError, match="answered 429") as caught:
            source.read_into(0, memoryview(bytearray(8)))

    assert caught.value.retry_after_s == 7.0


def test_what_a_busy_server_asks_for_is_waited_up_to_the_longest_wait(folder: Path) -> None:
    waits: list[float] = []
    with RangeServer(folder, retry_after="1") as server:
        source = open_file(server)
        for longest in (5.0, 0.5):
            server.faults = scripted(Fault.TOO_MANY)
            retry = RetryConfig(attempts=2, first_wait_s=0.1, max_wait_s=longest)
            buffer = memoryview(bytearray(8))
            read_with_retry(source, 0, buffer, retry, ReadCounters(), sleep=waits.append, uniform=lambda: 1.0)

    assert waits == pytest.approx([1.1, 0.5])


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        ("-1", 0.0),
        ("Thu, 01 Jan 1970 00:00:02 GMT", 0.0),
        ("soon", None),
        ("", None),
        (None, None),
        ("999999", 86400.0),
        ("9" * 5000, 86400.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86400.0),
        ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", None),
    ],
)
def test_forms_of_retry_after(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (404, "no such file or folder"),
        (410, "no such file or folder"),
        (401, "no permission to read it"),
        (403, "no permission to read it"),
        (400, "answered 400, which another attempt will not change"),
    ],
)
def test_what_another_attempt_cannot_help_is_asked_once(
    server: RangeServer, source: HttpSource, status: int, text: str
) -> None:
    server.answer = lambda _request: Answer(status, {})
    num_requests = server.num_requests

    with pytest.raises(RequestError, match=text):
        read(source, 0, 8)

    assert server.num_requests - num_requests == 1


def test_a_server_without_byte_ranges_is_a_request_error_and_its_file_is_not_fetched(folder: Path) -> None:
    with RangeServer(folder, ranges=False) as server:
        source = open_file(server)
        with pytest.raises(RequestError, match="does not serve byte ranges"):
            read(source, 0, 8)

        assert server.num_requests == 2


def test_a_whole_file_is_right_where_a_whole_file_was_asked_for(folder: Path) -> None:
    with RangeServer(folder, ranges=False) as server:
        assert read(open_file(server), 0, len(DATA)) == DATA


def test_a_file_that_is_replaced_fails_the_next_read(folder: Path, source: HttpSource) -> None:
    read(source, 0, 8)
    (folder / "data.bin").write_bytes(DATA[::-1])

    with pytest.raises(IntegrityError, match="changed while it was read"):
        read(source, 0, 8)


def test_a_file_that_shrank_is_an_integrity_error(folder: Path, source: HttpSource) -> None:
    (folder / "data.bin").write_bytes(DATA[:10])

    with pytest.raises(IntegrityError, match=r"changed while it was read \(size in bytes was 3000000, is 10"):
        read(source, 1000, 8)


def test_a_range_inside_the_file_that_is_refused_is_asked_again(server: RangeServer, source: HttpSource) -> None:
    files, refusals = server.answer, [Answer(416, {"Content-Range": f"bytes */{len(DATA)}"})]
    server.answer = lambda it: refusals.pop() if refusals and it.method == "GET" else files(it)

    assert read(source, 1000, 8) == DATA[1000:1008]


def test_answers_that_carry_the_version_need_no_check_of_their_own(server: RangeServer, source: HttpSource) -> None:
    read(source, 0, 8)
    num_requests = server.num_requests

    source.check_unchanged()

    assert server.num_requests == num_requests


def test_a_change_before_the_first_read_is_seen_by_the_check(folder: Path, source: HttpSource) -> None:
    (folder / "data.bin").write_bytes(DATA[:-1])

    with pytest.raises(IntegrityError, match="changed while it was read"):
        source.check_unchanged()


def test_answers_without_the_version_that_was_opened_make_the_check_ask(folder: Path) -> None:
    with RangeServer(folder) as server:
        source, files = open_file(server), server.answer

        def silent(request: Request) -> Answer:
            answer = files(request)
            kept = {name: value for name, value in answer.headers.items() if name != "ETag" or request.method == "HEAD"}
            return Answer(answer.status, kept, answer.body)

        server.answer = silent
        read(source, 0, 8)
        (folder / "data.bin").write_bytes(DATA[::-1])

        with pytest.raises(IntegrityError, match="etag was"):
            source.check_unchanged()


def test_where_nothing_but_the_size_is_known_each_answer_tells_it_and_the_check_asks_nothing(folder: Path) -> None:
    with RangeServer(folder, validators=False) as server:
        source = open_file(server)
        read(source, 0, 8)
        num_requests = server.num_requests

        source.check_unchanged()

        assert server.num_requests == num_requests
        (folder / "data.bin").write_bytes(DATA[:-1])
        with pytest.raises(IntegrityError, match="size in bytes was 3000000, is 2999999"):
            read(source, 0, 8)


def test_a_check_meets_a_server_that_is_silent(folder: Path) -> None:
    with RangeServer(folder, validators=False) as server:
        source = open_file(server, IMPATIENT)
        server.faults = scripted(Fault.STALL, methods=("HEAD",))

        with pytest.raises(OSError, match="ReadTimeoutError"):
            source.check_unchanged()


def test_a_server_that_refuses_head_is_asked_by_a_range(folder: Path) -> None:
    with RangeServer(folder) as server:
        files = server.answer
        server.answer = lambda request: Answer(403, {}) if request.method == "HEAD" else files(request)

        assert open_file(server).size_bytes == len(DATA)
        assert server.bytes_sent == 1


def test_an_empty_file_by_a_server_that_refuses_head(folder: Path) -> None:
    (folder / "empty.bin").touch()

    def answer(request: Request) -> Answer:
        return Answer(405, {}) if request.method == "HEAD" else Answer(416, {"Content-Range": "bytes */0"})

    with FaultServer(answer) as server:
        assert HttpSource(f"{server.uri}/empty.bin", RETRY).size_bytes == 0


def test_a_compressed_answer_is_refused(server: RangeServer, source: HttpSource) -> None:
    files = server.answer

    def compressed(request: Request) -> Answer:
        answer = files(request)
        return Answer(answer.status, {**answer.headers, "Content-Encoding": "gzip"}, answer.body)

    server.answer = compressed
    with pytest.raises(RequestError, match="comes compressed"):
        read(source, 0, 8)


def redirecting(target: Callable[[], str]) -> Callable[[Request], Answer]:
    return lambda _request: Answer(302, {"Location": target()})


def test_reads_go_to_the_end_of_redirects_directly(server: RangeServer) -> None:
    with FaultServer(redirecting(lambda: f"{server.uri}/data.bin")) as door:
        source = HttpSource(f"{door.uri}/data", RETRY)
        for offset in (0, 1000):
            assert read(source, offset, 8) == DATA[offset : offset + 8]

        assert door.num_requests == 1


def test_an_end_that_expired_is_asked_for_again(server: RangeServer, folder: Path) -> None:
    names = iter(["data.bin", "data.bin?second", "unused"])
    with FaultServer(redirecting(lambda: f"{server.uri}/{next(names)}")) as door:
        source = HttpSource(f"{door.uri}/data", RETRY)
        files = server.answer
        server.answer = lambda request: files(request) if request.path.endswith("?second") else Answer(403, {})

        assert read(source, 5, 8) == DATA[5:13]
        assert read(source, 50, 8) == DATA[50:58]
        assert door.num_requests == 2


def test_user_and_password_go_to_their_server_alone(server: RangeServer) -> None:
    with FaultServer(redirecting(lambda: f"{server.uri}/data.bin")) as door:
        HttpSource(door.uri.replace("://", "://ada:p%40ss@") + "/data", RETRY)

        assert door.asked[0].headers["authorization"] == "Basic " + base64.b64encode(b"ada:p@ss").decode()
        assert all("authorization" not in request.headers for request in server.asked)


def test_user_and_password_go_to_another_address_of_their_server(server: RangeServer) -> None:
    files = server.answer

    def guarded(request: Request) -> Answer:
        if "authorization" not in request.headers:
            return Answer(401, {})
        return Answer(302, {"Location": "/data.bin"}) if request.path == "/latest" else files(request)

    server.answer = guarded
    source = HttpSource(server.uri.replace("://", "://ada:pw@") + "/latest", RETRY)
    num_requests = server.num_requests
    for offset in (0, 1000, 2000):
        assert read(source, offset, 8) == DATA[offset : offset + 8]

    assert server.num_requests - num_requests == 3


@pytest.mark.parametrize("location", ["/data.bin?next=http://elsewhere/x", "data.bin", "//{host}/data.bin"])
def test_a_redirect_may_be_relative(server: RangeServer, location: str) -> None:
    files, target = server.answer, location.format(host=server.uri.removeprefix("http://"))
    server.answer = lambda it: Answer(302, {"Location": target}) if it.path == "/data" else files(it)
    source = HttpSource(f"{server.uri}/data", RETRY)
    num_requests = server.num_requests

    assert read(source, 5, 8) == DATA[5:13]
    assert server.num_requests - num_requests == 1


def test_a_redirect_may_be_relative_to_the_one_before(server: RangeServer) -> None:
    files = server.answer
    server.answer = lambda it: Answer(307, {"Location": "data.bin"}) if it.path == "/hop" else files(it)
    with FaultServer(redirecting(lambda: f"{server.uri}/hop")) as door:
        source = HttpSource(f"{door.uri}/data", RETRY)
        num_requests = server.num_requests

        assert read(source, 5, 8) == DATA[5:13]
        assert (door.num_requests, server.num_requests - num_requests) == (1, 1)


@pytest.mark.parametrize("answer", [Answer(403, {}), Answer(401, {})], ids=["403", "401"])
def test_an_index_that_is_refused_is_none(tmp_path: Path, encode: Any, answer: Answer) -> None:
    (tmp_path / "model.safetensors").write_bytes(encode({"w": ("U8", [3], b"abc")}))
    with RangeServer(tmp_path) as server:
        files = server.answer
        server.answer = lambda it: files(it) if it.path.endswith("/model.safetensors") else answer

        assert list(open_manifest(server.uri, retry=RETRY).tensors) == ["w"]


def test_a_folder_of_which_all_is_refused_asks_for_credentials() -> None:
    with (
        FaultServer(lambda _request: Answer(401, {})) as server,
        pytest.raises(RequestError, match=r"model\.safetensors: no permission to read it .*give credentials"),
    ):
        open_manifest(f"{server.uri}/model", retry=RETRY)


def test_the_proxy_of_the_environment_is_used(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.uri)
    monkeypatch.delenv("no_proxy", raising=False)

    assert HttpSource("http://models.invalid/data.bin", RETRY).size_bytes == len(DATA)
    assert server.asked[0].path == "http://models.invalid/data.bin"


class TestSecrets:
    """Whatever goes wrong, messages have neither passwords nor signatures."""

    def messages(self, error: BaseException) -> str:
        chain: list[BaseException] = []
        last: BaseException | None = error
        while last is not None:
            chain.append(last)
            last = last.__cause__
        return " ".join(f"{it} {it!r} {getattr(it, 'file', '')}" for it in chain)

    @pytest.mark.parametrize("fault", [None, Fault.RESET, Fault.STALL, Fault.WRONG_RANGE, Fault.UNAVAILABLE])
    def test_of_a_signed_address(self, server: RangeServer, fault: Fault | None) -> None:
        host = server.uri.removeprefix("http://")
        server.faults = None if fault is None else lambda _request: fault
        name = "missing.safetensors" if fault is None else "data.bin"

        with pytest.raises(MegamindError) as caught:
            open_manifest(f"http://ada:topsecret@{host}/{name}?X-Amz-Signature=f00d42&key=v", retry=retry_for(fault))

        text = self.messages(caught.value)
        assert name in text
        assert "topsecret" not in text
        assert "f00d42" not in text

    def test_of_a_server_that_cannot_be_reached(self) -> None:
        with pytest.raises(SourceError) as caught:
            open_manifest("http://ada:topsecret@127.0.0.1:9/w.safetensors?sig=f00d42", retry=RETRY)

        text = self.messages(caught.value)
        assert "http://***@127.0.0.1:9/w.safetensors?sig=***" in text
        assert "topsecret" not in text
        assert "f00d42" not in text

    def test_of_the_address_that_a_redirect_leads_to(
        self, server: RangeServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        with FaultServer(redirecting(lambda: f"{server.uri}/data.bin?X-Amz-Signature=f00d42&x=1")) as door:
            read(HttpSource(f"{door.uri}/data?token=topsecret", RETRY), 0, 8)

        assert "data.bin?X-Amz-Signature=***&x=***" in caplog.text
        assert "f00d42" not in caplog.text
        assert "topsecret" not in caplog.text


@pytest.mark.parametrize("place", ["", "Llama-3.1-8B", "v1.0/model"])
def test_a_folder_may_have_any_name(tmp_path: Path, encode: Any, place: str) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "model.safetensors").write_bytes(encode({"w": ("U8", [3], b"abc")}))
    with RangeServer(tmp_path) as server:
        assert list(open_manifest(f"{server.uri}/{place}").tensors) == ["w"]


def test_connections_are_kept(server: RangeServer, source: HttpSource) -> None:
    for offset in range(0, 1000, 100):
        read(source, offset, 100)

    assert server.num_requests == 11
    assert server.num_connections == 1
