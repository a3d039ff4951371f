"""A web server of files that sends no faster than it is told, counts what it sends, and holds back when told to.

Storage whose limits are known exactly. It runs in a process of its own, and a command can be put before that: one that
enters a network namespace, for example. It ends with its standard input, so that it never outlives who started it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

from megamind_ray.testing.fault_server import parse_range

__all__ = ["RatedServer", "Rates", "Sent", "Served"]

_PIECE_BYTES: Final = 256 << 10
_BOUND_S: Final = 30.0
_BURST_S: Final = 0.02  # what a thread that comes late to its turn may catch up on


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the server can do; None: no limit.

    Attributes:
        bytes_per_s: Bodies, all connections together.
        latency_s: From a request to its first byte.
        request_bytes_per_s: The body of one request.
        requests_per_s: Requests for bodies, all connections together.
    """

    bytes_per_s: float | None = None
    latency_s: float = 0.0
    request_bytes_per_s: float | None = None
    requests_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """The body of one answer, as far as it was sent.

    Attributes:
        client: Address that asked.
        path: File, relative to the folder.
        begin: Offset in the file.
        end: One past the last byte that was sent.
    """

    client: str
    path: str
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Served:
    """What a server has done so far.

    Attributes:
        num_requests: Of any kind, those in the middle of their answer included.
        bytes_sent: Bytes of bodies, those of answers in their middle included.
        sent: Finished answers with a body, in the order of their ends.
    """

    num_requests: int
    bytes_sent: int
    sent: tuple[Sent, ...]

    def bytes_by_client(self) -> dict[str, int]:
        """Bytes of finished answers by the address that asked."""
        found: Counter[str] = Counter()
        for one in self.sent:
            found[one.client] += one.num_bytes
        return dict(found)


class RatedServer:
    """Serves the files of a folder, with ETag and byte ranges, until it is closed.

    Attributes:
        uri: Where it listens; a file's path in the folder follows.

    Args:
        folder: What to serve.
        rates: How fast.
        address: What to listen on.
        before: Command to put before the server's own, as one that enters a namespace.
    """

    def __init__(
        self, folder: Path, rates: Rates | None = None, *, address: str = "127.0.0.1", before: Sequence[str] = ()
    ) -> None:
        """Starts it.

        Raises:
            RuntimeError: It does not start within 30 s.
        """
        self._lock = threading.Lock()
        options = json.dumps(asdict(rates or Rates()))
        command = [*before, sys.executable, "-m", __name__, str(folder.resolve()), address, options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            self.uri = str(self._answer(_BOUND_S))
        except BaseException:
            self.close()
            raise

    def served(self) -> Served:
        """What it has done so far."""
        num_requests, bytes_sent, sent = self._ask("served")
        return Served(num_requests, bytes_sent, tuple(Sent(*one) for one in sent))

    def hold_after(self, num_bytes: int) -> None:
        """Holds all bodies back once so many bytes of them were sent in all, until ``release``."""
        self._ask("hold_after", num_bytes)

    def release(self) -> None:
        """Lets what is held back go, and holds no more."""
        self._ask("release")

    def throttle(self, client: str, bytes_per_s: float | None) -> None:
        """Sends one client, by its address, no more than this, all its connections together; None: as all others."""
        self._ask("throttle", client, bytes_per_s)

    def wait_until_holding(self, timeout_s: float = _BOUND_S) -> bool:
        """Waits until a body is held back; False if none was in that time."""
        return bool(self._ask("wait_until_holding", timeout_s, bound_s=timeout_s + _BOUND_S))

    def close(self) -> None:
        """Ends it at once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Its process is behind those of the command before it: it sees the end of its standard input.
        self._process.stdin.close()
        try:
            self._process.wait(_BOUND_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, *question: Any, bound_s: float = _BOUND_S) -> Any:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return self._answer(bound_s)

    def _answer(self, bound_s: float) -> Any:
        assert self._process.stdout is not None
        # One line an answer, and one answer at a time: nothing stays in the buffer between them.
        ready, _, _ = select.select([self._process.stdout], [], [], bound_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the server does not answer within {bound_s:g} s; its errors are on standard error")
        return json.loads(line)


class _Pace:
    """Says when the next piece may go, so that all who ask keep the rate together; unused time is lost soon."""

    def __init__(self, per_s: float | None) -> None:
        self._per_s = per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def wait(self, amount: float) -> None:
        if self._per_s is None:
            return
        with self._lock:
            earliest_s = time.perf_counter() - _BURST_S
            self._free_s = max(self._free_s, earliest_s) + amount / self._per_s
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.perf_counter()))


class _Gate:
    """Counts what goes out, and closes once it was so much."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._granted_bytes = 0
        self._limit_bytes: int | None = None
        self._holding = False
        self.num_requests = 0
        self.bytes_sent = 0
        self.sent: list[Sent] = []

    def pass_through(self, num_bytes: int) -> None:
        with self._changed:
            while self._limit_bytes is not None and self._granted_bytes + num_bytes > self._limit_bytes:
                self._holding = True
                self._changed.notify_all()
                self._changed.wait(_BOUND_S)
            self._granted_bytes += num_bytes

    def limit(self, num_bytes: int | None) -> None:
        with self._changed:
            self._limit_bytes, self._holding = num_bytes, False
            self._changed.notify_all()

    def wait_until_holding(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._holding, timeout_s)

    def count_request(self) -> None:
        with self._changed:
            self.num_requests += 1

    def count_piece(self, num_bytes: int) -> None:
        with self._changed:
            self.bytes_sent += num_bytes

    def count_answer(self, sent: Sent) -> None:
        with self._changed:
            self.sent.append(sent)

    def served(self) -> tuple[int, int, list[tuple[str, str, int, int]]]:
        with self._changed:
            return self.num_requests, self.bytes_sent, [astuple(one) for one in self.sent]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, address: str, rates: Rates) -> None:
        super().__init__((address, 0), _Handler)
        self.folder, self.rates, self.gate = folder.resolve(), rates, _Gate()
        self.throttled: dict[str, _Pace] = {}
        self.pace, self.requests = _Pace(rates.bytes_per_s), _Pace(rates.requests_per_s)

    def handle_error(self, *_arguments: object) -> None:
        """Clients that give up or die are what tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _answer(self, *, body: bool) -> None:
        self.server.gate.count_request()
        path = (self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")).resolve()
        if not path.is_file() or not path.is_relative_to(self.server.folder):
            self.send_error(404)
            return
        status = path.stat()
        size = status.st_size
        asked = parse_range(self.headers.get("Range", ""))
        begin = 0 if asked is None else asked[0]
        end = size if asked is None or asked[1] is None else min(asked[1], size)
        if begin >= end and size:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if body:
            self.server.requests.wait(1)
            time.sleep(self.server.rates.latency_s)
        self.send_response(200 if asked is None else 206)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{size}-{status.st_mtime_ns}"')
        if asked is not None:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        if body:
            self._send(path, begin, end)

    def _send(self, path: Path, begin: int, end: int) -> None:
        self.wfile.flush()
        at, alone = begin, _Pace(self.server.rates.request_bytes_per_s)
        try:
            with path.open("rb") as file:
                while at < end:
                    count = min(_PIECE_BYTES, end - at)
                    self.server.gate.pass_through(count)
                    if (own := self.server.throttled.get(self.client_address[0])) is not None:
                        own.wait(count)
                    alone.wait(count)
                    self.server.pace.wait(count)
                    while count:
                        sent = os.sendfile(self.connection.fileno(), file.fileno(), at, count)
                        if sent == 0:
                            return
                        self.server.gate.count_piece(sent)
                        at, count = at + sent, count - sent
        finally:
            name = path.relative_to(self.server.folder).as_posix()
            self.server.gate.count_answer(Sent(self.client_address[0], name, begin, at))


def _obey(server: _Server, question: list[Any]) -> Any:
    gate = server.gate
    match question:
        case ["served"]:
            return gate.served()
        case ["hold_after", num_bytes]:
            return gate.limit(num_bytes)
        case ["release"]:
            return gate.limit(None)
        case ["throttle", client, None]:
            return server.throttled.pop(client, None) is not None
        case ["throttle", client, bytes_per_s]:
            server.throttled[client] = _Pace(bytes_per_s)
            return True
        case ["wait_until_holding", timeout_s]:
            return gate.wait_until_holding(timeout_s)
    raise ValueError(f"no such question: {question!r}")


def main() -> None:
    """Serves until its standard input ends; answers each line of it by one."""
    folder, address, options = sys.argv[1:]
    with _Server(Path(folder), address, Rates(**json.loads(options))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.socket.getsockname()[:2]
        print(json.dumps(f"http://{host}:{port}"), flush=True)
        for line in sys.stdin:
            print(json.dumps(_obey(server, json.loads(line))), flush=True)
        sys.stdout.flush()
        os._exit(0)  # connections that are held back end here too


if __name__ == "__main__":
    main()
