"""A plan as nodes are given up or relieved: where ranks live, who reads, from whom nodes take blocks (0026, 0029)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from megamind_ray.actors.messages import Reroute
from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import ExtentId, NodeId, Rank
from megamind_ray.core.instructions import DropNode, ReadInstead
from megamind_ray.core.plan import TABLES, Plan
from megamind_ray.planning import relay_sources

__all__ = ["Routes", "extents_of"]


class Routes:
    """What is left of a plan, and how its blocks go.

    Attributes:
        plan: With its ranks where they live now, read by whom it is by now, and the line as it is.

    Args:
        plan: As it was made.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # With those that are lost: what they cut may still be handed on by others.
        self._order = plan.line
        self._lost: set[NodeId] = set()

    def drop(self, drop: DropNode, nodes: Sequence[NodeId]) -> dict[NodeId, Reroute]:
        """Changes the plan; what each of the nodes that remain is to be told.

        Args:
            drop: What the load machine said.
            nodes: Those that remain, with those that join.
        """
        self._lost.add(drop.node)
        homes = {move.rank: move.node for move in drop.moves}
        if self._order:
            self._order = (*self._order, *(node for node in drop.joins if node not in self._order))
        places = {move.rank: (move.node, move.gpu) for move in drop.moves}
        self.plan = replace(_moved(self.plan, places), line=drop.line)
        sources = relay_sources(replace(self.plan, line=self._order), nodes)
        # What is under way to ranks that moved may come from anywhere.
        anywhere = {*homes.values(), *drop.joins}
        return {
            node: Reroute(
                lost=drop.node,
                homes=homes,
                line=drop.line,
                sources=self._living(nodes if node in anywhere else sources[node], beside=node),
            )
            for node in nodes
        }

    def give(self, reads: ReadInstead, nodes: Sequence[NodeId]) -> dict[NodeId, tuple[NodeId, ...]]:
        """Changes who reads some extents; by node, from whom it is to take their blocks.

        Args:
            reads: What the load machine said.
            nodes: Those that have a part in the load.
        """
        self.plan = _read_by(self.plan, reads)
        blocks = self.plan.tables["blocks"]
        moved = blocks.filter(pa.array(np.isin(blocks["extent"].to_numpy(), np.array(reads.extents, np.int64))))
        sources = relay_sources(replace(self.plan, tables={**self.plan.tables, "blocks": moved}), nodes)
        return {node: living for node in nodes if (living := self._living(sources[node], beside=node))}

    def _living(self, nodes: Collection[NodeId], *, beside: NodeId) -> tuple[NodeId, ...]:
        return tuple(node for node in nodes if node not in self._lost and node != beside)


def extents_of(plan: Plan, blocks: Int64Array) -> tuple[ExtentId, ...]:
    """The extents that blocks are cut from, ascending."""
    found = np.unique(plan.tables["blocks"]["extent"].to_numpy()[blocks])
    return tuple(ExtentId(extent) for extent in found.tolist())


def _read_by(plan: Plan, reads: ReadInstead) -> Plan:
    """The plan with some extents read by another node."""
    extents = plan.tables["extents"]
    nodes = extents["node"].to_pylist()
    for extent in reads.extents:
        nodes[extent] = reads.node
    columns = {name: extents[name] for name in extents.column_names} | {
        "node": pa.array(nodes, pa.string()).dictionary_encode()
    }
    return replace(plan, tables={**plan.tables, "extents": pa.table(columns).cast(TABLES["extents"])})


def _moved(plan: Plan, places: Mapping[Rank, tuple[NodeId, int]]) -> Plan:
    """The plan with some ranks on other GPUs."""
    ranks = plan.tables["ranks"]
    nodes, gpus = ranks["node"].to_pylist(), ranks["gpu"].to_pylist()
    for rank, place in places.items():
        nodes[rank], gpus[rank] = place
    columns = {name: ranks[name] for name in ranks.column_names} | {
        "node": pa.array(nodes, pa.string()).dictionary_encode(),
        "gpu": pa.array(gpus, pa.int32()),
    }
    return replace(plan, tables={**plan.tables, "ranks": pa.table(columns).cast(TABLES["ranks"])})
