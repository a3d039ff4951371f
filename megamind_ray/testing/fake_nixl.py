"""NIXL agents that share one process's memory, as far as ``actors.nixl_endpoint`` knows them, and fail on request."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from megamind_ray.testing.fakes import MemoryPlane

__all__ = ["FakeFabric", "FakeNixlAgent", "SharedMemoryPlane"]

_Descriptor = tuple[int, int, int]
State = Literal["DONE", "PROC", "ERR"]


@dataclass(eq=False)
class _Transfer:
    local: Sequence[_Descriptor]
    remote: Sequence[_Descriptor]
    agent: str


class SharedMemoryPlane(MemoryPlane):
    """As ``MemoryPlane``, with its blocks side by side in one shared mapping, as a node's object store has them.

    Args:
        nbytes: Of the mapping. Blocks are never moved together: what was let go is not used again.
    """

    def __init__(self, nbytes: int = 64 << 20) -> None:
        super().__init__()
        self.pool_bytes = nbytes
        self._pool = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._end = 0
        self._end_lock = threading.Lock()

    def _copied(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        with self._end_lock:
            begin, self._end = self._end, self._end + data.nbytes
        place = self._pool[begin : self._end]
        place[:] = data
        return place


class FakeFabric:
    """What agents reach each other by.

    Attributes:
        agents: By name.
        state: What transfers are in; ``DONE`` moves their bytes, ``ERR`` ends the connection until it is made anew.
        num_reads: Transfers begun.
        num_held: Transfers whose handles were not released.
        num_registered: Calls that registered memory.
        refuses: What an agent's method raises when it is called, by the method's name.
    """

    def __init__(self) -> None:
        self.agents: dict[str, FakeNixlAgent] = {}
        self.state: State = "DONE"
        self.num_reads = 0
        self.num_held = 0
        self.num_registered = 0
        self.refuses: dict[str, Exception] = {}

    def start(self, name: str) -> FakeNixlAgent:
        """As ``actors.nixl_endpoint.start_nixl``."""
        self.agents[name] = FakeNixlAgent(name, self)
        return self.agents[name]


class FakeNixlAgent:
    """The calls that an endpoint makes. One at a time, as NIXL wants them: two at once fail."""

    def __init__(self, name: str, fabric: FakeFabric) -> None:
        self._name, self._fabric = name, fabric
        self._regions: list[tuple[int, int]] = []
        self._readable: dict[str, list[tuple[int, int]]] = {}
        self._disconnected: set[str] = set()
        self._one = threading.Lock()

    def register_memory(
        self, regions: Sequence[tuple[int, int, int, str]], kind: str, backends: list[str]
    ) -> Sequence[tuple[int, int, int, str]]:
        with self._alone("register_memory"):
            self._fabric.num_registered += 1
            self._regions += [(address, address + size) for address, size, _, _ in regions]
            return list(regions)

    def get_partial_agent_metadata(
        self, regions: Sequence[tuple[int, int, int, str]], connection: bool, backends: list[str]
    ) -> bytes:
        with self._alone("get_partial_agent_metadata"):
            ((address, size, *_),) = regions
            return f"{self._name} {address} {size}".encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        with self._alone("add_remote_agent"):
            name, address, size = metadata.decode().split()
            self._readable.setdefault(name, []).append((int(address), int(address) + int(size)))
            return name

    def remove_remote_agent(self, name: str) -> None:
        with self._alone("remove_remote_agent"):
            del self._readable[name]
            self._disconnected.discard(name)

    def get_xfer_descs(self, descriptors: Sequence[_Descriptor], kind: str) -> Sequence[_Descriptor]:
        return descriptors

    def initialize_xfer(
        self,
        operation: str,
        local: Sequence[_Descriptor],
        remote: Sequence[_Descriptor],
        agent: str,
        message: bytes,
        backends: list[str],
    ) -> _Transfer:
        with self._alone("initialize_xfer"):
            assert operation == "READ"
            if agent in self._disconnected:
                raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
            assert [size for _, size, _ in local] == [size for _, size, _ in remote]
            _require_inside(local, self._regions)
            _require_inside(remote, self._readable[agent])
            self._fabric.num_held += 1
            return _Transfer(local, remote, agent)

    def transfer(self, transfer: _Transfer) -> State:
        with self._alone("transfer"):
            self._fabric.num_reads += 1
            return "PROC"

    def check_xfer_state(self, transfer: _Transfer) -> State:
        with self._alone("check_xfer_state"):
            if self._fabric.state == "DONE":
                for (target, size, _), (source, _, _) in zip(transfer.local, transfer.remote, strict=True):
                    ctypes.memmove(target, source, size)
            if self._fabric.state == "ERR":
                self._disconnected.add(transfer.agent)
            return self._fabric.state

    def release_xfer_handle(self, transfer: _Transfer) -> None:
        with self._alone("release_xfer_handle"):
            if self._fabric.state == "PROC":
                raise AssertionError("a transfer that is under way must not be released")
            self._fabric.num_held -= 1

    def get_new_notifs(self, backends: list[str]) -> dict[str, list[bytes]]:
        with self._alone("get_new_notifs"):
            return {}

    @contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        assert self._one.acquire(blocking=False), f"{method}: two calls at a time"
        try:
            if method in self._fabric.refuses:
                raise self._fabric.refuses[method]
            yield
        finally:
            self._one.release()


def _require_inside(descriptors: Sequence[_Descriptor], regions: Sequence[tuple[int, int]]) -> None:
    for address, size, _ in descriptors:
        assert any(begin <= address and address + size <= end for begin, end in regions), "memory is not registered"
