"""How blocks go from node to node in a simulated load: where ranks live, who reads, along which line."""

from __future__ import annotations

from collections.abc import Iterable

from megamind_ray.core.ids import NodeId
from megamind_ray.core.instructions import DropNode
from megamind_ray.core.line import Line
from megamind_ray.sim.work import Unit, Work

__all__ = ["Routes"]


class Routes:
    """The ways of a load as they are now (``actors.rerouting`` does the same with the plan).

    Attributes:
        homes: By rank its node.
        line: Along which blocks are handed on.

    Args:
        work: As it was planned.
    """

    def __init__(self, work: Work) -> None:
        self.homes = list(work.node_of_rank)
        self.line = work.line
        self._pool_units = [unit for unit in work.units if unit.rank is None]
        self._reader = {unit.unit: unit.node for unit in self._pool_units}
        # With those that are lost: what they cut may still be handed on by others.
        self._order = work.line.order
        self._lost: set[NodeId] = set()

    def give(self, reader: NodeId, units: Iterable[Unit]) -> dict[NodeId, list[NodeId]]:
        """Changes who reads some units; by node, from whom it is to take their blocks."""
        units = list(units)
        self._reader |= {unit.unit: reader for unit in units}
        return self._sources(units, self.line)

    def drop(self, drop: DropNode) -> dict[NodeId, list[NodeId]]:
        """Goes past a node that was given up; by node, from whom it is to take blocks by now."""
        self._lost.add(drop.node)
        for move in drop.moves:
            self.homes[move.rank] = move.node
        if self._order:
            self._order = (*self._order, *(node for node in drop.joins if node not in self._order))
        self.line = Line(drop.line)
        return self._sources(self._pool_units, Line(self._order))

    def _sources(self, units: Iterable[Unit], line: Line) -> dict[NodeId, list[NodeId]]:
        homes = {
            (self._reader[unit.unit], frozenset(self.homes[rank] for rank in block.bytes_of))
            for unit in units
            for block in unit.blocks
        }
        hops = {hop for reader, needing in homes for hop in line.hops(reader, needing)}
        found: dict[NodeId, list[NodeId]] = {}
        for source, target in sorted(hops):
            if not {source, target} & self._lost:
                found.setdefault(target, []).append(source)
        return found
