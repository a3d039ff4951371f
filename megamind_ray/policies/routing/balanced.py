"""Readers chosen so that the busiest node is done as early as possible (docs/design/0005).

Extents that one node consumes are read there. Extents that several nodes consume are shared out among these nodes by
water-filling: each class of extents (equal consumer nodes) raises the finishing times of its nodes to a common level.
Classes with fewer nodes have less choice and go first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.topology import Node
from megamind_ray.policies.routing.base import RoutingDecision, RoutingRequest

__all__ = ["Balanced"]

_Float64Array = npt.NDArray[np.float64]

_REASONS = (
    "one rank needs it: the rank reads it itself",
    "one rank needs it, but it is smaller than routing.min_direct_bytes: through the pool",
    "one rank needs it, but it goes through the pool as asked (keep or routing.force_pool)",
    "several ranks of one node need it: its agent reads it once",
    "ranks of several nodes need it: read once, by the consumer node with the most disk and network time left",
)
_DIRECT, _SMALL, _POOL_ASKED, _ONE_NODE, _SEVERAL_NODES = range(5)


class Balanced:
    """Minimises the largest load over readers, in seconds of disk and network."""

    name = "balanced"

    def route(self, request: RoutingRequest) -> RoutingDecision:
        """See ``RoutingPolicy``."""
        single = request.only_rank >= 0
        large = request.nbytes >= request.min_direct_bytes
        direct = single & large & request.allow_direct
        num_nodes = np.diff(request.first_node)
        node = request.nodes[request.first_node[:-1]]
        load_s, kept = _fixed_load(request, node, num_nodes)
        for members, extents in _classes(request, num_nodes):
            seconds_per_byte = _seconds_per_byte(request, members)
            room = _room(request, members, kept)
            shares = _water_fill(load_s[members], seconds_per_byte, float(request.nbytes[extents].sum()), room)
            chosen = members[_share_out(request.nbytes[extents], shares)]
            node[extents] = chosen
            read = np.bincount(chosen, weights=request.nbytes[extents], minlength=len(load_s))
            load_s[members] += read[members] * seconds_per_byte
            kept += read
        reason = np.select(
            [direct, single & request.allow_direct, single, num_nodes == 1],
            [_DIRECT, _SMALL, _POOL_ASKED, _ONE_NODE],
            default=_SEVERAL_NODES,
        )
        return RoutingDecision(direct=direct, node=node, reason=reason.astype(np.int64), reasons=_REASONS)


def _classes(request: RoutingRequest, num_nodes: Int64Array) -> list[tuple[Int64Array, Int64Array]]:
    """(consumer nodes, extents) of each distinct set of two nodes or more; smaller sets first."""
    found: dict[bytes, list[int]] = {}
    for extent in np.flatnonzero(num_nodes > 1).tolist():
        members = request.nodes[request.first_node[extent] : request.first_node[extent + 1]]
        found.setdefault(members.tobytes(), []).append(extent)
    classes = [(np.frombuffer(key, np.int64), np.array(extents, np.int64)) for key, extents in found.items()]
    return sorted(classes, key=lambda item: (len(item[0]), item[0].tolist()))


def _fixed_load(
    request: RoutingRequest, node: Int64Array, num_nodes: Int64Array
) -> tuple[_Float64Array, _Float64Array]:
    """Seconds of reading and bytes that each node has without a choice."""
    alone = num_nodes == 1
    size = len(request.topology.nodes)
    read = np.bincount(node[alone], weights=request.nbytes[alone], minlength=size).astype(np.float64)
    return read * np.array([1 / _read_rate(item) for item in request.topology.nodes]), read


def _seconds_per_byte(request: RoutingRequest, members: Int64Array) -> _Float64Array:
    """Time of a byte on the busier of disk and NIC: it is read once and sent to every other member."""
    nodes = [request.topology.nodes[index] for index in members.tolist()]
    hops = len(nodes) - 1
    return np.array([max(1 / _read_rate(n), hops / n.nic_bytes_per_s if n.nics else 0.0) for n in nodes])


def _read_rate(node: Node) -> float:
    """Bytes/s from storage: the node's disks, else shared storage over its NICs; nodes of unknown rate count alike."""
    return node.disk_bytes_per_s or node.nic_bytes_per_s or 1e9


def _room(request: RoutingRequest, members: Int64Array, kept: _Float64Array) -> _Float64Array:
    if request.pool_room_bytes is None:
        return np.full(len(members), np.inf)
    return np.maximum(request.pool_room_bytes[members] - kept[members], 0.0)


def _water_fill(
    load_s: _Float64Array, seconds_per_byte: _Float64Array, num_bytes: float, room: _Float64Array
) -> _Float64Array:
    """Bytes for each node so that they finish together; a node takes no more than its room while another has some."""
    if room.sum() < num_bytes:
        # Not all can be kept anyway: what does not fit is spread by time alone.
        beyond = _water_fill(load_s + room * seconds_per_byte, seconds_per_byte, num_bytes - room.sum(), room + np.inf)
        return room + beyond
    low, high = float(load_s.min()), float((load_s + np.minimum(room, num_bytes) * seconds_per_byte).max())
    for _ in range(100):
        level = (low + high) / 2
        filled = np.minimum(np.maximum((level - load_s) / seconds_per_byte, 0.0), room)
        low, high = (level, high) if filled.sum() < num_bytes else (low, level)
    return np.minimum(np.maximum((high - load_s) / seconds_per_byte, 0.0), room)


def _share_out(nbytes: Int64Array, shares: _Float64Array) -> Int64Array:
    """Position in ``shares`` of each extent: runs of consecutive extents, so that each node reads files in sequence."""
    middle = np.cumsum(nbytes) - nbytes / 2
    bounds = np.cumsum(shares) * (float(nbytes.sum()) / max(float(shares.sum()), 1.0))
    return np.minimum(np.searchsorted(bounds, middle, side="right"), len(shares) - 1).astype(np.int64)
