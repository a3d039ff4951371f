"""What came of draining a node. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megamind_ray.core.ids import ModelName, NodeId

__all__ = ["DrainReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """A node that the fleet has left: nothing of the fleet runs there or is kept there alone.

    Attributes:
        fleet: Which fleet.
        node: Ray's id of the node.
        address: Its IP address.
        copied_blocks, copied_bytes: Kept blocks that it alone had, and that others have now.
        holders: By node, the bytes that it took over.
        lost_blocks, lost_bytes: Those that were given up (``force``): the next load of their checkpoint reads storage.
        unloaded: Models that had ranks there (``force``).
        seconds: From the request to its end; ``waited_s`` of them for a load that was under way.
        notes: What else to know, in words.
    """

    fleet: str
    node: NodeId
    address: str
    copied_blocks: int = 0
    copied_bytes: int = 0
    holders: Mapping[NodeId, int] = field(default_factory=dict)
    lost_blocks: int = 0
    lost_bytes: int = 0
    unloaded: tuple[ModelName, ...] = ()
    seconds: float = 0.0
    waited_s: float = 0.0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)
