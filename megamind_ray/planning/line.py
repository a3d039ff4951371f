"""The line along which the nodes of a plan hand blocks to each other (docs/design/0024)."""

from __future__ import annotations

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Topology

__all__ = ["line_of"]


def line_of(topology: Topology, read_bytes: Int64Array, used: Int64Array) -> tuple[NodeId, ...]:
    """Racks one after the other, and within them nodes; those that read most come first.

    A block then crosses each uplink at most once in each direction, and what one node reads for all the others leaves
    it once: at an end of the line there is nobody on the other side.

    Args:
        topology: The hardware.
        read_bytes: By node, what it reads for the pools.
        used: Positions of the nodes that read or have ranks, ascending.

    Returns:
        The nodes; none where fewer than two are used.
    """
    if len(used) < 2:
        return ()
    nodes, racks = topology.nodes, [topology.nodes[at].rack for at in used.tolist()]
    of_rack: dict[str | None, int] = {}
    for at, rack in zip(used.tolist(), racks, strict=True):
        of_rack[rack] = of_rack.get(rack, 0) + int(read_bytes[at])
    first = {rack: place for place, rack in enumerate(sorted(of_rack, key=lambda rack: -of_rack[rack]))}
    order = sorted(used.tolist(), key=lambda at: (first[nodes[at].rack], -int(read_bytes[at]), at))
    return tuple(nodes[at].id for at in order)
