"""A web server that misbehaves on demand, and the same as a proxy in front of another server.

What it answers comes from a subclass (files of a folder in ``range_server``) or from another server (``FaultProxy``);
on the way out each answer can be damaged as a schedule says.
"""

from __future__ import annotations

import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

__all__ = [
    "Answer",
    "Fault",
    "FaultProxy",
    "FaultServer",
    "Request",
    "Schedule",
    "parse_range",
    "scripted",
    "seeded",
]

_HOLD_BOUND_S: Final = 60.0
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")
_LINGER_OFF: Final = struct.pack("ii", 1, 0)
_SHIFT_BYTES: Final = 64
_SEND_BYTES: Final = 1 << 20
_DRIP_S: Final = 0.02


class Fault(Enum):
    """What goes wrong with one answer."""

    RESET = "the connection is reset in the middle of the body"
    STALL = "half of the body comes, then nothing more"
    TRUNCATED = "half of the body comes, then the connection ends"
    SHORT_RANGE = "half of the range is given, and said so"
    WRONG_RANGE = "bytes of another offset, and the same number of them"
    SLOW_START = "the answer begins late"
    DRIP = "the body comes a byte at a time, never silent for long"
    TOO_MANY = "429 with Retry-After"
    BROKEN = "500"
    UNAVAILABLE = "503"


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for.

    Attributes:
        method: ``GET``, ``HEAD``, ...
        path: As in the request line, with the query.
        headers: By name in lower case.
        body: Empty without one.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server says when nothing goes wrong; ``Content-Length`` is added from the body.

    Attributes:
        status: HTTP status.
        headers: Without ``Content-Length``, unless the answer is to a ``HEAD``.
        body: Empty for a ``HEAD``.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


Schedule = Callable[[Request], Fault | None]


def scripted(*faults: Fault | None, methods: Sequence[str] = ("GET",)) -> Schedule:
    """The first requests of these methods meet these faults, one each, in this order; all later ones are well."""
    left = list(faults)
    lock = threading.Lock()

    def choose(request: Request) -> Fault | None:
        with lock:
            return left.pop(0) if left and request.method in methods else None

    return choose


def seeded(seed: int, share: float, faults: Iterable[Fault] = tuple(Fault)) -> Schedule:
    """A share of all ``GET`` and ``HEAD`` requests meets a fault, by a random sequence of its own."""
    generator, kinds = random.Random(seed), list(faults)
    lock = threading.Lock()

    def choose(request: Request) -> Fault | None:
        if request.method not in ("GET", "HEAD"):
            return None
        with lock:
            return generator.choice(kinds) if generator.random() < share else None

    return choose


class FaultServer:
    """Serves on loopback until it is closed.

    Attributes:
        num_requests: Requests so far.
        num_connections: Connections so far.
        bytes_sent: Bytes of bodies sent so far.
        given: How often each fault was given.
        faults: The schedule; may be exchanged at any time, None for none.
        asked: The requests so far, without their bodies.

    Args:
        answer: What to say to a request.
        faults: What goes wrong.
        slow_s: How late ``SLOW_START`` begins.
        retry_after: What ``TOO_MANY`` says.
    """

    def __init__(
        self,
        answer: Callable[[Request], Answer],
        *,
        faults: Schedule | None = None,
        slow_s: float = 0.1,
        retry_after: str = "0",
    ) -> None:
        self.answer = answer
        self.faults = faults
        self.slow_s = slow_s
        self.retry_after = retry_after
        self.num_requests = self.num_connections = 0
        self.bytes_sent = 0
        self.given: Counter[Fault] = Counter()
        self.asked: list[Request] = []
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def uri(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Ends it, and every answer that it holds back."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def next_fault(self, request: Request) -> Fault | None:
        """Counts a request and says what is to go wrong with it."""
        fault = None if self.faults is None else self.faults(request)
        with self._lock:
            self.num_requests += 1
            self.asked.append(replace(request, body=b""))
            if fault is not None:
                self.given[fault] += 1
        return fault

    def count_connection(self) -> None:
        """Counts a connection."""
        with self._lock:
            self.num_connections += 1

    def count_sent(self, num_bytes: int) -> None:
        """Counts bytes of a body."""
        with self._lock:
            self.bytes_sent += num_bytes

    def hold(self, seconds: float = _HOLD_BOUND_S) -> bool:
        """Waits; True at once when the server is closed meanwhile."""
        return self._closing.wait(seconds)


class FaultProxy(FaultServer):
    """Passes requests on to another server, and its answers back, damaged as the schedule says.

    Args:
        upstream: Address of the other server, ``http://HOST:PORT``.
        faults: What goes wrong.
        slow_s: How late ``SLOW_START`` begins.
        retry_after: What ``TOO_MANY`` says.
    """

    def __init__(
        self, upstream: str, *, faults: Schedule | None = None, slow_s: float = 0.1, retry_after: str = "0"
    ) -> None:
        self._upstream = urlsplit(upstream)
        super().__init__(self._pass_on, faults=faults, slow_s=slow_s, retry_after=retry_after)

    def _pass_on(self, request: Request) -> Answer:
        assert self._upstream.hostname is not None
        connection = HTTPConnection(self._upstream.hostname, self._upstream.port, timeout=_HOLD_BOUND_S)
        try:
            headers = {name: value for name, value in request.headers.items() if name not in ("connection", "expect")}
            connection.request(request.method, request.path, request.body or None, headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        hop_by_hop = ("connection", "keep-alive", "transfer-encoding", "date", "server")
        kept = {name: value for name, value in response.getheaders() if name.lower() not in hop_by_hop}
        if request.method != "HEAD":
            kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
        return Answer(response.status, kept, body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, owner: FaultServer) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, *_arguments: object) -> None:
        """A client that gave up is what these tests are about."""

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Ends a connection; one that is to be reset without a word of farewell, which would look like an end."""
        assert isinstance(request, socket.socket)
        if request.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(_LINGER_OFF)) == _LINGER_OFF:
            request.close()
        else:
            super().shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    # Head and body in one packet: sent apart, each answer would wait 40 ms for the client's delayed ACK.
    wbufsize = -1
    disable_nagle_algorithm = True

    def setup(self) -> None:
        self.server.owner.count_connection()
        super().setup()

    def handle_expect_100(self) -> bool:
        granted = super().handle_expect_100()
        self.wfile.flush()  # the client waits for it
        return granted

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body)
        fault = self.server.owner.next_fault(request)
        if fault is Fault.SLOW_START:
            self.server.owner.hold(self.server.owner.slow_s)
        refusal = _refusal(fault, self.server.owner.retry_after)
        if refusal is not None:
            self._send(refusal, refusal.body)
            return
        if fault in (Fault.WRONG_RANGE, Fault.SHORT_RANGE):
            request = _other_range(request, fault)
        answer = self.server.owner.answer(request)
        if fault in (Fault.RESET, Fault.STALL, Fault.TRUNCATED):
            self._break_off(answer, fault)
        elif fault is Fault.DRIP:
            self._drip(answer)
        else:
            self._send(answer, answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _send(self, answer: Answer, body: bytes) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.owner.count_sent(len(body))
        for begin in range(0, len(body), _SEND_BYTES):
            self.wfile.write(body[begin : begin + _SEND_BYTES])

    def _drip(self, answer: Answer) -> None:
        self._send(answer, b"")
        for value in answer.body:
            if self.server.owner.hold(_DRIP_S):
                return
            self.server.owner.count_sent(1)
            self.wfile.write(bytes([value]))
            self.wfile.flush()

    def _break_off(self, answer: Answer, fault: Fault) -> None:
        """Half of the answer, or nothing at all of one that has no body."""
        self.close_connection = True
        if answer.body:
            self._send(answer, answer.body[: len(answer.body) // 2])
            self.wfile.flush()
        if fault is Fault.STALL:
            self.server.owner.hold()
        if fault is Fault.RESET:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_OFF)
        else:
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_arguments: object) -> None:
        return


def _refusal(fault: Fault | None, retry_after: str) -> Answer | None:
    if fault is Fault.TOO_MANY:
        return Answer(429, {"Retry-After": retry_after}, b"slow down")
    if fault is Fault.BROKEN:
        return Answer(500, {}, b"broken")
    if fault is Fault.UNAVAILABLE:
        return Answer(503, {}, b"not now")
    return None


def parse_range(value: str) -> tuple[int, int | None] | None:
    """Begin and end (one past the last byte; None to the end of the file) of a ``Range`` header; None without one."""
    match = _RANGE.fullmatch(value)
    return (int(match[1]), int(match[2]) + 1 if match[2] else None) if match else None


def _other_range(request: Request, fault: Fault) -> Request:
    """The request for another range than the one that was asked for; unchanged without a range."""
    asked = parse_range(request.headers.get("range", ""))
    if asked is None or asked[1] is None:
        return request
    begin, end = asked[0], asked[1]
    if fault is Fault.SHORT_RANGE:
        end -= (end - begin) // 2
    else:
        shift = -_SHIFT_BYTES if begin >= _SHIFT_BYTES else _SHIFT_BYTES
        begin, end = begin + shift, end + shift
    return replace(request, headers={**request.headers, "range": f"bytes={begin}-{end - 1}"})
