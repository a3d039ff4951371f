"""Readers chosen so that the busiest resource is done as early as possible (docs/design/0005).

Extents that one node consumes are read there. Extents that several nodes consume are shared out among these nodes
(``policies.sharing``), class by class; a class is the extents with equal consumer nodes. What a reader costs includes
what it sends: over its own network, into the others', and over the uplinks of racks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megamind_ray.core.demands import Int64Array
from megamind_ray.policies.costs import Float64Array, sums
from megamind_ray.policies.routing.base import RoutingDecision, RoutingRequest
from megamind_ray.policies.sharing import Busy, NodeClass, share_out

__all__ = ["Balanced"]

_REASONS = (
    "one rank needs it: the rank reads it itself",
    "one rank needs it, but it is smaller than routing.min_direct_bytes: through the pool",
    "one rank needs it, but it goes through the pool as asked (keep or routing.force_pool)",
    "several ranks of one node need it: its agent reads it once",
    "ranks of several nodes need it: read once, by the consumer node with the most disk and network time left",
    "no node that needs it can read it: read once, by one that can",
)
_DIRECT, _SMALL, _POOL_ASKED, _ONE_NODE, _SEVERAL_NODES, _ELSEWHERE = range(6)


class Balanced:
    """Minimises the largest load over disks, networks, uplinks, processors and memory, in seconds."""

    name = "balanced"

    def route(self, request: RoutingRequest) -> RoutingDecision:
        """See ``RoutingPolicy``."""
        request, elsewhere = _among_readers(request)
        single = request.only_rank >= 0
        large = request.nbytes >= request.min_direct_bytes
        direct = single & large & request.allow_direct & ~elsewhere
        num_nodes = np.diff(request.first_node)
        node = request.nodes[request.first_node[:-1]]
        busy, kept = _without_choice(request, node, num_nodes == 1, direct)
        found = _classes(request, num_nodes)
        classes = [_node_class(request, members, extents) for members, extents in found]
        room = None if request.pool_room_bytes is None else np.maximum(request.pool_room_bytes - kept, 0.0)
        shares = share_out(request.costs, busy, classes, room)
        for (members, extents), share in zip(found, shares, strict=True):
            node[extents] = members[_in_sequence(request.nbytes[extents], share)]
        reason = np.select(
            [elsewhere, direct, single & request.allow_direct, single, num_nodes == 1],
            [_ELSEWHERE, _DIRECT, _SMALL, _POOL_ASKED, _ONE_NODE],
            default=_SEVERAL_NODES,
        )
        return RoutingDecision(direct=direct, node=node, reason=reason.astype(np.int64), reasons=_REASONS)


def _among_readers(request: RoutingRequest) -> tuple[RoutingRequest, npt.NDArray[np.bool_]]:
    """The request with those nodes of each extent that can read it, or else all that can; and where it is the latter.

    What is sent to nodes that are left out so is not weighed: whoever reads, they take it in.
    """
    num_extents = len(request.nbytes)
    if request.readers is None:
        return request, np.zeros(num_extents, np.bool_)
    able = np.flatnonzero(request.readers)
    extent = np.repeat(np.arange(num_extents), np.diff(request.first_node))
    keep = request.readers[request.nodes]
    num_kept = np.bincount(extent[keep], minlength=num_extents)
    elsewhere = num_kept == 0
    need = np.ones(len(request.nodes)) if request.need is None else request.need
    lists = np.concatenate([extent[keep], np.repeat(np.flatnonzero(elsewhere), len(able))])
    nodes = np.concatenate([request.nodes[keep], np.tile(able, int(elsewhere.sum()))])
    needs = np.concatenate([need[keep], np.zeros(len(nodes) - int(keep.sum()))])
    order = np.argsort(lists, kind="stable")
    first = np.searchsorted(lists[order], np.arange(num_extents + 1)).astype(np.int64)
    return replace(request, first_node=first, nodes=nodes[order].astype(np.int64), need=needs[order]), elsewhere


def _classes(request: RoutingRequest, num_nodes: Int64Array) -> list[tuple[Int64Array, Int64Array]]:
    """(consumer nodes, extents) of each distinct set of two nodes or more; smaller sets first."""
    found: dict[bytes, list[int]] = {}
    for extent in np.flatnonzero(num_nodes > 1).tolist():
        members = request.nodes[request.first_node[extent] : request.first_node[extent + 1]]
        found.setdefault(members.tobytes(), []).append(extent)
    classes = [(np.frombuffer(key, np.int64), np.array(extents, np.int64)) for key, extents in found.items()]
    return sorted(classes, key=lambda item: (len(item[0]), item[0].tolist()))


def _node_class(request: RoutingRequest, members: Int64Array, extents: Int64Array) -> NodeClass:
    nbytes = request.nbytes[extents].astype(np.float64)
    need = np.ones(len(members))
    if request.need is not None:
        rows = request.first_node[extents][:, None] + np.arange(len(members))
        need = nbytes @ request.need[rows] / nbytes.sum()
    return NodeClass(members, float(nbytes.sum()), need)


def _without_choice(
    request: RoutingRequest, node: Int64Array, alone: npt.NDArray[np.bool_], direct: npt.NDArray[np.bool_]
) -> tuple[Busy, Float64Array]:
    """What is busy, and the bytes that each node reads, before anything is shared out."""
    costs, busy = request.costs, Busy.idle(request.costs)
    size = len(request.topology.nodes)
    read = sums(node[alone], request.nbytes[alone], size)
    pool = alone & ~direct
    packed = sums(node[pool], request.nbytes[pool], size)
    busy.add_alone(costs, read, packed)
    if request.busy is not None:
        busy.nodes += request.busy
    return busy, read


def _in_sequence(nbytes: Int64Array, shares: Float64Array) -> Int64Array:
    """Position in ``shares`` of each extent: runs of consecutive extents, so that each node reads files in sequence."""
    middle = np.cumsum(nbytes) - nbytes / 2
    bounds = np.cumsum(shares) * (float(nbytes.sum()) / max(float(shares.sum()), 1.0))
    return np.minimum(np.searchsorted(bounds, middle, side="right"), len(shares) - 1).astype(np.int64)
