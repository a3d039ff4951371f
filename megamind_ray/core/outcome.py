"""What a layout on some hardware comes to, for comparing several of them. Pure data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megamind_ray.core.parallel import Parallel

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case comes to.

    Attributes:
        case: Its label.
        parallel: Its mesh.
        topology: Name of its hardware.
        fits: Whether it can be loaded so.
        problem: Why not, in one sentence or two.
        seconds: Predicted; None where it does not fit.
        lower_bound_s: What this plan cannot beat.
        bottleneck: In words.
        bytes_from_storage: Read.
        bytes_over_network: Between nodes.
        largest_rank_bytes: Device memory that the fullest GPU needs.
        num_nodes: Nodes that hold ranks.
    """

    case: str
    parallel: Parallel
    topology: str
    fits: bool
    problem: str = ""
    seconds: float | None = None
    lower_bound_s: float | None = None
    bottleneck: str = ""
    bytes_from_storage: int = 0
    bytes_over_network: int = 0
    largest_rank_bytes: int = 0
    num_nodes: int = 0

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)
