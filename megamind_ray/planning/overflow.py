"""Models larger than their GPUs: what stays in host memory, whether it has room there, what streaming it costs.

A rank that needs more than its GPU has keeps as much as possible resident beside two slots of the largest unit that is
streamed (one is computed with while the other is filled). A unit is a layer's share of the rank, or one expert of it:
experts are what goes first, since a token needs few of them. Nothing here decides which weights are hot; the figures
hold for any choice of equal size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megamind_ray.config import Config
from megamind_ray.core.demands import Demands, Int64Array
from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.topology import Gpu, Topology
from megamind_ray.errors import CapacityError
from megamind_ray.planning.arena import lay_out
from megamind_ray.planning.capacity import device_error, pool_budget_bytes
from megamind_ray.planning.checks import check_enough_gpus, check_placement
from megamind_ray.planning.cost import CostModel
from megamind_ray.planning.naming import num_experts, split_numbers
from megamind_ray.planning.stages import layer_of
from megamind_ray.policies.placement.base import PlacementPolicy, PlacementRequest, Seat
from megamind_ray.policies.registry import placement_policy
from megamind_ray.units import format_bytes

__all__ = ["NodeOverflow", "OverflowPlan", "RankOverflow", "plan_overflow"]

_SLOTS = 2
_ACTIVE_SETTINGS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOverflow:
    """One rank.

    Attributes:
        rank: Which.
        node: Where it goes.
        gpu: Index on that node.
        need_bytes: All its weights.
        device_bytes: Of those, resident on the GPU.
        slot_bytes: Room on the GPU for units that are streamed.
        host_bytes: Weights that live in the node's pool.
        expert_bytes: Of those, experts.
    """

    rank: int
    node: NodeId
    gpu: int
    need_bytes: int
    device_bytes: int
    slot_bytes: int
    host_bytes: int
    expert_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOverflow:
    """One node's pool.

    Attributes:
        node: Which.
        host_bytes: What overflows into it.
        room_bytes: What blocks may take of it.
        needed_pool_bytes: Size of the object store that it takes.
    """

    node: NodeId
    host_bytes: int
    room_bytes: int
    needed_pool_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the object store is large enough as it is."""
        return self.host_bytes <= self.room_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowPlan:
    """What it takes to run a model that is larger than its GPUs.

    Attributes:
        ranks: By rank.
        nodes: Nodes whose pool holds something.
        pass_s: Seconds to bring everything that overflows to the GPUs once, all links at work: what a forward pass over
            many tokens waits for if nothing is hidden behind computing.
        token_s: The same for one token, which needs only some experts; None where nothing that overflows is an expert.
    """

    ranks: tuple[RankOverflow, ...]
    nodes: tuple[NodeOverflow, ...]
    pass_s: float
    token_s: float | None

    @property
    def host_bytes(self) -> int:
        """Bytes in all pools."""
        return sum(node.host_bytes for node in self.nodes)


def plan_overflow(
    manifest: Manifest,
    demands: Demands,
    topology: Topology,
    *,
    config: Config,
    placement: PlacementPolicy | None = None,
) -> OverflowPlan:
    """Plans which bytes of each rank stay in host memory.

    Raises:
        RequestError: More ranks than GPUs.
        CapacityError: What overflows has no room in a node's memory, or a GPU has none for two units. An object store
            that is too small is no error: it can be given more memory.
    """
    needs = lay_out(demands.views, demands.parallel.world, config.plan.alignment_bytes).arena_bytes
    seats = _place(manifest, demands, topology, needs, placement or placement_policy(config.placement))
    gpus = {(node.id, gpu.index): gpu for node in topology.nodes for gpu in node.gpus}
    units = _units(demands, num_experts(manifest.config) or 1)
    ranks = tuple(
        _split(rank, int(needs[rank]), gpus[seat.node, seat.gpu], seat, units) for rank, seat in enumerate(seats)
    )
    nodes = _pools(ranks, demands, topology, config)
    active = _active_share(manifest)
    streamed = [rank.host_bytes for rank in ranks]
    for_token = [rank.host_bytes - round(rank.expert_bytes * (1 - active)) for rank in ranks]
    any_experts = active < 1 and any(rank.expert_bytes for rank in ranks)
    return OverflowPlan(
        ranks=ranks,
        nodes=nodes,
        pass_s=_copy_s(ranks, streamed, topology),
        token_s=_copy_s(ranks, for_token, topology) if any_experts else None,
    )


def _place(
    manifest: Manifest, demands: Demands, topology: Topology, needs: Int64Array, policy: PlacementPolicy
) -> tuple[Seat, ...]:
    """As for a plan, where a rank counts as no larger than the smallest of the GPUs that are needed."""
    request = PlacementRequest(parallel=demands.parallel, rank_bytes=tuple(needs.tolist()), topology=topology)
    check_enough_gpus(request)
    roomiest = sorted((gpu.free_bytes for node in topology.nodes for gpu in node.gpus), reverse=True)
    room = roomiest[demands.parallel.world - 1]
    request = replace(request, rank_bytes=tuple(min(need, room) for need in request.rank_bytes))
    decision = policy.place(request)
    check_placement(policy.name, request, decision)
    if decision.unplaced:
        raise device_error(request, decision, policy, demands, manifest)
    return tuple(seat for seat in decision.seats if seat is not None)


@dataclass(frozen=True, slots=True)
class _Units:
    """By rank: the largest unit that could be streamed, and the bytes of experts."""

    largest_layer: Int64Array
    largest_expert: Int64Array
    experts: Int64Array


def _units(demands: Demands, experts_of_layer: int) -> _Units:
    views, world = demands.views, demands.parallel.world
    nbytes = np.where(views.alias != 0, 0, views.nbytes)
    layers: dict[tuple[str, int], int] = {}
    layer_of_tensor = np.full(len(demands.tensors), -1, np.int64)
    is_expert = np.zeros(len(demands.tensors), np.bool_)
    for index, tensor in enumerate(demands.tensors):
        layer = layer_of(*split_numbers(tensor.name))
        if layer is not None:
            layer_of_tensor[index] = layers.setdefault(layer, len(layers))
        is_expert[index] = ".experts." in tensor.name
    expert = is_expert[views.tensor]
    layer_of_view = layer_of_tensor[views.tensor]

    def largest(chosen: Int64Array) -> Int64Array:
        known = layer_of_view >= 0
        keys = views.rank[known] * max(1, len(layers)) + layer_of_view[known]
        sums = np.bincount(keys, weights=chosen[known], minlength=world * max(1, len(layers)))
        result: Int64Array = sums.reshape(world, -1).max(axis=1).astype(np.int64)
        return result

    # Experts of a layer on one rank: all of them split over tp, or some of them whole.
    per_rank = max(1, experts_of_layer // max(1, demands.parallel.ep))
    return _Units(
        largest_layer=largest(np.where(expert, 0, nbytes)),
        largest_expert=largest(np.where(expert, nbytes, 0)) // per_rank,
        experts=np.bincount(views.rank, weights=np.where(expert, nbytes, 0), minlength=world).astype(np.int64),
    )


def _split(rank: int, need: int, gpu: Gpu, seat: Seat, units: _Units) -> RankOverflow:
    if need <= gpu.free_bytes:
        slot = host = 0
    else:
        slot = _SLOTS * int(units.largest_expert[rank])
        host = need + slot - gpu.free_bytes
        if slot == 0 or host > units.experts[rank]:  # more than the experts: whole layers are streamed as well
            slot = _SLOTS * int(max(units.largest_layer[rank], units.largest_expert[rank]))
            host = need + slot - gpu.free_bytes
    if host > need or (host and not slot):
        raise CapacityError(
            f"GPU {seat}: {format_bytes(gpu.free_bytes)} are free, and streaming rank {rank} takes two slots of "
            f"{format_bytes(slot // _SLOTS)}, its largest unit; split the model over more ranks, or free memory there",
            where=f"GPU {seat}",
            needed_bytes=slot or need,
            free_bytes=gpu.free_bytes,
        )
    return RankOverflow(
        rank=rank,
        node=seat.node,
        gpu=seat.gpu,
        need_bytes=need,
        device_bytes=need - host,
        slot_bytes=slot,
        host_bytes=host,
        expert_bytes=min(host, int(units.experts[rank])),
    )


def _pools(
    ranks: Sequence[RankOverflow], demands: Demands, topology: Topology, config: Config
) -> tuple[NodeOverflow, ...]:
    parallel = demands.parallel
    shares: dict[tuple[NodeId, object], int] = {}
    for rank in ranks:
        at = parallel.coords(rank.rank)
        # Replicas of a rank on one node stream from the same blocks; with ep the experts of each are others.
        who: object = (at.pp, at.tp) if parallel.ep == 1 else rank.rank
        shares[rank.node, who] = max(shares.get((rank.node, who), 0), rank.host_bytes)
    found: list[NodeOverflow] = []
    for node in topology.nodes:
        host = sum(size for (name, _), size in shares.items() if name == node.id)
        if not host:
            continue
        needed_pool = math.ceil((host + node.pool_taken_bytes) / config.pool.max_fraction)
        if needed_pool > node.memory_bytes:
            raise CapacityError(
                f"node {node.id}: {format_bytes(host)} of weights overflow into its pool, which takes an object store "
                f"of {format_bytes(needed_pool)} (blocks may take {config.pool.max_fraction:.0%} of it), and the node "
                f"has {format_bytes(node.memory_bytes)} of memory; split the model over more GPUs or nodes",
                where=f"memory of node {node.id}",
                needed_bytes=needed_pool,
                free_bytes=node.memory_bytes,
            )
        room = pool_budget_bytes(node, config)
        found.append(NodeOverflow(node=node.id, host_bytes=host, room_bytes=room, needed_pool_bytes=needed_pool))
    return tuple(found)


def _active_share(manifest: Manifest) -> float:
    """Share of the experts that one token needs; 1 where the configuration does not say."""
    total = num_experts(manifest.config)
    active = _first_integer(manifest.config, _ACTIVE_SETTINGS)
    return min(1.0, active / total) if total and active else 1.0


def _first_integer(config: Mapping[str, object], names: Sequence[str]) -> int | None:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _copy_s(ranks: Sequence[RankOverflow], nbytes: Sequence[int], topology: Topology) -> float:
    """Seconds to copy so many bytes to each rank at the same time: those of the busiest link."""
    model = CostModel(topology)
    place = {
        (node.id, gpu.index): (at, position)
        for at, node in enumerate(topology.nodes)
        for position, gpu in enumerate(node.gpus)
    }
    busy_s = np.zeros(len(model.resources))
    for rank, size in zip(ranks, nbytes, strict=True):
        for resource, units in model.copy(*place[rank.node, rank.gpu]).uses:
            busy_s[resource] += size * units / model.resources[resource].capacity
    return float(busy_s.max(initial=0.0))
