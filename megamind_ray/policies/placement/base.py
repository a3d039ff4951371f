"""The question a placement policy answers, and the form of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megamind_ray.core.ids import NodeId
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Topology
from megamind_ray.policies.costs import TransferCosts, TransferLoad

__all__ = ["PlacementDecision", "PlacementPolicy", "PlacementRequest", "Seat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What a placement policy sees.

    Attributes:
        parallel: The mesh.
        rank_bytes: Device memory that each rank needs, by rank.
        topology: The hardware; ``Gpu.free_bytes`` bounds what may go on a GPU.
        costs: What bytes cost on it; None where only what fits is asked.
        load: Which bytes ranks need; None with ``costs``.
    """

    parallel: Parallel
    rank_bytes: tuple[int, ...]
    topology: Topology
    costs: TransferCosts | None = None
    load: TransferLoad | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The GPU proposed for a rank, and why that one."""

    node: NodeId
    gpu: int
    reason: str

    def __str__(self) -> str:
        return f"{self.node}:{self.gpu}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """A proposal.

    Attributes:
        seats: By rank; None where the policy found no GPU for it.
    """

    seats: tuple[Seat | None, ...]

    @property
    def unplaced(self) -> tuple[int, ...]:
        """Ranks without a GPU, ascending."""
        return tuple(rank for rank, seat in enumerate(self.seats) if seat is None)


class PlacementPolicy(Protocol):
    """Proposes a GPU for each rank. Pure: equal requests get equal decisions."""

    @property
    def name(self) -> str:
        """Name in the configuration, for messages."""
        ...

    def place(self, request: PlacementRequest) -> PlacementDecision:
        """Proposes; never raises because something does not fit, but leaves ranks unplaced."""
        ...
