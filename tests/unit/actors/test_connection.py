"""A cluster that is not there is said to be so at once, by the name that was given."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from megamind_ray.actors.connection import require_listener
from megamind_ray.errors import ClusterError, RequestError


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Bound, so that nobody else takes it, but not listened on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_an_address_that_nobody_listens_on_is_named(closed_port: int) -> None:
    with pytest.raises(ClusterError, match=rf"127\.0\.0\.1:{closed_port}.*ray status"):
        require_listener(f"127.0.0.1:{closed_port}")


def test_an_address_that_somebody_listens_on_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        require_listener(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", "http://head:8265", ":6379"])
def test_what_is_no_address_is_refused_with_the_form(address: str) -> None:
    with pytest.raises(RequestError, match="HOST:PORT"):
        require_listener(address)
