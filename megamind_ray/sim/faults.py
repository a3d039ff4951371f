"""What may go wrong in a simulation, at the user's will."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank

__all__ = ["Ended", "ExtentFault", "Failure", "LoadFault", "NodeLoss", "WorkerLoss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoss:
    """The worker of a rank dies.

    Attributes:
        rank: Whose.
        at_s: When, in seconds from the start of the load.
        noticed_after_s: Until the planner hears of it.
        restart_s: Until its successor answers.
    """

    rank: Rank
    at_s: float
    noticed_after_s: float = 1.5
    restart_s: float = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """A node goes without a word, with all that runs and lies there.

    Attributes:
        node: Which.
        at_s: When, in seconds from the start of the load.
        noticed_after_s: Until the planner gives it up: ``deadlines.silence_s`` and a look.
    """

    node: NodeId
    at_s: float
    noticed_after_s: float = 8.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentFault:
    """A node gives up on an extent, the first time it reads it.

    Attributes:
        extent: Plan id.
        node: Where.
        after_s: From its first attempt to its last.
        retryable: Whether another node is asked.
    """

    extent: ExtentId
    node: NodeId
    after_s: float = 1.0
    retryable: bool = True


LoadFault: TypeAlias = WorkerLoss | NodeLoss | ExtentFault


@dataclass(frozen=True, slots=True)
class Failure:
    """A unit that a node, or a rank on it, gave up on."""

    unit: int
    node: NodeId
    fault: ExtentFault


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's call that came to its end; ``reason`` says why, where not well."""

    rank: Rank
    generation: Generation
    reason: str | None = None
