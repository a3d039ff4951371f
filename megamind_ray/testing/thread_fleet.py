"""A fleet of threads in this process: real agents, ranks and load machine, no Ray; what is to go wrong is chosen.

Every node has a wire of its own, so that its blocks go with it. The planner's part is in ``testing.thread_planner``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from megamind_ray.actors.transfer import Transfer
from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core.ids import NodeId
from megamind_ray.testing.strikes import NodeStrike, PlannerStrike, SlowStorage, Strike, WorkerStrike
from megamind_ray.testing.thread_nodes import ThreadNode
from megamind_ray.testing.thread_planner import ThreadPlanner

__all__ = ["ThreadFleet"]

_BOUND_S: Final = 60.0
_LOOK_S: Final = 0.01


class ThreadFleet(ThreadPlanner):
    """Runs one load.

    Attributes:
        machine: Decides.
        log: What it was told, and said.
        sessions: By rank, the latest one.
        error: Why the load was given up; None while it was not.

    Args:
        transfer: What to move.
        config: Of the load.
        strikes: What is to go wrong.
        blind: Nodes that cannot see the files.
        storage: How nodes read, and the clock by which readers are slow; None: as they can, and none is.
        shaken: Delays and repeats calls at random, by this seed; None: does not.
    """

    def __init__(
        self,
        transfer: Transfer,
        config: Config,
        *,
        strikes: Sequence[Strike] = (),
        blind: Sequence[NodeId] = (),
        storage: SlowStorage | None = None,
        shaken: int | None = None,
    ) -> None:
        dies_after = [one.after for one in strikes if isinstance(one, PlannerStrike)]
        super().__init__(transfer, config, dies_after=dies_after, blind=blind, storage=storage, shaken=shaken)
        self._lock = threading.Lock()
        self._num_calls = 0
        falls = [one for one in strikes if not isinstance(one, PlannerStrike)]
        self._strikes = deque(sorted(falls, key=lambda one: one.after))
        self._doomed: dict[NodeId, NodeStrike] = {}

    def settle(self) -> dict[NodeId, int]:
        """Waits until nothing of the load is in the pools of nodes that took part to its end.

        Returns:
            Bytes that are still reserved, by node; none after a load that leaks nothing.
        """
        until_s = time.monotonic() + _BOUND_S
        while (left := self._reserved()) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        return left

    def close(self) -> None:
        """Ends the load on all nodes."""
        self._stop.set()
        for run in self._runs.values():
            run.load.stop()
        for node in self._nodes.values():
            assert node.load is not None
            node.load.close()

    @property
    def live_bytes(self) -> dict[NodeId, int]:
        """Bytes of blocks that something keeps, of all nodes."""
        return {name: size for name, node in self._nodes.items() if (size := node.memory.live_bytes)}

    def call(self, caller: ThreadNode, callee: ThreadNode) -> None:
        """A call between two actors comes to its node: strikes fall, it takes its time, or it comes to nothing."""
        due: list[NodeStrike | WorkerStrike] = []
        with self._lock:
            self._num_calls += 1
            while self._strikes and self._strikes[0].after <= self._num_calls:
                due.append(self._strikes.popleft())
            pause_s = self._random.choice((0.0, 0.0, 0.0, 0.002)) if self._is_shaken else 0.0
        for strike in due:
            self._strike(strike)
        if pause_s:
            time.sleep(pause_s)
        for node in (caller, callee):
            node.require_answer(self._stop)

    def _opened(self, name: NodeId) -> None:
        if name in self._doomed:
            self._strike(self._doomed.pop(name))

    def _strike(self, strike: NodeStrike | WorkerStrike) -> None:
        if isinstance(strike, WorkerStrike):
            run = self._runs.get(strike.rank)
            if run is not None:
                run.has_died = True
                run.load.stop()
                lost = ev.WorkerLost(rank=strike.rank, generation=run.load.generation, reason="it died")
                self._later(strike.noticed_after_s, lambda: self._events.put(lost))
            return
        node = self._nodes.get(strike.node)
        if node is None:  # it has no part yet; should it come to join, it will be found gone
            self._doomed[strike.node] = strike
            return
        if strike.kind == "crash":
            self._crash(node)
        elif strike.kind == "freeze":
            node.is_frozen.set()
        gone = ev.AgentLost(node=strike.node, reason=strike.kind)
        self._later(strike.noticed_after_s, lambda: self._events.put(gone))

    def _crash(self, node: ThreadNode) -> None:
        node.has_crashed.set()
        assert node.load is not None
        threading.Thread(target=node.load.close, daemon=True).start()
        for run in list(self._runs.values()):
            if run.node == node.node:
                run.load.stop()
