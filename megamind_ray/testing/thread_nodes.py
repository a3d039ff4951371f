"""Nodes of a fleet of threads: their agents, their wires, and calls between them that may come to nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from megamind_ray.actors.agent_load import AgentLoad
from megamind_ray.actors.block_pool import PoolClosedError
from megamind_ray.actors.messages import Consumer, Delivery, rank_consumer
from megamind_ray.core.ids import Generation, LoadId, NodeId, Rank
from megamind_ray.errors import ClusterError
from megamind_ray.testing.fakes import MemoryPlane

__all__ = ["Calls", "HomeCalls", "NodeWire", "PeerCalls", "ThreadNode"]

_FIRST: Final = Generation(0)
_LOOK_S: Final = 0.001
_UInt8Array = npt.NDArray[np.uint8]


class Calls(Protocol):
    """Whose nodes they are."""

    def node(self, name: NodeId) -> ThreadNode:
        """A node that takes part."""

    def call(self, caller: ThreadNode, callee: ThreadNode) -> None:
        """A call between two actors comes to its node; raises where it comes to nothing."""


class ThreadNode:
    """A node's agent, its wire, and whether it answers."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.memory = MemoryPlane()
        self.has_crashed = threading.Event()
        self.is_frozen = threading.Event()
        self.is_given_up = threading.Event()
        self.load: AgentLoad | None = None

    def require_answer(self, stop: threading.Event) -> None:
        """Raises where a call to this node, or one of its own, comes to nothing; waits where it is silent."""
        while self.is_frozen.is_set() and not self.is_given_up.is_set() and not stop.is_set():
            time.sleep(_LOOK_S)
        if self.has_crashed.is_set() or (
            self.is_frozen.is_set() and not stop.is_set() and not self.is_given_up.is_set()
        ):
            raise ClusterError(f"node {self.node} does not answer")


class NodeWire:
    """The data plane as one node sees it: handles know whose memory they are in."""

    def __init__(self, fleet: Calls, own: ThreadNode) -> None:
        self._fleet, self._own = fleet, own

    def put(self, data: _UInt8Array) -> object:
        return self._own, self._own.memory.put(data)

    def get(self, handles: Sequence[Any], *, timeout_s: float) -> list[_UInt8Array]:
        return [self._one(handle, timeout_s) for handle in handles]

    def offer(self, handle: Any) -> Any:
        return handle

    def settle(self, handle: Any) -> Any:
        return handle

    @contextmanager
    def fetch(self, handle: Any, *, timeout_s: float) -> Iterator[_UInt8Array]:
        yield self._one(handle, timeout_s)

    def _one(self, handle: Any, timeout_s: float) -> _UInt8Array:
        owner: ThreadNode = handle[0]
        self._fleet.call(self._own, owner)
        (data,) = owner.memory.get([handle[1]], timeout_s=timeout_s)
        return data


class PeerCalls:
    def __init__(self, fleet: Calls, own: ThreadNode, other: NodeId) -> None:
        self._fleet, self._own, self._name = fleet, own, other

    def exchange(
        self, load: LoadId, consumer: Consumer, acked: Sequence[int], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        other = self._fleet.node(self._name)
        self._fleet.call(self._own, other)
        assert other.load is not None
        assert other.load.load == load
        try:
            answer = other.load.exchange(consumer, _FIRST, acked=acked, limit=limit, timeout_s=timeout_s)
        except PoolClosedError:
            answer = None
        self._fleet.call(self._own, other)  # the answer is lost where the node has gone meanwhile
        return answer

    def give_up(self) -> None:
        """Calls to a node that was given up raise by themselves."""


class HomeCalls:
    def __init__(self, fleet: Calls, node: ThreadNode, rank: Rank, generation: Generation) -> None:
        self._fleet, self._node, self._rank, self._generation = fleet, node, rank, generation

    def exchange(
        self, acked: Sequence[int], rejected: Sequence[Delivery], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        self._fleet.call(self._node, self._node)
        assert self._node.load is not None
        try:
            return self._node.load.exchange(
                rank_consumer(self._rank),
                self._generation,
                acked=acked,
                rejected=rejected,
                limit=limit,
                timeout_s=timeout_s,
            )
        except PoolClosedError:
            return None

    def retire(self) -> None:
        self._fleet.call(self._node, self._node)
        assert self._node.load is not None
        self._node.load.retire_rank(self._rank, self._generation)
