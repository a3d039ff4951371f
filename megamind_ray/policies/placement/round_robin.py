"""Round-Robin: ranks are dealt over the nodes in turns. What a scheduler that spreads its actors does."""

from __future__ import annotations

from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest, Seat
from megamind_ray.policies.placement.domains import Slot, slots

__all__ = ["RoundRobin"]


class RoundRobin:
    """Ranks in order, nodes in turns, on each the first GPU that holds the rank."""

    name = "round_robin"

    def place(self, request: PlacementRequest) -> PlacementDecision:
        """See ``PlacementPolicy``."""
        free: list[list[Slot]] = [[] for _ in request.topology.nodes]
        for slot in slots(request.topology):
            free[slot.node_index].append(slot)
        seats: list[Seat | None] = []
        turn = 0
        for need in request.rank_bytes:
            seat: Seat | None = None
            for step in range(len(free)):
                node = free[(turn + step) % len(free)]
                first = next((slot for slot in node if slot.gpu.free_bytes >= need), None)
                if first is not None:
                    node.remove(first)
                    seat = Seat(node=first.node.id, gpu=first.gpu.index, reason="the next node's first GPU with room")
                    turn += step + 1
                    break
            seats.append(seat)
        return PlacementDecision(seats=tuple(seats))
