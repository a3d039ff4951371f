"""What a load moves, and what came of it: between the planner, which decides, and the driver, which has it done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megamind_ray.actors.messages import AgentStatus, RankResult
from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import Generation, LoadId, NodeId, Rank
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.plan import Plan
from megamind_ray.core.report import Fault

__all__ = ["Transfer", "TransferResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What to move.

    Attributes:
        load: Its id.
        plan: The validated plan.
        manifest: Of the checkpoint.
        credit_bytes: Per node, what its pool may hold of this load at a time.
        keep_blocks: Per node, the blocks that stay.
    """

    load: LoadId
    plan: Plan
    manifest: Manifest
    credit_bytes: Mapping[NodeId, int]
    keep_blocks: Mapping[NodeId, Int64Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """What came of it.

    Attributes:
        ranks: By rank.
        agents: By node.
        faults: What the load machine did about, in order.
        generations: Of each rank at the end.
        workers: The actors that hold the ranks.
    """

    ranks: tuple[RankResult, ...]
    agents: Mapping[NodeId, AgentStatus]
    faults: tuple[Fault, ...]
    generations: Mapping[Rank, Generation]
    workers: Mapping[Rank, Any]
