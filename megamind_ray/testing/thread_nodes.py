"""Nodes of a fleet of threads: their agents, their wires, and calls between them that may come to nothing."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from megamind_ray.actors.agent_load import AgentLoad
from megamind_ray.actors.block_pool import PoolClosedError
from megamind_ray.actors.messages import Consumer, Delivery, rank_consumer
from megamind_ray.actors.rank_load import RankLoad
from megamind_ray.core import events as ev
from megamind_ray.core.ids import Generation, LoadId, NodeId, Rank
from megamind_ray.errors import ClusterError, MegamindError
from megamind_ray.testing.fakes import MemoryPlane

__all__ = ["Calls", "HomeCalls", "NodeWire", "PeerCalls", "ThreadNode", "ThreadRank"]

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


class ThreadRank:
    """A generation of a rank: its load runs on a thread, and what it came to is there for every planner that asks.

    Attributes:
        load: Of the rank.
        node: Where it is.
        generation: Which.
        has_died: Its worker did.
    """

    def __init__(self, load: RankLoad, rank: Rank, home: ThreadNode) -> None:
        self.load = load
        self.node = home.node
        self.generation = load.generation
        self.has_died = False
        self._rank, self._home = rank, home
        self._came_to: ev.Event | None = None
        self._ended = threading.Event()

    def begin(self, agent: HomeCalls, stop: threading.Event, broken: list[str]) -> None:
        """Starts the thread.

        Args:
            agent: Of its node.
            stop: Set when the load ends.
            broken: Takes the text of an error that should not be.
        """
        threading.Thread(target=self._fill, args=(agent, stop, broken), daemon=True).start()

    def wait(self, timeout_s: float) -> ev.Event | None:
        """What it came to; None where it was stopped, or that takes longer."""
        self._ended.wait(timeout_s)
        if self.has_died and not self._home.has_crashed.is_set():
            return ev.WorkerLost(rank=self._rank, generation=self.generation, reason="it died")
        return self._came_to

    def _fill(self, agent: HomeCalls, stop: threading.Event, broken: list[str]) -> None:
        try:
            self.load.receive(agent)
            self._came_to = ev.RankDone(rank=self._rank, generation=self.generation)
        except MegamindError as error:
            # As the driver does: a rank that fails with its node is lost with it.
            if self._home.has_crashed.is_set():
                self._came_to = ev.AgentLost(node=self.node, reason=str(error))
            elif not self.load.is_stopped and not stop.is_set():
                self._came_to = ev.RankFailed(rank=self._rank, generation=self.generation, error=error)
        except Exception:  # noqa: BLE001 - nobody is above this thread; ``ThreadFleet.run`` shows it
            broken.append(traceback.format_exc())
        finally:
            self._ended.set()
