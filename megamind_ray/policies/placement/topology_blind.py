"""Best-Fit Decreasing by memory alone: no gangs, no links, no disks. Shows what looking at the topology is worth."""

from __future__ import annotations

from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest, Seat
from megamind_ray.policies.placement.domains import slots

__all__ = ["TopologyBlind"]


class TopologyBlind:
    """Ranks in decreasing bytes, each on the GPU with the least memory that holds it."""

    name = "topology_blind"

    def place(self, request: PlacementRequest) -> PlacementDecision:
        """See ``PlacementPolicy``. Complete whenever any placement is."""
        tightest = sorted(slots(request.topology), key=lambda slot: slot.gpu.free_bytes)
        seats: list[Seat | None] = [None] * request.parallel.world
        for rank in sorted(request.parallel.ranks, key=lambda rank: -request.rank_bytes[rank]):
            need = request.rank_bytes[rank]
            position = next((i for i, slot in enumerate(tightest) if slot.gpu.free_bytes >= need), None)
            if position is not None:
                slot = tightest.pop(position)
                reason = "the GPU with the least free memory that holds it"
                seats[rank] = Seat(node=slot.node.id, gpu=slot.gpu.index, reason=reason)
        return PlacementDecision(seats=tuple(seats))
