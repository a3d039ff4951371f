"""What a load moves, and what came of it: between the planner, which decides, and the driver, which has it done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc

from megamind_ray.actors.messages import AgentStatus, RankResult
from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import ExtentId, Generation, LoadId, NodeId, Rank
from megamind_ray.core.load_machine import LoadFacts
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.node_loss import Spare
from megamind_ray.core.plan import Plan
from megamind_ray.core.program import AgentProgram
from megamind_ray.core.report import Fault
from megamind_ray.planning import compile_agent, load_facts

__all__ = ["Transfer", "TransferResult", "bytes_by_rank"]

_NOTHING: Final[Int64Array] = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What to move.

    Attributes:
        load: Its id.
        plan: The validated plan.
        manifest: Of the checkpoint.
        credit_bytes: Per node, what its pool may hold of this load at a time; also of nodes that may come to join.
        keep_blocks: Per node, the blocks that stay.
        readers: Nodes of the fleet that can read the checkpoint; empty: those of the plan.
        spares: GPUs of the fleet without a rank of the plan.
    """

    load: LoadId
    plan: Plan
    manifest: Manifest
    credit_bytes: Mapping[NodeId, int]
    keep_blocks: Mapping[NodeId, Int64Array]
    readers: tuple[NodeId, ...] = ()
    spares: tuple[Spare, ...] = ()

    def facts(self, *, max_worker_restarts: int) -> LoadFacts:
        """What the load's machine needs to know."""
        ranks = self.plan.tables["ranks"]
        return replace(
            load_facts(self.plan, max_worker_restarts=max_worker_restarts),
            home=tuple(map(NodeId, ranks["node"].to_pylist())),
            arena_bytes=tuple(ranks["arena_bytes"].to_pylist()),
            line=self.plan.line,
            readers=self.readers,
            spares=self.spares,
        )

    def agent_program(
        self, node: NodeId, *, extents: Collection[ExtentId] | None = None, ranks: Collection[Rank] | None = None
    ) -> AgentProgram:
        """What a node's agent does, or a fragment of that (see ``compile_agent``)."""
        return compile_agent(
            self.plan,
            self.manifest,
            node,
            self.load,
            credit_bytes=self.credit_bytes[node],
            keep_blocks=self.keep_blocks.get(node, _NOTHING),
            extents=extents,
            ranks=ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """What came of it.

    Attributes:
        plan: With its ranks where they live now.
        ranks: By rank.
        agents: By node.
        faults: What the load machine did about, in order.
        generations: Of each rank at the end.
        workers: The actors that hold the ranks.
    """

    plan: Plan
    ranks: tuple[RankResult, ...]
    agents: Mapping[NodeId, AgentStatus]
    faults: tuple[Fault, ...]
    generations: Mapping[Rank, Generation]
    workers: Mapping[Rank, Any]


def bytes_by_rank(plan: Plan) -> dict[Rank, int]:
    """What each rank holds when all has arrived."""
    views = plan.tables["views"]
    own = views.filter(pc.invert(views["alias"]))
    total = dict.fromkeys((Rank(rank) for rank in plan.parallel.ranks), 0)
    for row in own.group_by("rank").aggregate([("nbytes", "sum")]).to_pylist():
        total[Rank(row["rank"])] = row["nbytes_sum"]
    return total
