"""From demands and hardware to a plan: policies propose, this module validates and decides (docs/design/0005)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megamind_ray.config import Config
from megamind_ray.core.demands import Demands, Int64Array
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Node, Topology
from megamind_ray.planning import tables
from megamind_ray.planning.arena import lay_out
from megamind_ray.planning.capacity import (
    choose_keep_blocks,
    device_error,
    effective_extent_bytes,
    keep_budget_bytes,
    pool_budget_bytes,
    pool_error,
)
from megamind_ray.planning.checks import check_enough_gpus, check_placement, check_routing
from megamind_ray.planning.columns import Grouped
from megamind_ray.planning.extents import Cut, cut
from megamind_ray.planning.grid import Grid
from megamind_ray.policies.placement.base import PlacementPolicy, PlacementRequest, Seat
from megamind_ray.policies.registry import placement_policy, routing_policy
from megamind_ray.policies.routing.base import RoutingDecision, RoutingPolicy, RoutingRequest
from megamind_ray.units import format_bytes

__all__ = ["build_plan"]


def build_plan(
    manifest: Manifest,
    demands: Demands,
    topology: Topology,
    *,
    config: Config,
    keep: bool = False,
    placement: PlacementPolicy | None = None,
    routing: RoutingPolicy | None = None,
) -> Plan:
    """Plans every transfer of a load. Pure: equal arguments give equal tables.

    Args:
        manifest: The checkpoint.
        demands: What each rank needs of it.
        topology: The hardware; ``free_bytes`` of its GPUs and ``pool_bytes`` of its nodes bound the plan.
        config: Sizes, fractions and the names of the policies.
        keep: Blocks are to stay in the pools: nothing goes the direct route, and the notes say what has no room.
        placement: In place of the policy that the configuration names.
        routing: In place of the policy that the configuration names.

    Raises:
        RequestError: More ranks than GPUs, an unknown policy, or a proposal that cannot be.
        CapacityError: A rank fits no GPU, or the blocks of one extent fit no pool.
    """
    layout = lay_out(demands.views, demands.parallel.world, config.plan.alignment_bytes)
    rank_bytes = tuple(layout.arena_bytes.tolist())
    request = PlacementRequest(parallel=demands.parallel, rank_bytes=rank_bytes, topology=topology)
    seats = _place(request, placement or placement_policy(config.placement), demands, manifest)
    index = {node.id: position for position, node in enumerate(topology.nodes)}
    node_of_rank = np.array([index[seat.node] for seat in seats], np.int64)
    apart = not (keep or config.routing.force_pool)
    grid = _grid(manifest, topology, node_of_rank, config, keep=keep)
    pieces = cut(demands, grid, node_of_rank, apart=apart)
    routes = _route(pieces, topology, node_of_rank, config, routing or routing_policy(config.routing), keep=keep)
    pool_need = _pool_need(pieces, routes, topology, manifest, config)
    plan = Plan(
        uri=manifest.uri,
        root=manifest.root,
        parallel=demands.parallel,
        chunk_bytes=grid.chunk_bytes,
        tables={
            "files": tables.file_table(manifest.files),
            "tensors": tables.tensor_table(demands.tensors),
            "ranks": tables.rank_table(demands, seats, layout.arena_bytes),
            "views": tables.view_table(demands, layout),
            "extents": tables.extent_table(pieces, routes, topology),
            "blocks": tables.block_table(pieces),
            "consumers": tables.consumer_table(demands.consumer_sets),
            "segments": tables.segment_table(pieces),
        },
        disk_tensors=tuple(manifest.tensors),
        bytes_total=demands.bytes_total,
        bytes_to_device=_bytes_to_device(pieces, demands),
        pool_need_bytes=pool_need,
        keep=keep,
    )
    return replace(plan, notes=tuple(_notes(plan, topology, config)))


def _place(
    request: PlacementRequest, policy: PlacementPolicy, demands: Demands, manifest: Manifest
) -> tuple[Seat, ...]:
    check_enough_gpus(request)
    decision = policy.place(request)
    check_placement(policy.name, request, decision)
    if decision.unplaced:
        raise device_error(request, decision, policy, demands, manifest)
    return tuple(seat for seat in decision.seats if seat is not None)


def _grid(manifest: Manifest, topology: Topology, node_of_rank: Int64Array, config: Config, *, keep: bool) -> Grid:
    chunk_bytes = manifest.reference.chunk_bytes if manifest.reference else config.io.chunk_bytes
    used = [topology.nodes[index] for index in np.unique(node_of_rank).tolist()]
    return Grid(
        files=manifest.files,
        chunk_bytes=chunk_bytes,
        extent_bytes=effective_extent_bytes(used, config, chunk_bytes, keep=keep),
        max_gap_bytes=config.io.gap_bytes(manifest.root),
        whole_chunks=manifest.reference is not None,
    )


def _route(
    pieces: Cut, topology: Topology, node_of_rank: Int64Array, config: Config, policy: RoutingPolicy, *, keep: bool
) -> RoutingDecision:
    nbytes = pieces.end - pieces.begin
    largest = int(nbytes.max(initial=0))
    room = [keep_budget_bytes(node, config, largest_extent_bytes=largest) for node in topology.nodes]
    request = RoutingRequest(
        topology=topology,
        nbytes=nbytes,
        only_rank=pieces.only_rank,
        first_node=pieces.nodes.first,
        nodes=pieces.nodes.values,
        pool_room_bytes=np.array(room, np.int64) if keep else None,
        allow_direct=not (keep or config.routing.force_pool),
        min_direct_bytes=config.routing.min_direct_bytes,
    )
    decision = policy.route(request)
    check_routing(policy.name, request, decision, node_of_rank)
    return decision


def _pool_need(
    pieces: Cut, routes: RoutingDecision, topology: Topology, manifest: Manifest, config: Config
) -> dict[str, int]:
    """By node, the bytes of all blocks that pass through its pool: those it cuts and those it takes in for its ranks.

    Raises:
        CapacityError: The blocks of one extent are more than a pool may take.
    """
    block, node = pieces.set_nodes.explode(pieces.block_consumers)
    cuts = np.arange(len(pieces.block_extent), dtype=np.int64)
    by_node = Grouped.from_pairs(
        np.concatenate([node, routes.node[pieces.block_extent]]), np.concatenate([block, cuts]), len(topology.nodes)
    )
    through_pool = ~routes.direct[pieces.block_extent]
    need: dict[str, int] = {}
    for index, item in enumerate(topology.nodes):
        blocks = by_node.values[by_node.first[index] : by_node.first[index + 1]]
        blocks = blocks[through_pool[blocks]]
        if len(blocks):
            at_once = np.bincount(pieces.block_extent[blocks], weights=pieces.block_nbytes[blocks])
            _check_pool(item, config, int(at_once.max()), int(at_once.argmax()), pieces, manifest)
            need[item.id] = int(pieces.block_nbytes[blocks].sum())
    return need


def _check_pool(node: Node, config: Config, at_once: int, extent: int, pieces: Cut, manifest: Manifest) -> None:
    if at_once > pool_budget_bytes(node, config):
        path = manifest.files[int(pieces.file[extent])].path
        what = f"extent {extent} (bytes {pieces.begin[extent]}-{pieces.end[extent]} of {path})"
        raise pool_error(node, config, at_once, what)


def _bytes_to_device(pieces: Cut, demands: Demands) -> int:
    num_consumers = np.array([len(members) for members in demands.consumer_sets] or [0], np.int64)
    return int((pieces.block_nbytes * num_consumers[pieces.block_consumers]).sum())


# Said here without torch; device.dtypes has the whole of it.
_NEVER_IN_TORCH = ("F6_E2M3", "F6_E3M2")


def _notes(plan: Plan, topology: Topology, config: Config) -> list[str]:
    notes = []
    if plan.bytes_replicated > 0:
        share = plan.bytes_replicated / plan.bytes_to_device
        notes.append(
            f"{format_bytes(plan.bytes_replicated)} of the {format_bytes(plan.bytes_to_device)} in device memory "
            f"({share:.1%}) are further copies of bytes that another rank holds too"
        )
    if plan.bytes_from_storage > plan.bytes_total:
        over = format_bytes(plan.bytes_from_storage - plan.bytes_total)
        notes.append(f"{over} are read beyond what is demanded (whole chunks, and small gaps that are read over)")
    lacking = [label for label in plan.tables["tensors"]["dtype"].unique().to_pylist() if label in _NEVER_IN_TORCH]
    if lacking:
        notes.append(f"torch has no dtype for {', '.join(lacking)}: ranks hold those tensors as packed bytes (uint8)")
    if plan.keep:
        notes.append(_keep_note(plan, topology, config))
    return notes


def _keep_note(plan: Plan, topology: Topology, config: Config) -> str:
    blocks = plan.tables["blocks"]["nbytes"].to_numpy()
    kept = choose_keep_blocks(plan, topology, config)
    somewhere = np.unique(np.concatenate([*kept.values(), np.zeros(0, np.int64)]))
    missing = int(blocks.sum() - blocks[somewhere].sum())
    if missing == 0:
        return f"all {format_bytes(int(blocks.sum()))} of blocks stay in the pools"
    rooms = ", ".join(f"{node.id} {format_bytes(keep_budget_bytes(node, config))}" for node in topology.nodes)
    return (
        f"{format_bytes(missing)} of {format_bytes(int(blocks.sum()))} cannot stay in the pools (room for kept blocks: "
        f"{rooms}); give the object stores that much more, or raise pool.keep_fraction"
    )
