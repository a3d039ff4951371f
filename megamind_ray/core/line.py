"""Nodes in a line, along which they hand blocks to each other (docs/design/0024), for actors and simulator alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from megamind_ray.core.exchange import RELAY_SHARE
from megamind_ray.core.ids import NodeId, Rank

__all__ = ["Budget", "Line", "credit_limits"]

Budget = Literal["read", "up", "down"]
"""What a block's bytes in a pool count as: cut there, or on their way up or down the line, so from below or above."""


class Line:
    """The order of a load's nodes. A block goes from the node that cuts it to those that need it in both directions.

    Each node hands it to the next one on that side that needs it, for all that are still further on. So a node sends a
    block at most twice, however many need it, and none takes it in twice. Nothing goes round in circles: what came from
    below never goes down again, so pools that are full of it wait for those above them alone, and the last one waits
    for nobody but its own ranks.

    Args:
        order: All nodes, the lowest first; empty: every node hands to each one that needs a block by itself.
    """

    def __init__(self, order: Sequence[NodeId] = ()) -> None:
        self._place: Mapping[NodeId, int] = {node: place for place, node in enumerate(order)}

    @property
    def order(self) -> tuple[NodeId, ...]:
        """All nodes, the lowest first."""
        return tuple(self._place)

    def takers(
        self, node: NodeId, ranks: Iterable[Rank], node_of_rank: Mapping[Rank, NodeId] | Sequence[NodeId]
    ) -> dict[NodeId, tuple[Rank, ...]]:
        """Who takes a block from ``node``, itself included, and for which ranks: its own and those further on."""
        homes: dict[NodeId, list[Rank]] = {}
        for rank in ranks:
            homes.setdefault(node_of_rank[rank], []).append(rank)
        found: dict[NodeId, tuple[Rank, ...]] = {node: tuple(homes.pop(node))} if node in homes else {}
        for side in self._sides(node, homes):
            found[side[0]] = tuple(rank for home in side for rank in homes[home])
        return found

    def hops(self, node: NodeId, homes: Collection[NodeId]) -> list[tuple[NodeId, NodeId]]:
        """(from, to) of every hand-over of a block that ``node`` cuts and ``homes`` need."""
        others = [home for home in homes if home != node]
        return [hop for side in self._sides(node, others) for hop in pairwise((node, *side))]

    def next_to(self, node: NodeId, homes: Collection[NodeId]) -> list[NodeId]:
        """The homes that ``node`` hands a block to, or takes it from where another one of them cuts it."""
        return [side[0] for side in self._sides(node, [home for home in homes if home != node])]

    def source(self, node: NodeId, reader: NodeId, homes: Collection[NodeId]) -> NodeId:
        """From whom ``node`` takes a block that ``reader`` cuts; of the homes, those ``next_to`` it are enough."""
        if not self._place.keys() >= {node, reader, *homes}:
            return reader
        here, begin = self._place[node], self._place[reader]
        places = ((self._place[home], home) for home in homes)
        between = ((abs(at - here), home) for at, home in places if min(here, begin) < at < max(here, begin))
        return min(between, default=(0, reader))[1]

    def is_beyond(self, node: NodeId, source: NodeId, target: NodeId) -> bool:
        """Whether ``target`` is further on for what came to ``node`` from ``source``; not where one has no place."""
        if not self._place.keys() >= {node, source, target}:
            return False
        here = self._place[node]
        return (self._place[source] < here) == (here < self._place[target])

    def sides(self, node: NodeId, sources: Iterable[NodeId]) -> tuple[Budget, ...]:
        """Where blocks of other nodes come from by plan.

        One side also where none are to come: what is read a second time may, from anywhere and for nobody further on.
        """
        return tuple(sorted({self._side(node, source) for source in sources})) or ("up",)

    def budget(self, node: NodeId, source: NodeId, sides: Sequence[Budget]) -> Budget:
        """What a block counts as that ``node`` takes from ``source``; ``sides`` are the node's."""
        side = self._side(node, source)
        return side if side in sides else sides[0]

    def _side(self, node: NodeId, source: NodeId) -> Budget:
        return "down" if self._place.get(source, 0) > self._place.get(node, 0) else "up"

    def _sides(self, node: NodeId, homes: Iterable[NodeId]) -> list[list[NodeId]]:
        """The other nodes as far as each is served through the one before it, nearest first."""
        homes = list(homes)
        if not self._place.keys() >= {node, *homes}:
            return [[home] for home in homes]
        here = self._place[node]
        ordered = sorted(homes, key=self._place.__getitem__)
        above = [home for home in ordered if self._place[home] > here]
        below = [home for home in reversed(ordered) if self._place[home] < here]
        return [side for side in (above, below) if side]


def credit_limits(credit_bytes: int, sides: Collection[Budget]) -> dict[Budget, int]:
    """A pool's credit by what it is for.

    Args:
        credit_bytes: All of it.
        sides: Where blocks of other nodes come from; empty where there are none.
    """
    relay_bytes = int(credit_bytes * RELAY_SHARE) if sides else 0
    limits: dict[Budget, int] = {"read": credit_bytes - relay_bytes, "up": 0, "down": 0}
    for side in set(sides):
        limits[side] = relay_bytes // len(set(sides))
    return limits
