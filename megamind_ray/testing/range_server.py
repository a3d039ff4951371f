"""A web server with byte ranges, for tests: it counts what it sends, and holds or fails a transfer when told to."""

from __future__ import annotations

import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megamind_ray.testing.fault_server import Answer, FaultServer, Request, Schedule, parse_range

__all__ = ["RangeServer"]

_HOLD_BOUND_S = 60.0


class RangeServer(FaultServer):
    """Serves the files of a folder, with ETag and Last-Modified.

    Args:
        folder: What to serve.
        hold_after_bytes: Ranges of weights that begin at or after this offset are held back until ``release``; None
            holds none. Headers, which begin at 0, always pass.
        faults: What goes wrong.
        slow_s: How late ``Fault.SLOW_START`` begins.
        retry_after: What ``Fault.TOO_MANY`` says.
        ranges: Off, the whole file is the answer whatever was asked for.
        validators: Off, answers say nothing of the file's version.
    """

    def __init__(
        self,
        folder: Path,
        *,
        hold_after_bytes: int | None = None,
        faults: Schedule | None = None,
        slow_s: float = 0.1,
        retry_after: str = "0",
        ranges: bool = True,
        validators: bool = True,
    ) -> None:
        self._folder = folder.resolve()
        self._hold_after_bytes = hold_after_bytes
        self._ranges, self._validators = ranges, validators
        self._released = threading.Event()
        if hold_after_bytes is None:
            self._released.set()
        self._holding = threading.Event()
        super().__init__(self._file, faults=faults, slow_s=slow_s, retry_after=retry_after)

    def release(self) -> None:
        """Lets held ranges go, and holds no more."""
        self._released.set()

    def wait_until_holding(self, timeout_s: float = _HOLD_BOUND_S) -> bool:
        """Waits until a range is held back; False if none was in that time."""
        return self._holding.wait(timeout_s)

    def close(self) -> None:
        """Ends it, and lets held ranges go."""
        self._released.set()
        super().close()

    def _file(self, request: Request) -> Answer:
        path = (self._folder / unquote(urlsplit(request.path).path).lstrip("/")).resolve()
        if not path.is_file() or not path.is_relative_to(self._folder):
            return Answer(404, {"Content-Length": "0"} if request.method == "HEAD" else {})
        status = path.stat()
        size = status.st_size
        asked = parse_range(request.headers.get("range", "")) if self._ranges else None
        begin, end = (0, size) if asked is None else (asked[0], min(size, size if asked[1] is None else asked[1]))
        if begin >= end and size:
            return Answer(416, {"Content-Range": f"bytes */{size}"})
        headers = {"Accept-Ranges": "bytes"} if self._ranges else {}
        if asked is not None:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        if self._validators:
            headers["ETag"] = f'"{status.st_mtime_ns:x}-{size:x}"'
        if request.method == "HEAD":
            return Answer(200, {**headers, "Content-Length": str(size)})
        if path.suffix == ".safetensors":
            self._hold(begin)
        with path.open("rb") as file:
            file.seek(begin)
            return Answer(206 if asked else 200, headers, file.read(end - begin))

    def _hold(self, begin: int) -> None:
        if self._hold_after_bytes is not None and begin >= self._hold_after_bytes and not self._released.is_set():
            self._holding.set()
            self._released.wait(_HOLD_BOUND_S)
