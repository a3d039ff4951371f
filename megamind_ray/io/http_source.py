"""A file on a web server, read by ranges.

Ours rather than fsspec's, which looks neither at ``Content-Range`` nor at the version in an answer, has no bound on a
silent server, and copies each body twice (docs/design/0011).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final
from urllib.parse import unquote, urljoin

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, MaxRetryError, ProtocolError
from urllib3.util import make_headers, parse_url

from megamind_ray.config import RetryConfig
from megamind_ray.errors import RequestError, masked
from megamind_ray.io.failures import status_error
from megamind_ray.io.http_connections import connections_to, time_for_body
from megamind_ray.io.retry import MIN_BYTES_PER_S
from megamind_ray.io.source import FileVersion, storage_errors
from megamind_ray.io.times import nanoseconds
from megamind_ray.io.versioned import VersionedSource, content_range, fill, no_ranges, unclear_range, whole_number
from megamind_ray.units import KIB

__all__ = ["HttpSource"]

# Copied and summed while they are in the CPU's second cache; as fast as reading into place (docs/design/0011).
_PIECE_BYTES: Final = 256 * KIB
# Only redirects: all other attempts are those of io.retry, or they would multiply.
_REDIRECTS: Final = urllib3.Retry(
    total=10, connect=0, read=0, redirect=10, status=0, other=0, respect_retry_after_header=False
)
# The answers of servers that do not know HEAD, or addresses that were signed for GET alone.
_NO_HEAD: Final = (400, 401, 403, 405, 501)
_EXPIRED: Final = (401, 403, 404, 410)
_LOGGERS: Final = ("urllib3.poolmanager", "urllib3.connectionpool", "urllib3.util.retry")
_QUERY_VALUE: Final = re.compile(r"([?&][^=&\s'\"]+=)[^&\s'\"]+")
# What urllib3 begins with: a pool or connection, whose host and port are in the address that messages begin with.
_SPEAKER: Final = re.compile(r"(?:<[^>]*>|\w+\([^)]*\)): ")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class HttpSource(VersionedSource):
    """A file on a web server. Several threads may read; each has a connection, which is kept.

    Where the address leads elsewhere by redirects, reads go to their end directly, and to the address again once that
    has expired.

    Args:
        uri: Address; user and password in it are sent as basic authentication.
        retry: How long a server may be silent.
        address: Where it is, if ``uri`` is only its name.
        headers: Sent to that address and its origin (scheme, host and port), not to where else it leads.

    Raises:
        RequestError: No such file, no permission, or no byte ranges.
        OSError: The server did not answer.
    """

    def __init__(
        self, uri: str, retry: RetryConfig, *, address: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self._timeout = urllib3.Timeout(connect=retry.request_s, read=retry.request_s)
        self._request_s = retry.request_s
        self._address, credentials = _address(address or uri)
        self._own_headers = {**credentials, **(headers or {})}
        self._target = self._address
        self._name = uri
        super().__init__(uri, self._ask_version())

    def current_version(self) -> FileVersion:
        """State of the file now."""
        return self._ask_version()

    def fetch(self, offset: int, view: memoryview, *, summed: bool) -> int:
        """As ``VersionedSource.fetch``."""
        end = offset + view.nbytes
        with self._get(f"bytes={offset}-{end - 1}") as response:
            self._check_head(response, offset, end)
            with time_for_body(self._request_s + view.nbytes / MIN_BYTES_PER_S):
                return fill(view, _body(response, view.nbytes), offset, summed=summed)

    def _check_head(self, response: urllib3.BaseHTTPResponse, begin: int, end: int) -> None:
        """Makes sure that the body will be what was asked for, of the version that was opened."""
        headers = response.headers
        if headers.get("Content-Encoding", "identity") != "identity":
            raise RequestError(f"{self.uri}: comes compressed although that was refused; serve it as it is")
        told, length = _version(headers, self.size_bytes), headers.get("Content-Length")
        if response.status == 206:
            given, kind = headers.get("Content-Range"), headers.get("Content-Type", "")
            if given is None or kind.strip().lower().startswith("multipart/"):
                raise unclear_range(self.uri, given)
            self.require_range(given, begin, end, told)
        elif (begin, end) == (0, self.size_bytes):
            size_bytes = whole_number(length)
            told = told if size_bytes is None else replace(told, size_bytes=size_bytes)
            self.require_same(told, is_size_told=size_bytes is not None)
        else:
            raise no_ranges(self.uri)
        if length is not None and {whole_number(part.strip()) for part in length.split(",")} != {end - begin}:
            raise OSError(f"the answer has the length {length!r:.100} where {end - begin} bytes were asked for")

    def _ask_version(self) -> FileVersion:
        with storage_errors(self._name):
            with self._request("HEAD", self._address, {}) as response:
                size_bytes = whole_number(response.headers.get("Content-Length"))
                if response.status == 200 and size_bytes is not None:
                    self._target = _end_of_redirects(response, self._address)
                    return _version(response.headers, size_bytes)
                if response.status >= 300 and response.status not in _NO_HEAD:
                    raise status_error(response.status, "the server", response.headers)
            with self._request("GET", self._address, {"Range": "bytes=0-0"}) as response:
                return self._version_of_range(response)

    def _version_of_range(self, response: urllib3.BaseHTTPResponse) -> FileVersion:
        given = content_range(response.headers.get("Content-Range"))
        if response.status == 416 and given is not None and given.total_bytes == 0:
            return _version(response.headers, 0)
        if response.status >= 300:
            raise status_error(response.status, "the server", response.headers)
        if response.status != 206 or given is None or given.total_bytes is None or given.begin != 0:
            raise no_ranges(self._name)
        self._target = _end_of_redirects(response, self._address)
        return _version(response.headers, given.total_bytes)

    @contextmanager
    def _get(self, byte_range: str) -> Iterator[urllib3.BaseHTTPResponse]:
        """An answer to a range that is success."""
        target = self._target
        with self._request("GET", target, {"Range": byte_range}) as response:
            if response.status not in _EXPIRED or target == self._address:
                yield self._required(response)
                return
        with self._request("GET", self._address, {"Range": byte_range}) as response:
            self._target = _end_of_redirects(response, self._address) if response.status < 300 else self._address
            yield self._required(response)

    def _required(self, response: urllib3.BaseHTTPResponse) -> urllib3.BaseHTTPResponse:
        if response.status == 416:
            self.require_same(self._ask_version())
            raise OSError("the server refuses a range that is inside the file by what it says itself")
        if response.status not in (200, 206):
            raise status_error(response.status, "the server", response.headers)
        return response

    @contextmanager
    def _request(self, method: str, address: str, headers: Mapping[str, str]) -> Iterator[urllib3.BaseHTTPResponse]:
        """One request, redirects followed. The connection is kept if the body was read to its end."""
        # What authenticates here is nobody else's business; urllib3 drops it on the way to another origin, too.
        own = self._own_headers if _origin(address) == _origin(self._address) else {}
        with _http_errors():
            response = connections_to(address).request(
                method,
                address,
                headers={"Accept-Encoding": "identity", **own, **headers},
                timeout=self._timeout,
                retries=_REDIRECTS,
                preload_content=False,
                decode_content=False,
            )
            try:
                yield response
            except BaseException:
                response.close()
                raise
            _hand_back(response, method)


def _body(response: urllib3.BaseHTTPResponse, num_bytes: int) -> Iterator[bytes]:
    """The pieces of a body that should have so many bytes; one byte more where it has more."""
    left = num_bytes
    while left and (piece := response.read1(min(_PIECE_BYTES, left), decode_content=False)):
        left -= len(piece)
        yield piece
    # Without a length in its head, an answer may have more than was asked for.
    if not left and response.length_remaining is None:
        yield response.read1(1, decode_content=False)


def _hand_back(response: urllib3.BaseHTTPResponse, method: str) -> None:
    """Keeps the connection where nothing more comes on it, or little: the body of a refusal."""
    left = response.length_remaining
    if method == "HEAD" or (left is not None and left <= _PIECE_BYTES):
        response.drain_conn()
        response.release_conn()
    else:
        response.close()


@contextmanager
def _http_errors() -> Iterator[None]:
    """Says what urllib3 raises as an ``OSError``, without the address, which may be signed."""
    try:
        yield
    except MaxRetryError as error:
        raise OSError(f"{type(error.reason).__name__}: {_reason(error.reason)}") from None
    except HTTPError as error:
        raise OSError(f"{type(error).__name__}: {_reason(error)}") from None


def _reason(error: BaseException | None) -> str:
    if isinstance(error, ProtocolError) and len(error.args) > 1:
        head, cause = error.args[:2]
        return f"{str(head).rstrip('.')}, {type(cause).__name__}: {cause}"
    text = str(error)
    return _SPEAKER.sub("", text, count=1) if _SPEAKER.match(text) else text


def _address(uri: str) -> tuple[str, dict[str, str]]:
    """The address without user and password, and the headers that authenticate with them."""
    try:
        url = parse_url(uri)
    except LocationParseError as error:
        raise RequestError(
            f"{uri}: is no address of the web; check it, and write what is special in a user or password as in a path "
            "(/ is %2F, @ is %40, a space is %20)"
        ) from error
    if url.auth is None:
        return uri, {}
    return str(url._replace(auth=None)), make_headers(basic_auth=unquote(url.auth))


def _end_of_redirects(response: urllib3.BaseHTTPResponse, address: str) -> str:
    """Where an answer came from; each ``Location`` on the way may be relative to the one before."""
    for step in response.retries.history if response.retries is not None else ():
        address = urljoin(address, step.redirect_location or "")
    return address


def _origin(address: str) -> tuple[str | None, str | None, int | None]:
    url = parse_url(address)
    return url.scheme, url.host, url.port or _DEFAULT_PORTS.get(url.scheme or "")


def _version(headers: Mapping[str, str], size_bytes: int) -> FileVersion:
    return FileVersion(size_bytes, nanoseconds(headers.get("Last-Modified")), headers.get("ETag"))


class _Masking(logging.Filter):
    """Keeps secrets of addresses out of what urllib3 logs: where a redirect leads is a signed address."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = _QUERY_VALUE.sub(r"\1***", masked(record.getMessage())), None
        return True


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_Masking())
