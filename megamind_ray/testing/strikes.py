"""What is to go wrong with a fleet of threads (``testing.thread_fleet``), and storage that is slow for some nodes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

from megamind_ray.core.ids import NodeId, Rank
from megamind_ray.testing.injection import InjectingStorage, Read

__all__ = ["NodeStrike", "PlannerStrike", "SlowStorage", "Strike", "WorkerStrike"]

_READS_PER_S: Final = 10
_BOUND_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStrike:
    """A node goes.

    Attributes:
        after: So many calls between actors were made before.
        node: Which.
        kind: ``crash``: whoever asks it hears so at once. ``freeze``: nobody gets an answer, and once it was given up
            it goes on as if nothing had happened. ``cut_off``: it lives and works, but the planner gives it up.
        noticed_after_s: Until the planner hears of it.
    """

    after: int
    node: NodeId
    kind: Literal["crash", "freeze", "cut_off"] = "crash"
    noticed_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStrike:
    """The worker of a rank dies, wherever the rank lives by then."""

    after: int
    rank: Rank
    noticed_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStrike:
    """The planner dies in the middle of whatever it does, and a successor takes over.

    Attributes:
        after: So many steps of planners were made before: an order to a node, a start of a rank, an event taken.
    """

    after: int


Strike: TypeAlias = NodeStrike | WorkerStrike | PlannerStrike


class SlowStorage:
    """Storage of all nodes, ``times`` as slow for some: by counting reads, so that no machine is too slow for it.

    Attributes:
        by_node: What each node opens files with; all that was read of them is in there.

    Args:
        nodes: All.
        slow: Those that wait; each of their reads, for ``times`` reads of all others that do not.
        times: See above.
    """

    def __init__(self, nodes: list[NodeId], slow: list[NodeId], times: int = 10) -> None:
        self.by_node = {node: InjectingStorage(damage=partial(self._answered, is_slow=node in slow)) for node in nodes}
        self._times = times
        self._num_fast = self._num_slow = 0
        self._changed = threading.Condition()

    def now_s(self) -> float:
        """A clock that goes by reads."""
        with self._changed:
            return (self._num_fast + self._num_slow) / _READS_PER_S

    def _answered(self, _read: Read, *, is_slow: bool) -> None:
        """A node has read something; a slow one learns it later."""
        with self._changed:
            if is_slow:
                # With nobody left who reads faster, it takes its time.
                until = self._num_fast + self._times
                self._changed.wait_for(lambda: self._num_fast >= until, _BOUND_S)
                self._num_slow += 1
            else:
                self._num_fast += 1
            self._changed.notify_all()
