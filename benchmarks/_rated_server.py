"""A web server of files that sends no faster than it is told, all connections together, after a latency it is told.

Storage whose limits are known exactly, for holding predictions to. It runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from megamind_ray.testing.fault_server import parse_range

__all__ = ["rated_server"]

_PIECE_BYTES = 256 << 10
_START_S = 30.0
_BURST_S = 0.02  # what a thread that comes late to its turn may catch up on


class _Pace:
    """Says when the next piece may go, so that all connections together keep the rate; unused time is lost soon."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        with self._lock:
            earliest_s = time.perf_counter() - _BURST_S
            self._free_s = max(self._free_s, earliest_s) + nbytes / self._bytes_per_s
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.perf_counter()))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, bytes_per_s: float, latency_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.pace, self.latency_s = folder.resolve(), _Pace(bytes_per_s), latency_s


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _answer(self, *, body: bool) -> None:
        path = self.server.folder / unquote(self.path).lstrip("/")
        if not path.is_file() or self.server.folder not in path.resolve().parents:
            self.send_error(404)
            return
        size = path.stat().st_size
        asked = parse_range(self.headers.get("Range", ""))
        begin = 0 if asked is None else min(asked[0], size)
        end = size if asked is None or asked[1] is None else min(asked[1], size)
        if body:
            time.sleep(self.server.latency_s)
        self.send_response(200 if asked is None else 206)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{size}-{path.stat().st_mtime_ns}"')
        if asked is not None:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        if body:
            self._send(path, begin, end)

    def _send(self, path: Path, begin: int, end: int) -> None:
        self.wfile.flush()
        with path.open("rb") as file:
            while begin < end:
                count = min(_PIECE_BYTES, end - begin)
                self.server.pace.wait(count)
                while count:
                    sent = os.sendfile(self.connection.fileno(), file.fileno(), begin, count)
                    if sent == 0:
                        return
                    begin, count = begin + sent, count - sent


@contextlib.contextmanager
def rated_server(folder: Path, *, bytes_per_s: float, latency_s: float = 0.0) -> Iterator[str]:
    """Serves a folder from a process of its own; gives its URI."""
    command = [sys.executable, "-m", __name__, str(folder), str(bytes_per_s), str(latency_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        timer = threading.Timer(_START_S, process.kill)
        timer.start()
        assert process.stdout is not None
        uri = process.stdout.readline().strip()
        timer.cancel()
        if not uri:
            raise RuntimeError(f"the server of {folder} did not start within {_START_S:g} s")
        yield uri
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Serves until it is killed."""
    folder, rate, latency = sys.argv[1:]
    with _Server(Path(folder), float(rate), float(latency)) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
