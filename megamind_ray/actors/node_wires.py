"""The wires of one node: which it has, and how fast blocks come over each from another node (0030)."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any, Final, Protocol

import numpy as np

from megamind_ray.actors.boundary import wait_for
from megamind_ray.actors.dataplane import DataPlane, RayObjectStore
from megamind_ray.actors.messages import BlockHandle
from megamind_ray.actors.nixl_endpoint import NixlEndpoint
from megamind_ray.actors.nixl_wire import NixlWire
from megamind_ray.actors.pool_check import find_pool_file
from megamind_ray.config import Config, WireConfig
from megamind_ray.core.exchange import RELAY_FETCHES
from megamind_ray.core.wires import WireName
from megamind_ray.errors import ClusterError, MegamindError

__all__ = ["AgentSource", "NodeWires", "WireMeasureRequest", "WireSource", "WireTimes"]

_ROUNDS: Final = 4  # of each wire, in turns: what disturbs the machine disturbs both


@dataclass(frozen=True, slots=True, kw_only=True)
class WireMeasureRequest:
    """What to move between two nodes, by each wire.

    Attributes:
        wires: In turns.
        block_bytes: Size of a block.
        num_blocks: By each wire at most, those of the first round, which makes connections, not counted.
        seconds: When no further round is begun.
        timeout_s: Of one call or block.
    """

    wires: tuple[WireName, ...]
    block_bytes: int
    num_blocks: int
    seconds: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTimes:
    """How long blocks took by one wire.

    Attributes:
        wire: Which.
        num_bytes, seconds: Of all rounds that count; 0 where none was ended in time.
        carried: Whether this wire itself brought every byte.
    """

    wire: WireName
    num_bytes: int
    seconds: float
    carried: bool

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds else 0.0


class WireSource(Protocol):
    """The node that blocks come from."""

    def lay_out(self, wire: WireName, num_blocks: int, nbytes: int) -> Sequence[BlockHandle]:
        """Fresh blocks, offered over a wire; those of the call before are let go.

        Raises:
            ClusterError: It does not answer, or its pool does not take them.
        """


class NodeWires:
    """All methods may be called from any thread.

    Attributes:
        store: Where blocks are put.

    Args:
        store: Default is Ray's object store.
        make_endpoint: Starts NIXL in this process, from the settings and the size of the pool.
    """

    def __init__(
        self, store: DataPlane | None = None, make_endpoint: Callable[[WireConfig, int], NixlEndpoint] | None = None
    ) -> None:
        self.store = store if store is not None else RayObjectStore()
        self._make_endpoint = make_endpoint or _start_endpoint
        self._lock = threading.Lock()
        self._endpoint: NixlEndpoint | None = None
        self._lacking: str | None = None
        self._laid_out: list[BlockHandle] = []

    def lacking(self, config: WireConfig) -> str:
        """Why NIXL cannot be used on this node; empty where it can. The first call starts it, the answer stays."""
        with self._lock:
            if self._lacking is None:
                pool = find_pool_file(os.getppid())
                try:
                    self._endpoint = self._make_endpoint(config, pool.size_bytes if pool else 0)
                    self._lacking = ""
                except MegamindError as error:
                    self._lacking = str(error)
            return self._lacking

    def plane(self, config: Config, *, where: str) -> DataPlane:
        """The data plane of a load with its settings, whose wire has been chosen; ``where`` is for messages."""
        return self._plane("nixl" if config.wire.use == "nixl" else "ray", config.wire, where)

    def lay_out(self, wire: WireName, num_blocks: int, nbytes: int, config: Config) -> tuple[BlockHandle, ...]:
        """As ``WireSource``; no blocks let those of the call before go."""
        with self._lock:
            self._laid_out = []
        if not num_blocks:
            return ()
        plane = self._plane(wire, config.wire)
        block = np.zeros(nbytes, np.uint8)
        held = [plane.put(block) for _ in range(num_blocks)]
        with self._lock:
            self._laid_out = held
        return tuple(plane.offer(handle) for handle in held)

    def measure(self, source: WireSource, request: WireMeasureRequest, config: Config) -> tuple[WireTimes, ...]:
        """Takes in blocks of another node as a load does, by each wire in turns.

        Raises:
            ClusterError: The other node does not answer, or a block does not come.
        """
        took = dict.fromkeys(request.wires, (0, 0.0))
        carried = dict.fromkeys(request.wires, True)
        until_s = monotonic() + request.seconds
        per_round = max(RELAY_FETCHES, request.num_blocks // (_ROUNDS + 1))
        for number in range(_ROUNDS + 1):
            for wire in request.wires:
                plane = self._plane(wire, config.wire)
                # The first blocks make connections and touch memory.
                count = RELAY_FETCHES if number == 0 else per_round
                handles = source.lay_out(wire, count, request.block_bytes)
                seconds = self._take_in(plane, handles, request.timeout_s)
                if number:
                    took[wire] = took[wire][0] + count * request.block_bytes, took[wire][1] + seconds
                if wire == "nixl":
                    brought = plane.bytes_read if isinstance(plane, NixlWire) else 0
                    carried[wire] &= brought == count * request.block_bytes
            if not all(carried.values()) or (number and monotonic() > until_s):
                break
        return tuple(
            WireTimes(wire=wire, num_bytes=num_bytes, seconds=seconds, carried=carried[wire])
            for wire, (num_bytes, seconds) in took.items()
        )

    def _plane(self, wire: WireName, config: WireConfig, where: str = "") -> DataPlane:
        if wire == "nixl" and not self.lacking(config) and self._endpoint is not None:
            return NixlWire(self.store, self._endpoint, where=where)
        return self.store

    def _take_in(self, plane: DataPlane, handles: Sequence[BlockHandle], timeout_s: float) -> float:
        def one(handle: BlockHandle) -> None:
            with plane.fetch(handle, timeout_s=timeout_s) as data:
                plane.put(data)

        begin_s = perf_counter()
        with ThreadPoolExecutor(RELAY_FETCHES, thread_name_prefix="measure-wire") as threads:
            list(threads.map(one, handles))
        return perf_counter() - begin_s


class AgentSource:
    """Another node's agent behind its actor handle."""

    def __init__(self, handle: Any, config: Config, timeout_s: float) -> None:
        self._handle, self._config, self._timeout_s = handle, config, timeout_s

    def lay_out(self, wire: WireName, num_blocks: int, nbytes: int) -> Sequence[BlockHandle]:
        found: Sequence[BlockHandle] = wait_for(
            self._handle.lay_out.remote(wire, num_blocks, nbytes, self._config),
            timeout_s=self._timeout_s,
            what="laying out blocks to measure a wire with",
        )
        return found


def _start_endpoint(config: WireConfig, pool_bytes: int) -> NixlEndpoint:
    if not pool_bytes:
        raise ClusterError("the pool of this node cannot be seen (/proc of the raylet)")
    # The file is a few bytes longer than what is mapped of it.
    return NixlEndpoint(buffer_bytes=config.buffer_bytes, pool_bytes=pool_bytes - mmap.PAGESIZE)
