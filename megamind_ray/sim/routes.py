"""How blocks go from node to node in a simulated load: where ranks live, and along which line; both may change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megamind_ray.core.ids import NodeId
from megamind_ray.core.line import Line
from megamind_ray.sim.work import Unit

__all__ = ["Routes"]


class Routes:
    """The ways of a load as they are now.

    Attributes:
        homes: By rank its node.
        line: Along which blocks are handed on.
    """

    def __init__(self, homes: Sequence[NodeId], line: Line) -> None:
        self.homes = list(homes)
        self.line = line

    def hops(self, reader: NodeId, units: Iterable[Unit]) -> list[tuple[NodeId, NodeId]]:
        """(from, to) of every hand-over of the units' blocks, where ``reader`` reads them."""
        needing = {frozenset(self.homes[rank] for rank in block.bytes_of) for unit in units for block in unit.blocks}
        return sorted({hop for homes in needing for hop in self.line.hops(reader, homes)})
