"""What the planner is told to do about an event (docs/design/0001)."""

from __future__ import annotations

from dataclasses import dataclass

from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.node_loss import Move
from megamind_ray.core.report import Fault
from megamind_ray.errors import MegamindError

__all__ = [
    "AbortLoad",
    "CompleteLoad",
    "DropNode",
    "Instruction",
    "ReadAgain",
    "ReadInstead",
    "RecordFault",
    "ReplaceWorker",
    "StartRank",
    "StartReads",
    "TakeBack",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReads:
    """Hand a node agent its program."""

    node: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """Hand a worker its program."""

    rank: Rank
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceWorker:
    """Create a new actor on the same GPU; it answers with ``WorkerReady`` of this generation."""

    rank: Rank
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAgain:
    """Read extents on a node once more, and publish only the blocks that these ranks consume, to these ranks only."""

    node: NodeId
    extents: tuple[ExtentId, ...]
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBack:
    """Ask a node for what it has not begun, but for the first ``keep_bytes`` (``ReadsTakenBack`` says what it gave)."""

    node: NodeId
    keep_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadInstead:
    """Let a node read extents that another one was to read, as if they had been planned so."""

    node: NodeId
    extents: tuple[ExtentId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropNode:
    """Give a node up: nobody hands it a block or takes one from it any more, and nothing that it says counts.

    When all others know, each rank is asked what it lacks (``NodeDropped``); ranks that moved answer ``WorkerReady``.

    Attributes:
        node: Which.
        moves: Its ranks, each with its new place.
        joins: Nodes that have a part in the load from now on.
        line: The nodes that remain, in the order in which they hand blocks on; empty: each hands to all by itself.
    """

    node: NodeId
    moves: tuple[Move, ...] = ()
    joins: tuple[NodeId, ...] = ()
    line: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFault:
    """A line for the report; the planner adds the time."""

    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteLoad:
    """All ranks are done: publish the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortLoad:
    """Stop readers and ranks, give back blocks and arenas, raise the error."""

    error: MegamindError


Instruction = (
    StartReads
    | StartRank
    | ReplaceWorker
    | ReadAgain
    | TakeBack
    | ReadInstead
    | DropNode
    | RecordFault
    | CompleteLoad
    | AbortLoad
)
