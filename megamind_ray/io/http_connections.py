"""Connections to web servers: kept between requests, and bounded in time by more than the silence on them.

A socket's timeout starts anew with each byte. A server that sends the head of its answer, or the lengths of the pieces
of a body, a byte at a time would hold a thread for as long as it likes.
"""

from __future__ import annotations

import http.client
import io
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import parse_url

__all__ = ["connections_to", "time_for_body"]

_MAX_CONNECTIONS: Final = 256

# Of the thread that reads: libraries are between it and the socket.
_body = threading.local()


@contextmanager
def time_for_body(seconds: float) -> Iterator[None]:
    """How long what this thread reads of a body meanwhile may take, however it comes."""
    _body.deadline_s = time.monotonic() + seconds
    try:
        yield
    finally:
        _body.deadline_s = None


class _BoundedReader(io.RawIOBase):
    """Reads from a socket until the time for it is over: the head's, which is the longest silence, or a body's."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw, self._sock = raw, sock
        self._silence_s = self._timeout_s = sock.gettimeout()
        self._head_deadline_s = None if self._silence_s is None else time.monotonic() + self._silence_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        deadline_s = getattr(_body, "deadline_s", None) or self._head_deadline_s
        if deadline_s is not None and self._silence_s is not None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("it did not come in time, though it was never silent for long")
            timeout_s = min(left_s, self._silence_s)
            if timeout_s != self._timeout_s:  # a call of the system
                self._sock.settimeout(timeout_s)
                self._timeout_s = timeout_s
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        # What it made holds the socket open until it is closed, whoever closes the socket itself.
        raw: Any = self.fp.detach()
        self.fp = io.BufferedReader(_BoundedReader(raw, sock))


class _Connection(HTTPConnection):
    response_class = _Response


class _SecureConnection(HTTPSConnection):
    response_class = _Response


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


def connections_to(address: str) -> urllib3.PoolManager:
    """The connections of this process that lead to an address: directly, or through a proxy."""
    return _connections(_proxy(address))


def _proxy(address: str) -> str | None:
    """The proxy that the environment names for an address; urllib reads it."""
    url = parse_url(address)
    if url.host is None or urllib.request.proxy_bypass(url.host):
        return None
    return urllib.request.getproxies().get(url.scheme or "http")


@lru_cache(maxsize=8)
def _connections(proxy: str | None) -> urllib3.PoolManager:
    """Kept between reads and files."""
    manager = (
        urllib3.PoolManager(maxsize=_MAX_CONNECTIONS)
        if proxy is None
        else urllib3.ProxyManager(proxy, maxsize=_MAX_CONNECTIONS)
    )
    manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
    return manager


# On a connection that parent and child have, answers of one would reach the other.
os.register_at_fork(after_in_child=_connections.cache_clear)
