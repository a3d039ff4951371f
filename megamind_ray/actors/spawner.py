"""What a fleet needs of whatever starts its actors, and knows of the nodes that they run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from megamind_ray.actors.fencing import Epoch
from megamind_ray.actors.messages import Lifetime
from megamind_ray.core.ids import NodeId

__all__ = ["NodeResources", "Spawner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """What Ray says of a living node.

    Attributes:
        node: Ray's node id.
        address: IP address.
        num_gpus: GPUs, physical or logical.
        free_gpus: Not taken by any actor.
        pool_used_bytes: Of its object store, by whomever.
        host: Name of its host.
        is_head: Whether Ray's head runs there.
    """

    node: NodeId
    address: str
    num_gpus: int
    free_gpus: int
    pool_used_bytes: int = 0
    host: str = ""
    is_head: bool = False


class Spawner(Protocol):
    """Makes actors and knows the nodes; the one implementation is in ``actors.runtime``.

    Handles that it gives carry the epoch of the planner whose spawner it is.

    Attributes:
        lineage: Stands in the names of its actors, where they end with the driver that started them; else empty.
    """

    lineage: str

    def take_command(self, epoch: Epoch) -> None:
        """From now on orders carry this epoch; who is told that it is over ends this process."""

    def members(self) -> list[tuple[str, Any]]:
        """Name and bare handle of the agents and workers that the fleet has, whoever started them."""

    def nodes(self) -> list[NodeResources]:
        """Living nodes, in a stable order."""

    def here(self) -> NodeId:
        """The node of this process."""

    def agent(self, name: str, node: NodeId, lifetime: Lifetime) -> Any:
        """Starts a node agent there; returns its handle at once."""

    def worker(self, name: str, node: NodeResources, lifetime: Lifetime, device_memory_bytes: int | None) -> Any:
        """Starts a GPU worker there; Ray chooses which of the free GPUs it gets."""

    def kill(self, handle: Any) -> None:
        """Ends an actor: at its word where it answers, so that a planner that was succeeded ends nobody, else by force.

        Returns at once.
        """
