"""Answers of web servers that no well-made server gives: none becomes wrong bytes, a wait without end, or a puzzle."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megamind_ray as mm
from megamind_ray.config import Config, IoConfig, RetryConfig
from megamind_ray.errors import IntegrityError, MegamindError, RequestError, SourceError
from megamind_ray.io.http_source import HttpSource
from megamind_ray.testing.fault_server import Answer, Request
from megamind_ray.testing.range_server import RangeServer

RETRY = RetryConfig(attempts=1, first_wait_s=0.0, max_wait_s=0.0, request_s=10.0)
# Silence is never so long here; all that takes longer is more than one byte.
IMPATIENT = RetryConfig(attempts=1, first_wait_s=0.0, max_wait_s=0.0, request_s=0.3)
BOUND_S = 30.0
DATA = bytes(range(256)) * 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    (tmp_path / "data.bin").write_bytes(DATA)
    with RangeServer(tmp_path) as server:
        yield server


def read(source: HttpSource, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def answering(server: RangeServer, answer: Callable[[Request], Answer]) -> HttpSource:
    """A file that was opened as it is, and is read with other answers."""
    source = HttpSource(f"{server.uri}/data.bin", RETRY)
    server.answer = answer
    return source


@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize(
    "value",
    [
        None,
        "octets 0-7/1024",
        "bytes 0-7",
        "bytes 0-7/1024, bytes 8-15/1024",
        "bytes=0-7/1024",
        "bytes \N{SUPERSCRIPT TWO}-7/1024",
        f"bytes 0-7/{'9' * 5000}",
    ],
)
def test_a_part_that_does_not_say_which_one_it_is_is_refused(
    server: RangeServer, offset: int, value: str | None
) -> None:
    headers = {} if value is None else {"Content-Range": value}
    source = answering(server, lambda _request: Answer(206, headers, DATA[:8]))

    with pytest.raises(RequestError, match="data.bin: the server answers with a part of the file and"):
        read(source, offset, 8)


def test_a_whole_file_as_a_part_must_say_so_too(server: RangeServer) -> None:
    source = answering(server, lambda _request: Answer(206, {}, DATA))

    with pytest.raises(RequestError, match="no Content-Range"):
        read(source, 0, len(DATA))


PARTS = b"--x\r\nContent-Range: bytes 0-7/1024\r\n\r\nweights!"


@pytest.mark.parametrize("more", [{}, {"Content-Range": f"bytes 0-{len(PARTS) - 1}/1024"}], ids=["proper", "a lie"])
def test_an_answer_of_several_parts_is_refused(server: RangeServer, more: dict[str, str]) -> None:
    headers = {"Content-Type": "Multipart/ByteRanges; boundary=x", **more}
    source = answering(server, lambda _request: Answer(206, headers, PARTS))

    with pytest.raises(RequestError, match="part of the file"):
        read(source, 0, len(PARTS))


@pytest.mark.parametrize("body", [DATA, DATA[:7]], ids=["longer", "shorter"])
def test_a_length_other_than_that_of_the_range_is_refused(server: RangeServer, body: bytes) -> None:
    source = answering(server, lambda _request: Answer(206, {"Content-Range": "bytes 0-7/1024"}, body))

    with pytest.raises(OSError, match=f"the length '{len(body)}' where 8 bytes were asked for"):
        read(source, 0, 8)


def test_a_whole_file_of_another_length_is_another_file(server: RangeServer) -> None:
    source = answering(server, lambda _request: Answer(200, {}, DATA + b"more"))

    with pytest.raises(IntegrityError, match="size in bytes was 1024, is 1028"):
        read(source, 0, len(DATA))


@pytest.mark.parametrize("status", [204, 302, 304, 400])
def test_a_status_without_bytes_is_told_with_its_address(server: RangeServer, status: int) -> None:
    source = answering(server, lambda _request: Answer(status, {}))

    with pytest.raises(RequestError, match=rf"^{server.uri}/data.bin: the server answered {status}, which"):
        read(source, 0, 8)


@contextmanager
def raw_server(pieces: Callable[[str], Iterable[bytes]]) -> Iterator[str]:
    """Sends, for each request line, some bytes, each piece when the one before has been 20 ms away; then it ends."""
    closing, threads, connections = threading.Event(), list[threading.Thread](), list[socket.socket]()

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, suppress(OSError):  # the client may have had enough
            try:
                while line := lines.readline().decode():
                    while lines.readline().strip():
                        pass
                    for piece in pieces(line):
                        connection.sendall(piece)
                        if closing.wait(0.02):
                            return
            finally:
                connection.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            while not closing.is_set():
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connections.append(connection.dup())
                threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
                threads[-1].start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/data.bin"
        finally:
            closing.set()
            listening.shutdown(socket.SHUT_RDWR)
            for connection in connections:  # the client keeps its end
                with connection, suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in [accepting, *threads]:
                thread.join(BOUND_S)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1024\r\n\r\n"
PART = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-7/1024\r\n"
CHUNKED = PART + b"Transfer-Encoding: chunked\r\n\r\n"
# At 20 ms each, far longer than the bound; then the answer is right, so that only a bound makes the test pass.
MANY = 400


def opened(get: Iterable[bytes]) -> Callable[[str], Iterable[bytes]]:
    """A server whose file can be opened, and what it says when it is read."""
    return lambda line: [HEAD] if line.startswith("HEAD") else get


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKED + b"8;", *[b"x"] * MANY, b"\r\n" + DATA[:8] + b"\r\n0\r\n\r\n"],
        [PART + b"X-Filler: ", *[b"x"] * MANY, b"\r\nContent-Length: 8\r\n\r\n" + DATA[:8]],
        [b"HTTP/1.1 ", *[b"2"] * MANY, b"\r\n\r\n"],
        [CHUNKED + b"8\r\n" + DATA[:8] + b"\r\n0\r\n", *[b"x"] * MANY, b"\r\n\r\n"],
    ],
    ids=["lengths of pieces", "head", "status line", "trailer"],
)
def test_an_answer_that_comes_a_byte_at_a_time_is_bounded_wherever_it_does(pieces: list[bytes]) -> None:
    with raw_server(opened(pieces)) as uri:
        source = HttpSource(uri, IMPATIENT)

        with pytest.raises(OSError, match="ReadTimeoutError"):
            read(source, 0, 8)


def test_the_head_of_an_answer_is_bounded_when_a_file_is_opened() -> None:
    answer = [b"HTTP/1.1 200 OK\r\nX: ", *[b"x"] * MANY, b"\r\n\r\n"]

    with raw_server(lambda _line: answer) as uri, pytest.raises(OSError, match="ReadTimeoutError"):
        HttpSource(uri, IMPATIENT)


def test_a_body_without_a_length_is_read_to_its_end() -> None:
    with raw_server(opened([CHUNKED + b"5\r\n" + DATA[:5], b"\r\n3\r\n" + DATA[5:8] + b"\r\n0\r\n\r\n"])) as uri:
        assert read(HttpSource(uri, RETRY), 0, 8) == DATA[:8]


def test_a_body_without_a_length_that_goes_on_is_refused() -> None:
    with raw_server(opened([CHUNKED + b"9\r\n" + DATA[:9] + b"\r\n0\r\n\r\n"])) as uri:
        source = HttpSource(uri, RETRY)

        with pytest.raises(OSError, match="goes on after the 8 bytes at offset 0"):
            read(source, 0, 8)


@pytest.mark.parametrize("length", ["\xb2", "9" * 5000, "-1", "+5", "1_0", "many"])
def test_a_length_that_is_no_number_is_asked_for_with_a_range(length: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: " + length.encode("latin-1") + b"\r\nConnection: close\r\n\r\n"
    first = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-0/1024\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx"

    with raw_server(lambda line: [head] if line.startswith("HEAD") else [first]) as uri:
        assert HttpSource(uri, RETRY).size_bytes == 1024


def test_a_connection_that_ends_without_an_answer_is_told_in_words() -> None:
    def hang_up(_line: str) -> Iterable[bytes]:
        raise OSError

    with (
        raw_server(hang_up) as uri,
        pytest.raises(OSError, match=r"^ProtocolError: Connection aborted, RemoteDisconnected: Remote end closed"),
    ):
        HttpSource(uri, RETRY)


@pytest.mark.parametrize("user", ["u:s3c/ret", "u:s3cret ", "u:?s3cret", "u:#s3cret", "u:[s3cret"])
def test_a_password_that_makes_an_address_unreadable_is_not_told(user: str) -> None:
    with pytest.raises(MegamindError) as caught:
        mm.inspect(f"http://{user}@127.0.0.1:9/w.safetensors", config=Config(retry=RETRY))

    assert "s3c" not in str(caught.value)


def test_an_address_that_cannot_be_read_says_how_to_write_a_password() -> None:
    with pytest.raises(RequestError, match=r"http://\*\*\*@host/w: is no address of the web; .*/ is %2F"):
        HttpSource("http://u:s3c/ret@host/w", RETRY)


def checkpoint(folder: Path, encode: Any) -> list[str]:
    """Three files with an index, a configuration and recorded checksums; the names of all."""
    weight_map = {}
    for number in range(3):
        path = f"model-{number}.safetensors"
        (folder / path).write_bytes(encode({f"w{number}": ("U8", [300_000], np.random.default_rng(0).bytes(300_000))}))
        weight_map[f"w{number}"] = path
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("validators", [True, False])
def test_a_load_asks_for_the_state_of_a_file_twice_at_most(tmp_path: Path, encode: Any, validators: bool) -> None:
    checkpoint(tmp_path, encode)
    config = Config(io=IoConfig(chunk_bytes=64 << 10, extent_bytes=64 << 10))
    with RangeServer(tmp_path, validators=validators) as server:
        loaded = mm.load_state_dict(server.uri, config=config)

        assert len(loaded) == 3
        heads = Counter(request.path for request in server.asked if request.method == "HEAD")
        gets = Counter(request.path for request in server.asked if request.method == "GET")
    assert gets["/model-0.safetensors"] > 5
    # The one file more is the sidecar, which is not there.
    assert len(heads) == 6
    assert max(heads.values()) <= 2


def test_a_missing_answer_is_a_source_error_after_the_attempts(server: RangeServer) -> None:
    server.answer = lambda _request: Answer(503, {"Retry-After": "9" * 400})

    with pytest.raises(SourceError, match="answered 503"):
        mm.inspect(f"{server.uri}/data.bin", config=Config(retry=RETRY))
