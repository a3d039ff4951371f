"""What agents and workers of a fleet have, as they say it to a planner that takes over (0027)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megamind_ray.actors.journal import Stamp
from megamind_ray.actors.messages import AgentFacts, WorkerFacts
from megamind_ray.core.ids import Generation, LoadId

__all__ = ["AgentHoldings", "WorkerHoldings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHoldings:
    """A node agent's answer.

    Attributes:
        release: Of the package that it runs.
        facts: Its node.
        loads: That are open there.
        kept_bytes: By load, what it keeps of it.
        stamp: Of its copy of the journal.
        has_transfer: Whether that has what the load under way moves.
        abandoned: Tickets of loads that nobody waits for any more.
    """

    release: str
    facts: AgentFacts
    loads: frozenset[LoadId] = frozenset()
    kept_bytes: Mapping[LoadId, int] = field(default_factory=dict)
    stamp: Stamp = field(default_factory=Stamp)
    has_transfer: bool = False
    abandoned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHoldings:
    """A GPU worker's answer.

    Attributes:
        release: Of the package that it runs.
        facts: Its GPU.
        ranks: By load, the generation of the rank that it has, whole or not.
    """

    release: str
    facts: WorkerFacts
    ranks: Mapping[LoadId, Generation] = field(default_factory=dict)
