"""GPUs that a plan leaves free, for the ranks of nodes that are lost (docs/design/0026)."""

from __future__ import annotations

from megamind_ray.core.node_loss import Spare
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Topology

__all__ = ["spares_beside"]


def spares_beside(plan: Plan, topology: Topology) -> tuple[Spare, ...]:
    """The GPUs of a topology that a plan has no rank on."""
    ranks = plan.tables["ranks"]
    taken = set(zip(ranks["node"].to_pylist(), ranks["gpu"].to_pylist(), strict=True))
    return tuple(
        Spare(node=node.id, gpu=gpu.index, free_bytes=gpu.free_bytes)
        for node in topology.nodes
        for gpu in node.gpus
        if (node.id, gpu.index) not in taken
    )
