"""Names of a fleet's actors in the namespace ``megamind``, and of its models."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from megamind_ray.core.ids import ModelName, NodeId, model_name

__all__ = [
    "NAMESPACE",
    "agent_name",
    "belongs_to",
    "free_model_name",
    "is_agent",
    "is_member",
    "nursery_name",
    "planner_name",
    "worker_name",
]

NAMESPACE: Final = "megamind"


def planner_name(fleet: str) -> str:
    return f"{fleet}/planner"


def nursery_name(fleet: str) -> str:
    return f"{fleet}/nursery"


def agent_name(fleet: str, node: NodeId, serial: str) -> str:
    return f"{fleet}/agent/{node}/{serial}"


def worker_name(fleet: str, node: NodeId, serial: str) -> str:
    return f"{fleet}/worker/{node}/{serial}"


def belongs_to(name: str, fleet: str) -> bool:
    """Whether an actor's name is one of this fleet (fleet names have no slash, so prefixes cannot be confused)."""
    return name.startswith(f"{fleet}/")


def is_agent(name: str, fleet: str) -> bool:
    """Whether an actor's name is that of a node agent of this fleet."""
    return name.startswith(f"{fleet}/agent/")


def is_member(name: str, fleet: str, lineage: str) -> bool:
    """Whether an actor's name is that of a node agent or a GPU worker of this fleet, started by this lineage.

    Serials begin with the lineage; without one, they have no hyphen.
    """
    serial = name.rpartition("/")[2]
    own = serial.startswith(lineage) if lineage else "-" not in serial
    return own and name.startswith((f"{fleet}/agent/", f"{fleet}/worker/"))


def free_model_name(uri: str, taken: Collection[ModelName]) -> ModelName:
    """A name for a model that was given none: the last part of its URI, with a number where that is taken."""
    stem = uri.rstrip("/").rsplit("/", 1)[-1].removesuffix(".safetensors") or "model"
    stem = "".join(char if char.isalnum() or char in "._-" else "-" for char in stem)[:100].lstrip("._-") or "model"
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, len(taken) + 2))
    return next(model_name(name) for name in names if name not in taken)
