"""What fits where: budgets of the pools, blocks that can stay in them, and errors that say what would fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megamind_ray.config import Config
from megamind_ray.core.demands import Demands, Int64Array
from megamind_ray.core.exchange import ROOM_IN_POOL
from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import POOL, Plan
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.errors import CapacityError
from megamind_ray.policies.placement.base import PlacementDecision, PlacementPolicy, PlacementRequest
from megamind_ray.units import format_bytes

__all__ = [
    "choose_keep_blocks",
    "comes_to",
    "device_error",
    "keep_budget_bytes",
    "pool_budget_bytes",
    "pool_error",
]

_LARGER_GPUS = "No larger mesh fits these GPUs either: take larger or more of them, or weights of fewer bits"


def pool_budget_bytes(node: Node, config: Config) -> int:
    """Bytes that blocks of a load may take of a node's object store, replicas included."""
    return max(0, int(node.pool_bytes * config.pool.max_fraction) - node.pool_taken_bytes)


def keep_budget_bytes(node: Node, config: Config, *, largest_extent_bytes: int = 0) -> int:
    """Bytes that kept blocks may take of a node's object store.

    Args:
        node: The node.
        config: For ``pool.max_fraction`` and ``pool.keep_fraction``.
        largest_extent_bytes: Room for four of these is left for streaming, whatever the configuration says.
    """
    budget = pool_budget_bytes(node, config)
    return max(0, min(int(budget * config.pool.keep_fraction), budget - ROOM_IN_POOL * largest_extent_bytes))


def pool_error(node: Node, config: Config, needed_bytes: int, what: str, *, limit_bytes: int) -> CapacityError:
    """That the blocks of one extent do not fit a node's pool together.

    Args:
        node: The node.
        config: For ``pool.max_fraction``.
        needed_bytes: Of these blocks.
        what: The extent, in words.
        limit_bytes: What such blocks may take there: all of the pool's budget, or a part of it.
    """
    budget = pool_budget_bytes(node, config)
    share, taken = config.pool.max_fraction, node.pool_taken_bytes
    part = f", {limit_bytes / budget:.0%} of that for such blocks" if limit_bytes < budget else ""
    enough_bytes = needed_bytes * (budget / limit_bytes if limit_bytes else 1)
    less = f" less {format_bytes(taken)} that other models and objects hold" if taken else ""
    return CapacityError(
        f"node {node.id}: {what} puts {format_bytes(needed_bytes)} of blocks into its pool at once; blocks may take "
        f"{format_bytes(limit_bytes)} there ({share:.0%} of the object store's {format_bytes(node.pool_bytes)}{less}"
        f"{part}); give it an object store of at least {format_bytes((enough_bytes + taken) / share)}, or take a "
        "smaller io.chunk_bytes",
        where=f"pool of node {node.id}",
        needed_bytes=needed_bytes,
        free_bytes=limit_bytes,
    )


def choose_keep_blocks(plan: Plan, topology: Topology, config: Config) -> dict[NodeId, Int64Array]:
    """Which blocks stay in the pool of each node, by plan id, ascending.

    A node first keeps the blocks it cuts itself, so that one copy of each is somewhere; what room is left goes to
    replicas of blocks that its own ranks need. Both in plan order, as far as ``keep_budget_bytes`` reaches.
    """
    blocks = plan.tables["blocks"]
    extent, nbytes = blocks["extent"].to_numpy(), blocks["nbytes"].to_numpy()
    sizes = np.bincount(extent, weights=nbytes) if len(extent) else np.zeros(1)
    reader = _reader_of_extent(plan, topology)[extent]
    kept: dict[NodeId, Int64Array] = {}
    for index, node in enumerate(topology.nodes):
        room = keep_budget_bytes(node, config, largest_extent_bytes=int(sizes.max()))
        own = np.flatnonzero(reader == index)
        taken_in = np.flatnonzero((reader != index) & (reader >= 0) & _needed_on(plan, node.id))
        candidates = np.concatenate([own, taken_in])
        kept[node.id] = np.sort(candidates[np.cumsum(nbytes[candidates]) <= room]).astype(np.int64)
    return kept


def comes_to(plan: Plan, node: NodeId) -> npt.NDArray[np.bool_]:
    """By block, whether it comes to a node's pool, where the node could keep it: it cuts it, or its ranks need it."""
    reads = np.array([name == node for name in plan.tables["extents"]["node"].to_pylist()], np.bool_)
    result: npt.NDArray[np.bool_] = reads[plan.tables["blocks"]["extent"].to_numpy()] | _needed_on(plan, node)
    return result


def _reader_of_extent(plan: Plan, topology: Topology) -> Int64Array:
    """By extent, the index of the node that reads it for the pool; -1 for direct ones."""
    extents = plan.tables["extents"]
    index = {node.id: position for position, node in enumerate(topology.nodes)}
    route, node = extents["route"].combine_chunks(), extents["node"].combine_chunks()
    words = np.array([index.get(NodeId(word), -1) for word in node.dictionary.to_pylist()] or [-1], np.int64)
    pool = np.array([word == POOL for word in route.dictionary.to_pylist()] or [False])
    return np.where(pool[route.indices.to_numpy()], words[node.indices.to_numpy()], -1)


def _needed_on(plan: Plan, node: NodeId) -> npt.NDArray[np.bool_]:
    """By block, whether a rank of the node consumes it."""
    ranks, pairs, blocks = plan.tables["ranks"], plan.tables["consumers"], plan.tables["blocks"]
    here = np.array([name == node for name in ranks["node"].to_pylist()])
    sets = pairs["consumers"].to_numpy()
    needed = np.zeros(int(sets.max(initial=-1)) + 1, np.bool_)
    needed[sets[here[pairs["rank"].to_numpy()]]] = True
    result: npt.NDArray[np.bool_] = needed[blocks["consumers"].to_numpy()]
    return result


@dataclass(frozen=True, slots=True)
class _Seating:
    """What ``device_error`` looks at."""

    request: PlacementRequest
    policy: PlacementPolicy
    demands: Demands
    manifest: Manifest


def device_error(
    request: PlacementRequest,
    decision: PlacementDecision,
    policy: PlacementPolicy,
    demands: Demands,
    manifest: Manifest,
) -> CapacityError:
    """That some ranks fit no GPU: names the GPU that comes nearest, need, free space and the changes that would fit."""
    rank = max(decision.unplaced, key=lambda rank: request.rank_bytes[rank])
    need, at = request.rank_bytes[rank], request.parallel.coords(rank)
    node, gpu = _roomiest_left(request.topology, decision)
    changes = [*_freeing(request), *_other_meshes(_Seating(request, policy, demands, manifest))]
    remedy = f"Smallest change that fits: {'; or '.join(changes)}" if changes else _LARGER_GPUS
    return CapacityError(
        f"rank {rank} (pp={at.pp} dp={at.dp} tp={at.tp}) needs {format_bytes(need)}, and the roomiest GPU left, "
        f"{node.id}:{gpu.index}, has {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.memory_bytes)} "
        f"({format_bytes(need - gpu.free_bytes)} too little). {remedy}",
        where=f"GPU {node.id}:{gpu.index}",
        needed_bytes=need,
        free_bytes=gpu.free_bytes,
    )


def _roomiest_left(topology: Topology, decision: PlacementDecision) -> tuple[Node, Gpu]:
    taken = {(seat.node, seat.gpu) for seat in decision.seats if seat is not None}
    left = [(node, gpu) for node in topology.nodes for gpu in node.gpus if (node.id, gpu.index) not in taken]
    return max(left, key=lambda item: item[1].free_bytes)


def _freeing(request: PlacementRequest) -> list[str]:
    """What to free so that the mesh fits: the i-th largest rank on the i-th roomiest GPU needs the least in all."""
    gpus = [(node, gpu) for node in request.topology.nodes for gpu in node.gpus]
    roomiest = sorted(gpus, key=lambda item: -item[1].free_bytes)
    short: list[str] = []
    for need, (node, gpu) in zip(sorted(request.rank_bytes, reverse=True), roomiest, strict=False):
        if need > gpu.memory_bytes:
            return []
        if need > gpu.free_bytes:
            short.append(f"{format_bytes(need - gpu.free_bytes)} on {node.id}:{gpu.index}")
    shown = short if len(short) <= 4 else [*short[:3], f"as much on {len(short) - 3} more"]
    # Nothing is short, so the policy passed by a placement that exists; Best-Fit finds it (docs/design/0005).
    return [f"free {', '.join(shown)}" if short else "the configuration placement.policy = 'best_fit' places it"]


def _other_meshes(seating: _Seating) -> list[str]:
    """The smallest larger mesh by tp, and by pp, that the same policy can place; sizes are estimates."""
    found: list[str] = []
    parallel = seating.request.parallel
    for axis in ("tp", "pp"):
        for factor in (2, 3, 4, 6, 8, 12, 16, 32, 64):
            size = getattr(parallel, axis) * factor
            other = replace(parallel, **{axis: size})
            if other.world > seating.request.topology.num_gpus:
                break
            needs = _needs_at(seating, axis, factor, other)
            if needs and not seating.policy.place(_resized(seating.request, other, needs)).unplaced:
                found.append(f"{axis}={size} would need about {format_bytes(max(needs))} per GPU and fits")
                break
    return found


def _resized(request: PlacementRequest, parallel: Parallel, needs: tuple[int, ...]) -> PlacementRequest:
    """The question for another mesh, of which nothing but the sizes is known."""
    return replace(request, parallel=parallel, rank_bytes=needs, costs=None, load=None)


def _needs_at(seating: _Seating, axis: str, factor: int, other: Parallel) -> tuple[int, ...]:
    """Device bytes by rank of another mesh; empty where the model cannot be split so."""
    parallel, views = seating.request.parallel, seating.demands.views
    heads = seating.manifest.config.get("num_attention_heads")
    if axis == "tp" and ((isinstance(heads, int) and heads % other.tp) or parallel.ep > 1):
        return ()
    if axis == "pp" and len(seating.demands.stage_of_layer) < other.pp:
        return ()
    replicated = np.array([tensor.replicated for tensor in seating.demands.tensors], np.bool_)[views.tensor]
    own = np.where(views.alias != 0, 0, views.nbytes)
    fixed = np.bincount(views.rank[replicated], weights=own[replicated], minlength=parallel.world)
    # Alignment and what else the arena has beyond its tensors counts as fixed.
    split = np.array(seating.request.rank_bytes) - fixed
    needs = fixed + split / factor if axis == "tp" else (fixed + split) / factor
    # Every stage of the other mesh is at most as large as the share of the largest stage here.
    coords = [other.coords(rank) for rank in other.ranks]
    stages = needs.reshape(parallel.pp, parallel.dp * parallel.tp).max(axis=1)
    return tuple(int(stages[at.pp * parallel.pp // other.pp]) for at in coords)
