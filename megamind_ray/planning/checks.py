"""What the planner holds a policy's proposal to. A refusal says which policy, what it proposed and why it cannot be."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from megamind_ray.core.demands import Int64Array
from megamind_ray.errors import RequestError
from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest
from megamind_ray.policies.routing.base import RoutingDecision, RoutingRequest
from megamind_ray.units import format_bytes

__all__ = ["check_enough_gpus", "check_placement", "check_routing"]


def check_enough_gpus(request: PlacementRequest) -> None:
    """Refuses a mesh with more ranks than the cluster has GPUs.

    Raises:
        RequestError: Says what each node has.
    """
    topology, world = request.topology, request.parallel.world
    if topology.num_gpus < world:
        per_node = ", ".join(f"{node.id} has {len(node.gpus)}" for node in topology.nodes) or "there are no nodes"
        raise RequestError(
            f"{request.parallel} needs {world} GPUs, the cluster has {topology.num_gpus} ({per_node}); "
            f"take a mesh of at most {topology.num_gpus} ranks or add nodes"
        )


def check_placement(policy: str, request: PlacementRequest, decision: PlacementDecision) -> None:
    """Holds a proposal to what is there: one seat per rank, each GPU exists, takes one rank, and has room for it.

    Ranks that the policy left unplaced are not its fault and not judged here.

    Raises:
        RequestError: The proposal is wrong; the policy has to be corrected, or another one taken.
    """
    gpus = {(node.id, gpu.index): gpu for node in request.topology.nodes for gpu in node.gpus}
    taken: dict[tuple[str, int], int] = {}
    if len(decision.seats) != len(request.rank_bytes):
        _refuse("placement", policy, f"{len(decision.seats)} seats for {len(request.rank_bytes)} ranks")
    for rank, seat in enumerate(decision.seats):
        if seat is None:
            continue
        gpu, need = gpus.get((seat.node, seat.gpu)), request.rank_bytes[rank]
        if gpu is None:
            _refuse("placement", policy, f"rank {rank} on GPU {seat}, which the topology does not have")
        if (seat.node, seat.gpu) in taken:
            _refuse("placement", policy, f"ranks {taken[seat.node, seat.gpu]} and {rank} both on GPU {seat}")
        if gpu.free_bytes < need:
            free = format_bytes(gpu.free_bytes)
            _refuse("placement", policy, f"rank {rank} ({format_bytes(need)}) on GPU {seat} with {free} free")
        taken[seat.node, seat.gpu] = rank


def check_routing(policy: str, request: RoutingRequest, decision: RoutingDecision, node_of_rank: Int64Array) -> None:
    """Holds a proposal to what is possible: a reader for each extent, direct only by the only rank, on its node.

    Raises:
        RequestError: The proposal is wrong; the policy has to be corrected, or another one taken.
    """
    num = len(request.nbytes)
    if not (len(decision.direct) == len(decision.node) == len(decision.reason) == num):
        _refuse("routing", policy, f"columns that are not of length {num}, the number of extents")
    if num == 0:
        return
    single = request.only_rank >= 0
    rules = [
        ((decision.node < 0) | (decision.node >= len(request.topology.nodes)), "a reader that is no node"),
        ((decision.reason < 0) | (decision.reason >= len(decision.reasons)), "no reason"),
        (decision.direct & ~single, "the direct route, though several ranks need it"),
        (decision.direct & (not request.allow_direct), "the direct route, though the load asks for the pool"),
        (
            decision.direct & single & (decision.node != node_of_rank[request.only_rank]),
            "the direct route on another node than that of its rank",
        ),
        (~_may_read(request, decision.node), "a reader that needs nothing of it, or cannot read it"),
    ]
    for broken, what in rules:
        if broken.any():
            _refuse("routing", policy, f"for extent {int(np.argmax(broken))} {what}")


def _may_read(request: RoutingRequest, node: Int64Array) -> npt.NDArray[np.bool_]:
    """By extent, whether the node can read it, and needs some of it or no other node that does can read it.

    Whoever needs nothing of what it reads only adds a hop (docs/design/0005).
    """
    readers = np.ones(len(request.topology.nodes), np.bool_) if request.readers is None else request.readers
    extent = np.repeat(np.arange(len(node)), np.diff(request.first_node))
    found = np.zeros(len(node), np.bool_)
    found[extent[request.nodes == node[extent]]] = True
    served = np.zeros(len(node), np.bool_)
    served[extent[readers[request.nodes]]] = True
    known = (node >= 0) & (node < len(readers))
    return known & readers[np.where(known, node, 0)] & (found | ~served)


def _refuse(kind: str, policy: str, what: str) -> NoReturn:
    raise RequestError(f"{kind} policy {policy!r} proposed {what}: refused; correct the policy or configure another")
