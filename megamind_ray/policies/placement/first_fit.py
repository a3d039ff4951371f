"""First-Fit: each rank, in order, takes the first GPU that holds it. The baseline that Best-Fit is compared with."""

from __future__ import annotations

from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest, Seat

__all__ = ["FirstFit"]


class FirstFit:
    """Ranks in order, GPUs in the order of the topology, no regard for links."""

    name = "first_fit"

    def place(self, request: PlacementRequest) -> PlacementDecision:
        """See ``PlacementPolicy``."""
        free = [(node.id, gpu) for node in request.topology.nodes for gpu in node.gpus]
        seats: list[Seat | None] = []
        for need in request.rank_bytes:
            position = next((i for i, (_, gpu) in enumerate(free) if gpu.free_bytes >= need), None)
            if position is None:
                seats.append(None)
                continue
            node_id, gpu = free.pop(position)
            seats.append(
                Seat(node=node_id, gpu=gpu.index, reason="first GPU in topology order with enough free memory")
            )
        return PlacementDecision(seats=tuple(seats))
