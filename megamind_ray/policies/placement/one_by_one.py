"""Ranks placed one by one, whatever belongs together: the last resort of placement."""

from __future__ import annotations

from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest, Seat
from megamind_ray.policies.placement.domains import slots

__all__ = ["one_by_one"]


def one_by_one(request: PlacementRequest) -> PlacementDecision:
    """Largest rank first, each on the smallest free GPU that holds it: complete whenever any placement is."""
    free = sorted(slots(request.topology), key=lambda slot: slot.gpu.free_bytes)
    seats: dict[int, Seat] = {}
    for rank in sorted(request.parallel.ranks, key=lambda rank: -request.rank_bytes[rank]):
        position = next((i for i, slot in enumerate(free) if slot.gpu.free_bytes >= request.rank_bytes[rank]), None)
        if position is not None:
            best = free.pop(position)
            reason = "smallest GPU that holds it; no placement that keeps gangs together fits"
            seats[rank] = Seat(node=best.node.id, gpu=best.gpu.index, reason=reason)
    return PlacementDecision(seats=tuple(seats.get(rank) for rank in request.parallel.ranks))
