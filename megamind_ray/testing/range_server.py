"""An HTTP server of byte ranges on loopback that counts what it sends and can hold a transfer where a test wants it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote

__all__ = ["RangeServer"]

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_HOLD_BOUND_S = 60.0


class RangeServer:
    """Serves the files of a folder.

    Attributes:
        bytes_sent: Body bytes of weights sent so far (``*.safetensors``), headers of files included.

    Args:
        folder: What to serve.
        hold_after_bytes: Ranges of weights that begin at or after this offset are held back until ``release``; None
            holds none. Headers, which begin at 0, always pass.
    """

    def __init__(self, folder: Path, *, hold_after_bytes: int | None = None) -> None:
        self._released = threading.Event()
        if hold_after_bytes is None:
            self._released.set()
        self._holding = threading.Event()
        self._lock = threading.Lock()
        self.bytes_sent = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(folder, hold_after_bytes, self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def uri(self) -> str:
        """Where the folder is served."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def release(self) -> None:
        """Lets held ranges go, and holds no more."""
        self._released.set()

    def wait_until_holding(self, timeout_s: float = _HOLD_BOUND_S) -> bool:
        """Waits until a range is held back; False if none was in that time."""
        return self._holding.wait(timeout_s)

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _hold(self) -> None:
        if not self._released.is_set():
            self._holding.set()
            self._released.wait(_HOLD_BOUND_S)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_sent += num_bytes


def _handler(folder: Path, hold_after_bytes: int | None, server: RangeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body in one packet: sent apart, each answer would wait 40 ms for the client's delayed ACK.
        wbufsize = -1
        disable_nagle_algorithm = True

        def do_HEAD(self) -> None:
            self._answer(lambda _body: None)

        def do_GET(self) -> None:
            self._answer(lambda body: self.wfile.write(body))

        def _answer(self, send: Callable[[bytes], object]) -> None:
            path = (folder / unquote(self.path).lstrip("/")).resolve()
            if not path.is_file() or not path.is_relative_to(folder.resolve()):
                self.send_error(404)
                return
            size = path.stat().st_size
            match = _RANGE.fullmatch(self.headers.get("Range", ""))
            begin = int(match[1]) if match else 0
            end = min(size, int(match[2]) + 1) if match and match[2] else size
            if begin >= end and size:
                self.send_error(416)
                return
            if self.command == "GET" and path.suffix == ".safetensors":
                if hold_after_bytes is not None and begin >= hold_after_bytes:
                    server._hold()
                server._count(end - begin)
            self.send_response(206 if match else 200)
            if match:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.send_header("Content-Length", str(end - begin))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}-{size:x}"')
            self.end_headers()
            with path.open("rb") as file:
                file.seek(begin)
                send(file.read(end - begin))

        def log_message(self, *_args: object) -> None:
            return

    return Handler
