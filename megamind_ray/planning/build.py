"""From demands and hardware to a plan: policies propose, this module validates and decides (docs/design/0005)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megamind_ray.config import Config
from megamind_ray.core.demands import Demands, Int64Array
from megamind_ray.core.ids import NodeId
from megamind_ray.core.line import Line, credit_limits
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Node, Topology
from megamind_ray.planning import tables
from megamind_ray.planning.arena import lay_out
from megamind_ray.planning.capacity import (
    choose_keep_blocks,
    device_error,
    keep_budget_bytes,
    pool_budget_bytes,
    pool_error,
)
from megamind_ray.planning.checks import check_enough_gpus, check_placement, check_routing
from megamind_ray.planning.cost import CostModel
from megamind_ray.planning.extent_length import extent_lengths
from megamind_ray.planning.extents import Cut, cut
from megamind_ray.planning.grid import ChunkUse, Grid, chunk_use, rows_of
from megamind_ray.planning.line import line_of, shorter_line
from megamind_ray.planning.topology_dump import dump_topology
from megamind_ray.planning.transfers import transfer_costs, transfer_load
from megamind_ray.policies.costs import Float64Array
from megamind_ray.policies.placement.base import PlacementPolicy, PlacementRequest, Seat
from megamind_ray.policies.placement.makespan import Makespan
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
    readers: Collection[NodeId] | None = None,
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
        readers: Nodes that can read the checkpoint; None: all. Others get what they need from these.
        placement: In place of the policy that the configuration names.
        routing: In place of the policy that the configuration names.

    Raises:
        RequestError: More ranks than GPUs, an unknown policy, or a proposal that cannot be.
        CapacityError: A rank fits no GPU, or the blocks of one extent fit no pool.
    """
    wanted = _Wanted(manifest, demands, topology, config, keep, readers)
    layout = lay_out(demands.views, demands.parallel.world, config.plan.alignment_bytes)
    grid = wanted.grid()
    rows = rows_of(demands.slices, grid)
    use = chunk_use(rows, len(demands.consumer_sets), grid)
    request = wanted.placement_request(tuple(layout.arena_bytes.tolist()), use)
    seats = _place(request, placement or placement_policy(config.placement), demands, manifest)
    node_of_rank = _nodes_of(seats, topology)
    grid = wanted.with_extents(grid, node_of_rank)
    pieces = cut(demands, grid, node_of_rank, apart=wanted.allow_direct, by_chunk=(rows, use))
    policy = routing or routing_policy(config.routing)
    question = wanted.routing_request(request, pieces, seats)
    routes = _routes(question, policy, node_of_rank)
    line = _line(pieces, routes, question, node_of_rank)
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
            "consumers": tables.consumer_table(pieces.sets),
            "segments": tables.segment_table(pieces),
        },
        disk_tensors=tuple(manifest.tensors),
        bytes_total=demands.bytes_total,
        bytes_to_device=_bytes_to_device(pieces),
        pool_need_bytes=_pool_need(pieces, routes, line, topology, manifest, config),
        keep=keep,
        is_referenced=manifest.reference is not None,
        topology=dump_topology(topology),
        line=line,
    )
    return replace(plan, notes=tuple(_notes(plan, topology, config)))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is asked for, and the questions to the policies that follow from it."""

    manifest: Manifest
    demands: Demands
    topology: Topology
    config: Config
    keep: bool
    readers: Collection[NodeId] | None

    @property
    def allow_direct(self) -> bool:
        return not (self.keep or self.config.routing.force_pool)

    @property
    def is_remote(self) -> bool:
        return self.config.io.is_remote(self.manifest.root)

    @property
    def can_read(self) -> npt.NDArray[np.bool_] | None:
        """By node; None: all can."""
        if self.readers is None:
            return None
        return np.array([node.id in self.readers for node in self.topology.nodes])

    def grid(self) -> Grid:
        """The grid of chunks. How long extents may be is known when it is known which pools they pass."""
        reference = self.manifest.reference
        chunk_bytes = reference.chunk_bytes if reference else self.config.io.chunk_bytes
        return Grid(
            files=self.manifest.files,
            chunk_bytes=chunk_bytes,
            extent_bytes=chunk_bytes,
            max_gap_bytes=self.config.io.gap_bytes(self.manifest.root),
            whole_chunks=reference is not None,
        )

    def with_extents(self, grid: Grid, node_of_rank: Int64Array) -> Grid:
        through_pool, own = extent_lengths(
            self.topology,
            node_of_rank,
            self.config,
            grid.chunk_bytes,
            remote=self.is_remote,
            keep=self.keep,
            readers=None if self.can_read is None else np.flatnonzero(self.can_read),
        )
        return replace(grid, extent_bytes=through_pool, own_extent_bytes=own)

    def placement_request(self, rank_bytes: tuple[int, ...], use: ChunkUse) -> PlacementRequest:
        slices = self.demands.slices
        num_runs = int(slices.num_runs.sum())
        mean_run = float((slices.run_bytes * slices.num_runs).sum()) / num_runs if num_runs else math.inf
        return PlacementRequest(
            parallel=self.demands.parallel,
            rank_bytes=rank_bytes,
            topology=self.topology,
            costs=transfer_costs(
                CostModel(self.topology, remote=self.is_remote),
                verified=self.manifest.reference is not None,
                run_bytes=mean_run,
            ),
            load=transfer_load(self.demands, use, direct=self.allow_direct),
        )

    def routing_request(self, placed: PlacementRequest, pieces: Cut, seats: Sequence[Seat]) -> RoutingRequest:
        costs, load = placed.costs, placed.load
        assert costs is not None
        assert load is not None
        nbytes = pieces.end - pieces.begin
        largest = int(nbytes.max(initial=0))
        room = [keep_budget_bytes(node, self.config, largest_extent_bytes=largest) for node in self.topology.nodes]
        order = {
            seat: at for at, seat in enumerate((node.id, g.index) for node in self.topology.nodes for g in node.gpus)
        }
        gpus = np.array([order[seat.node, seat.gpu] for seat in seats], np.int64)
        busy, _ = Makespan(costs, load, len(seats)).copies(gpus)
        return RoutingRequest(
            topology=self.topology,
            costs=costs,
            nbytes=nbytes,
            only_rank=pieces.only_rank,
            first_node=pieces.nodes.first,
            nodes=pieces.nodes.values,
            need=pieces.need,
            busy=busy.nodes,
            pool_room_bytes=np.array(room, np.int64) if self.keep else None,
            readers=self.can_read,
            allow_direct=self.allow_direct,
            min_direct_bytes=self.config.routing.min_direct_bytes,
        )


def _place(
    request: PlacementRequest, policy: PlacementPolicy, demands: Demands, manifest: Manifest
) -> tuple[Seat, ...]:
    check_enough_gpus(request)
    decision = policy.place(request)
    check_placement(policy.name, request, decision)
    if decision.unplaced:
        raise device_error(request, decision, policy, demands, manifest)
    return tuple(seat for seat in decision.seats if seat is not None)


def _nodes_of(seats: Sequence[Seat], topology: Topology) -> Int64Array:
    index = {node.id: position for position, node in enumerate(topology.nodes)}
    return np.array([index[seat.node] for seat in seats], np.int64)


def _routes(request: RoutingRequest, policy: RoutingPolicy, node_of_rank: Int64Array) -> RoutingDecision:
    decision = policy.route(request)
    check_routing(policy.name, request, decision, node_of_rank)
    return decision


def _line(
    pieces: Cut, routes: RoutingDecision, question: RoutingRequest, node_of_rank: Int64Array
) -> tuple[NodeId, ...]:
    topology = question.topology
    pooled = ~routes.direct
    weights = (pieces.end - pieces.begin)[pooled]
    read_bytes = np.bincount(routes.node[pooled], weights=weights, minlength=len(topology.nodes)).astype(np.int64)
    line = line_of(topology, read_bytes, np.union1d(node_of_rank, routes.node[pooled]))
    if not line:
        return line
    members, read = _handed_on(pieces, routes, topology)
    copying = np.zeros_like(question.costs.read) if question.busy is None else question.busy
    return shorter_line(topology, line, members, read, question.costs, copying)


def _handed_on(pieces: Cut, routes: RoutingDecision, topology: Topology) -> tuple[list[Int64Array], Float64Array]:
    """Groups of nodes that need the same blocks, and ``[group, node]``, the bytes of them that each node reads."""
    through_pool = np.flatnonzero(~routes.direct[pieces.block_extent])
    groups: dict[bytes, int] = {}
    members: list[Int64Array] = []
    group_of = np.zeros(len(pieces.set_nodes), np.int64)
    for index in range(len(pieces.set_nodes)):
        nodes = pieces.set_nodes.values[pieces.set_nodes.first[index] : pieces.set_nodes.first[index + 1]]
        group_of[index] = groups.setdefault(nodes.tobytes(), len(groups))
        if len(groups) > len(members):
            members.append(nodes)
    num_nodes = len(topology.nodes)
    reader = routes.node[pieces.block_extent[through_pool]]
    key = group_of[pieces.block_consumers[through_pool]] * num_nodes + reader
    nbytes = np.bincount(key, weights=pieces.block_nbytes[through_pool], minlength=len(members) * num_nodes)
    return members, nbytes.reshape(-1, num_nodes).astype(np.float64)


def _pool_need(
    pieces: Cut,
    routes: RoutingDecision,
    line: Sequence[NodeId],
    topology: Topology,
    manifest: Manifest,
    config: Config,
) -> dict[str, int]:
    """By node, the bytes of all blocks that pass through its pool: those it cuts and those it takes in for its ranks.

    Raises:
        CapacityError: The blocks of one extent are more than a pool may take of such at a time.
    """
    owner, node = pieces.set_nodes.explode(np.arange(len(pieces.set_nodes), dtype=np.int64))
    reader = routes.node[pieces.block_extent]
    through_pool = ~routes.direct[pieces.block_extent]
    order = Line(line)
    need: dict[str, int] = {}
    for index, item in enumerate(topology.nodes):
        consumed = np.zeros(len(pieces.set_nodes), np.bool_)
        consumed[owner[node == index]] = True
        read = through_pool & (reader == index)
        taken = through_pool & (reader != index) & consumed[pieces.block_consumers]
        if not (read | taken).any():
            continue
        sources = [topology.nodes[position].id for position in np.unique(reader[taken]).tolist()]
        sides = order.sides(item.id, sources) if line else ()
        limits = credit_limits(pool_budget_bytes(item, config), sides)
        at_once = np.zeros(len(pieces.begin))
        np.add.at(at_once, pieces.block_extent[read], pieces.block_nbytes[read])
        _check_pool(item, config, at_once, limits["read"], pieces, manifest)
        # What is taken in comes block by block.
        at_once[:] = 0
        np.maximum.at(at_once, pieces.block_extent[taken], pieces.block_nbytes[taken])
        _check_pool(item, config, at_once, min((limits[side] for side in sides), default=0), pieces, manifest)
        need[item.id] = int(pieces.block_nbytes[read | taken].sum())
    return need


def _check_pool(
    node: Node, config: Config, at_once: Float64Array, limit_bytes: int, pieces: Cut, manifest: Manifest
) -> None:
    """Refuses a pool that is too small for what comes into it at once, by extent."""
    if at_once.max(initial=0.0) > limit_bytes:
        extent = int(at_once.argmax())
        path = manifest.files[int(pieces.file[extent])].path
        what = f"extent {extent} (bytes {pieces.begin[extent]}-{pieces.end[extent]} of {path})"
        raise pool_error(node, config, int(at_once[extent]), what, limit_bytes=limit_bytes)


def _bytes_to_device(pieces: Cut) -> int:
    num_ranks = np.array([len(members) for members in pieces.sets] or [0], np.int64)
    segments = pieces.segments
    return int((segments.run_bytes * segments.num_runs * num_ranks[segments.consumers]).sum())


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
