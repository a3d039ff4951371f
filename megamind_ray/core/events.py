"""What can happen to a load (docs/design/0001)."""

from __future__ import annotations

from dataclasses import dataclass

from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.node_loss import Lacking
from megamind_ray.core.stragglers import ReaderPace
from megamind_ray.errors import MegamindError

__all__ = [
    "AgentFailed",
    "AgentLost",
    "CancelRequested",
    "DeadlinePassed",
    "Event",
    "ExtentFailed",
    "LoadStarted",
    "NodeDropped",
    "PlannerRestarted",
    "RankDone",
    "RankFailed",
    "ReaderSlow",
    "ReadsTakenBack",
    "WorkerLost",
    "WorkerReady",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStarted:
    """The plan is valid and all workers and agents answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The actor of a rank died, or was silent past its deadline."""

    rank: Rank
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A new actor of a rank answered; its arena is empty."""

    rank: Rank
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDone:
    """Every byte of a rank arrived once and was verified."""

    rank: Rank
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A rank cannot go on, and another try would not help."""

    rank: Rank
    generation: Generation
    error: MegamindError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentFailed:
    """A node (its agent, or a rank on it for a direct extent) gave up on an extent after its own retries."""

    extent: ExtentId
    node: NodeId
    error: MegamindError
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """The agent of a node died, or was silent past its deadline."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDropped:
    """All that remain know that a node was given up; what of theirs had not arrived by then.

    Attributes:
        node: The one that was given up.
        lacking: By rank; one that still loads and is not in here did not answer.
    """

    node: NodeId
    lacking: tuple[Lacking, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSlow:
    """A node would read for much longer than all would if what is left were shared out anew.

    Attributes:
        node: Which.
        paces: Of all who read, the slow one among them.
    """

    node: NodeId
    paces: tuple[ReaderPace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadsTakenBack:
    """A node was asked for what it had not begun: these extents it will not read any more."""

    node: NodeId
    extents: tuple[ExtentId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFailed:
    """The agent of a node lives, but cannot go on with this load."""

    node: NodeId
    error: MegamindError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRestarted:
    """The planner was lost; its successor has told all that are left that it is the one to obey.

    Attributes:
        reason: How it was lost.
        lacking: What of each rank had not arrived by then; one that loads and is not in here did not answer.
    """

    reason: str
    lacking: tuple[Lacking, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """The user, or the end of the driver."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """The load, or a phase of it, took longer than allowed."""

    what: str


Event = (
    LoadStarted
    | WorkerLost
    | WorkerReady
    | RankDone
    | RankFailed
    | ExtentFailed
    | AgentLost
    | NodeDropped
    | ReaderSlow
    | ReadsTakenBack
    | PlannerRestarted
    | AgentFailed
    | CancelRequested
    | DeadlinePassed
)
