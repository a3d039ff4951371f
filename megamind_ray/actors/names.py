"""Names of a fleet's actors in the namespace ``megamind``."""

from __future__ import annotations

from typing import Final

from megamind_ray.core.ids import NodeId

__all__ = ["NAMESPACE", "agent_name", "belongs_to", "planner_name", "worker_name"]

NAMESPACE: Final = "megamind"


def planner_name(fleet: str) -> str:
    return f"{fleet}/planner"


def agent_name(fleet: str, node: NodeId, serial: str) -> str:
    return f"{fleet}/agent/{node}/{serial}"


def worker_name(fleet: str, node: NodeId, serial: str) -> str:
    return f"{fleet}/worker/{node}/{serial}"


def belongs_to(name: str, fleet: str) -> bool:
    """Whether an actor's name is one of this fleet (fleet names have no slash, so prefixes cannot be confused)."""
    return name.startswith(f"{fleet}/")
