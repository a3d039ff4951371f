"""What a lost node leaves behind: its ranks are placed on spare GPUs, its extents among other readers (0026). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank

__all__ = ["Lacking", "Move", "Spare", "choose_reader", "is_between", "place_again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """A GPU of the fleet that no rank of the load is on.

    Attributes:
        node: Its node.
        gpu: Its index there.
        free_bytes: Free in its worker's arena when the load was planned.
    """

    node: NodeId
    gpu: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A rank that lives elsewhere from now on, as a new generation of it."""

    rank: Rank
    generation: Generation
    node: NodeId
    gpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """Extents of which some block had not arrived at a rank when it was asked."""

    rank: Rank
    generation: Generation
    extents: tuple[ExtentId, ...]


def place_again(
    ranks: Sequence[Rank],
    arena_bytes: Sequence[int],
    spares: Iterable[Spare],
    *,
    members: Collection[NodeId],
) -> dict[Rank, Spare] | None:
    """Puts ranks on spare GPUs: on as few nodes as goes, on nodes that have no part in the load yet before others.

    A rank that moves to a node with ranks takes room and time of theirs.

    Args:
        ranks: To be placed.
        arena_bytes: By rank of the mesh, what it needs.
        spares: What there is.
        members: Nodes that have a part in the load.

    Returns:
        None where they do not all find a place.
    """
    by_node: dict[NodeId, list[Spare]] = {}
    for spare in spares:
        by_node.setdefault(spare.node, []).append(spare)
    found: dict[Rank, Spare] = {}
    # The largest first: a smaller one finds room where that one does not.
    left = sorted(ranks, key=lambda rank: (-arena_bytes[rank], rank))
    for _, free in sorted(by_node.items(), key=lambda item: (item[0] in members, -len(item[1]), item[0])):
        for spare in sorted(free, key=lambda one: (one.free_bytes, one.gpu)):
            fits = next((rank for rank in left if arena_bytes[rank] <= spare.free_bytes), None)
            if fits is not None:
                found[fits] = spare
                left.remove(fits)
    return None if left else found


def choose_reader(
    consumers: Collection[NodeId], readers: Sequence[NodeId], given_bytes: Mapping[NodeId, int]
) -> NodeId | None:
    """Who reads an extent that a lost node was to read: of its consumers' nodes, else of all, who was given least.

    Args:
        consumers: Nodes of the ranks that need it.
        readers: Nodes that can read it.
        given_bytes: By node, what it was given already.
    """
    near = [node for node in readers if node in consumers] or readers
    return min(near, key=lambda node: given_bytes.get(node, 0), default=None)


def is_between(node: NodeId, reader: NodeId, home: NodeId, order: Sequence[NodeId]) -> bool:
    """Whether blocks that ``reader`` cuts for ``home`` may pass through a node; never without a line."""
    if not {node, reader, home} <= set(order):
        return False
    place = order.index
    return min(place(reader), place(home)) < place(node) < max(place(reader), place(home))
