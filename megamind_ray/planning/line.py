"""The line along which the nodes of a plan hand blocks to each other (docs/design/0024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Node, Topology
from megamind_ray.policies.costs import Float64Array, TransferCosts

__all__ = ["line_of", "places_of", "shorter_line"]

_Item = TypeVar("_Item")
# Of a network that the topology says nothing about: as slow as any.
_UNKNOWN_S = 1e-9
_MAX_EXCHANGED = 16
# An exchange that is worth making.
_WORTH = 0.999


def line_of(topology: Topology, read_bytes: Int64Array, used: Int64Array) -> tuple[NodeId, ...]:
    """Racks one after the other, and within them nodes; those with most to send at the ends.

    A block crosses each uplink at most once in each direction then. A node between others sends what it reads to both
    sides, and hands on what the others read; at an end there is nobody on the other side. So the ends are for nodes
    that would be busy for longest in the middle: those that read most, or have slow links. The same holds for racks.

    Args:
        topology: The hardware.
        read_bytes: By node, what it reads for the pools.
        used: Positions of the nodes that read or have ranks, ascending.

    Returns:
        The nodes; none where fewer than two are used.
    """
    if len(used) < 2:
        return ()
    nodes, total = topology.nodes, int(read_bytes.sum())
    uplinks = {rack.name: 1 / rack.uplink_bytes_per_s for rack in topology.racks}
    of_rack: dict[str | None, list[int]] = {}
    for at in used.tolist():
        of_rack.setdefault(nodes[at].rack, []).append(at)
    read_in = {rack: sum(int(read_bytes[at]) for at in members) for rack, members in of_rack.items()}

    def rack_strain(rack: str | None) -> tuple[float, ...]:
        uplink_s = 0.0 if rack is None else uplinks.get(rack, 0.0)
        return (total + read_in[rack]) * uplink_s, read_in[rack]

    def node_strain(at: int) -> tuple[float, ...]:
        return (total + int(read_bytes[at])) * _send_s(topology, nodes[at]), int(read_bytes[at])

    racks = _outside_in(of_rack, rack_strain)
    order: list[int] = []
    for place, rack in enumerate(racks):
        members = _outside_in(of_rack[rack], node_strain)
        # The first of the order stands at the outer end, also in the racks of the line's other half.
        order += members if 2 * place < len(racks) else reversed(members)
    return tuple(nodes[at].id for at in order)


def shorter_line(
    topology: Topology,
    order: tuple[NodeId, ...],
    members: Sequence[Int64Array],
    read: Float64Array,
    costs: TransferCosts,
    copying: Float64Array,
) -> tuple[NodeId, ...]:
    """The line, or one by exchanges of nodes of a rack in which the busiest node is busy with sending for less time.

    Who stands where matters to several groups of nodes at once, which ``line_of`` does not look at. In large lines
    those at the ends are few, and it is left as it is.

    Args:
        topology: The hardware.
        order: The line.
        members: Nodes that need the same blocks, for each such group.
        read: ``[group, node]``, bytes of the group's blocks that the node reads.
        costs: What it takes.
        copying: ``[node, kind]``, seconds that nodes are busy whatever the line.
    """
    index = {node.id: at for at, node in enumerate(topology.nodes)}
    first = places_of(topology)
    line = [index[node] for node in order]
    if len(line) > _MAX_EXCHANGED:
        return order
    taken = np.zeros(len(topology.nodes))
    for nodes, nbytes in zip(members, read, strict=True):
        taken[nodes] += nbytes.sum() - nbytes[nodes]
    once = read.sum(axis=0)[:, None] * (costs.read + costs.pack) + taken[:, None] * costs.take + copying
    uplink_s = {rack.name: 1 / rack.uplink_bytes_per_s for rack in topology.racks}
    racks = [node.rack for node in topology.nodes]
    names = list(dict.fromkeys(racks))
    rack_of = np.array([names.index(rack) for rack in racks], np.int64)
    out_s = np.array([uplink_s.get(name, 0.0) if name is not None else 0.0 for name in names])

    def busiest_s(candidate: list[int]) -> float:
        sent, left = _sent_bytes(candidate, members, read, rack_of)
        return max(float((once + sent[:, None] * costs.send).max(initial=0.0)), float((left * out_s).max(initial=0.0)))

    # As placement supposed it to be, where that is no worse.
    supposed = sorted(line, key=lambda at: int(first[at]))
    best_s, best = min(((busiest_s(candidate), candidate) for candidate in (line, supposed)), key=lambda item: item[0])
    improved = True
    while improved:
        improved = False
        for one, other in combinations(range(len(best)), 2):
            if racks[best[one]] != racks[best[other]]:
                continue
            candidate = list(best)
            candidate[one], candidate[other] = candidate[other], candidate[one]
            seconds = busiest_s(candidate)
            if seconds < best_s * _WORTH:
                best_s, best, improved = seconds, candidate, True
    return tuple(topology.nodes[at].id for at in best)


def _sent_bytes(
    line: Sequence[int], members: Sequence[Int64Array], read: Float64Array, rack_of: Int64Array
) -> tuple[Float64Array, Float64Array]:
    """By node, what it sends: what it reads to each side where somebody needs it, and what it hands on.

    And by rack, what of that leaves it.
    """
    sent, left = np.zeros(read.shape[1]), np.zeros(int(rack_of.max()) + 1)
    place = np.zeros(read.shape[1], np.int64)
    place[line] = np.arange(len(line))
    racks = rack_of[line]
    for nodes, nbytes in zip(members, read, strict=True):
        along = nbytes[line]
        needs = np.zeros(len(line), np.bool_)
        needs[place[nodes]] = True
        below, total = np.cumsum(along) - along, float(along.sum())
        takers = np.flatnonzero(needs)
        after = np.searchsorted(takers, np.arange(len(line)), side="right")
        before = np.searchsorted(takers, np.arange(len(line)), side="left") - 1
        up = (after < len(takers)) * (along + below * needs)
        down = (before >= 0) * (along + (total - below - along) * needs)
        sent[line] += up + down
        for amount, taker in ((up, np.minimum(after, len(takers) - 1)), (down, np.maximum(before, 0))):
            np.add.at(left, racks, amount * (racks != racks[takers[taker]]))
    return sent, left


def places_of(topology: Topology) -> Int64Array:
    """By node its place on the line of all nodes, before it is known who reads."""
    num_nodes = len(topology.nodes)
    # As if all read equally much: then those with slow links are at the ends.
    order = line_of(topology, np.ones(num_nodes, np.int64), np.arange(num_nodes, dtype=np.int64))
    place = {node: at for at, node in enumerate(order)}
    return np.array([place.get(node.id, 0) for node in topology.nodes], np.int64)


def _outside_in(items: Iterable[_Item], strain: Callable[[_Item], tuple[float, ...]]) -> list[_Item]:
    """The items with most strain at the ends, by turns; equal ones in their order."""
    by_strain = sorted(items, key=lambda item: tuple(-value for value in strain(item)))
    return [*by_strain[::2], *reversed(by_strain[1::2])]


def _send_s(topology: Topology, node: Node) -> float:
    network_s = 1 / node.nic_bytes_per_s if node.nic_bytes_per_s else _UNKNOWN_S
    wire = topology.links.wire_bytes_per_s
    return max(network_s, 1 / wire if wire else 0.0)
