"""Where the ranks of a model find each other: rank 0 opens a store and leaves its address in Ray's key-value store."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import ray
from ray.experimental import internal_kv

from megamind_ray.errors import ClusterError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["meet"]

_TIMEOUT_S: Final = 120.0
_ASK_EVERY_S: Final = 0.05
_NAMESPACE: Final = b"megamind"
# Meetings so far under each name; as they are collective, all ranks count alike.
_meetings: Counter[str] = Counter()


def meet(name: str, rank: int, world: int) -> TCPStore:
    """A store that all ranks share. Collective: every rank calls it, under the same name.

    The port is chosen when it is needed: one that was chosen at load time could be somebody else's hours later.

    Raises:
        ClusterError: Rank 0 did not come within two minutes.
    """
    from torch._C._distributed_c10d import TCPStore

    _meetings[name] += 1
    key = f"rendezvous/{name}/{_meetings[name]}".encode()
    timeout = timedelta(seconds=_TIMEOUT_S)
    if rank == 0:
        host = ray.util.get_node_ip_address()
        store = TCPStore(host, 0, world, is_master=True, wait_for_workers=False, timeout=timeout)
        internal_kv._internal_kv_put(key, f"{host}:{store.port}".encode(), namespace=_NAMESPACE)
        return store
    host, _, port = _wait_for(key, name).decode().rpartition(":")
    return TCPStore(host, int(port), world, is_master=False, wait_for_workers=False, timeout=timeout)


def _wait_for(key: bytes, name: str) -> bytes:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        value: bytes | None = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        if value is not None:
            return value
        time.sleep(_ASK_EVERY_S)
    raise ClusterError(
        f"{name}: rank 0 did not come to make the device mesh within {_TIMEOUT_S:g} s; all ranks must use it"
    )
