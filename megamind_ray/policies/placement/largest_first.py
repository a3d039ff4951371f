"""Largest-First: the largest rank goes to the emptiest GPU, and so on. Balances memory and nothing else."""

from __future__ import annotations

from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest, Seat
from megamind_ray.policies.placement.domains import slots

__all__ = ["LargestFirst"]


class LargestFirst:
    """Ranks in decreasing bytes, GPUs in decreasing free memory."""

    name = "largest_first"

    def place(self, request: PlacementRequest) -> PlacementDecision:
        """See ``PlacementPolicy``. Complete: if this pairing does not fit, none does."""
        emptiest = sorted(slots(request.topology), key=lambda slot: -slot.gpu.free_bytes)
        ranks = sorted(request.parallel.ranks, key=lambda rank: -request.rank_bytes[rank])
        seats: list[Seat | None] = [None] * len(ranks)
        for rank, slot in zip(ranks, emptiest, strict=False):
            if slot.gpu.free_bytes >= request.rank_bytes[rank]:
                seats[rank] = Seat(node=slot.node.id, gpu=slot.gpu.index, reason="largest rank on the emptiest GPU")
        return PlacementDecision(seats=tuple(seats))
