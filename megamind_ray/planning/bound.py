"""Lower bounds: seconds below which no execution of a plan, and no plan of a request, can be (docs/design/0020).

Both count what is taken of each resource and divide by its rate. For a plan that is arithmetic; for a request it is the
least over all placements and all readers, from conditions that every placement meets
(``policies.placement.relaxation``). Neither knows latencies, nor that one thing waits for another: what the simulator
adds to the bound is what pipelining, credits and calls cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megamind_ray.config import IoConfig
from megamind_ray.core.demands import Demands, Int64Array
from megamind_ray.core.line import Line
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.plan import DIRECT, Plan
from megamind_ray.core.topology import Topology
from megamind_ray.planning.block_runs import block_runs
from megamind_ray.planning.columns import Grouped, expand
from megamind_ray.planning.cost import CostModel, ResourceKind, Step
from megamind_ray.planning.grid import ChunkUse, Grid, Rows, chunk_use, packed, rows_of
from megamind_ray.planning.transfers import NODE_KINDS, transfer_costs, transfer_load
from megamind_ray.policies.costs import Float64Array, TransferCosts
from megamind_ray.policies.placement.base import PlacementRequest
from megamind_ray.policies.placement.domains import slots
from megamind_ray.policies.placement.locality import Group, groups_of
from megamind_ray.policies.placement.refutation import Refutation, refute
from megamind_ray.policies.placement.relaxation import least_seconds

__all__ = ["Bound", "kept_together", "lower_bound", "plan_bound", "search"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds that cannot be beaten.

    Attributes:
        seconds: The largest of ``by_resource``, or more where resources together allow less than each alone.
        resource: The name of the resource that takes longest; empty where nothing is moved.
        by_resource: By name, the seconds that the work takes of the resource at the least.
    """

    seconds: float
    resource: str
    by_resource: Mapping[str, float]


def plan_bound(plan: Plan, model: CostModel) -> Bound:
    """What the steps of a plan take of each resource, and so the seconds that no execution of it beats.

    Args:
        plan: The plan.
        model: The hardware that it was made for.

    Raises:
        KeyError: The plan names a node or a GPU that the hardware does not have.
    """
    units = np.zeros(len(model.resources))
    for step, nbytes in _Work(plan, model).steps():
        for item, per_byte in step.uses:
            units[item] += per_byte * nbytes
    seconds = units / np.array([resource.capacity for resource in model.resources])
    by_resource = {
        str(resource): busy for resource, busy in zip(model.resources, seconds.tolist(), strict=True) if busy > 0
    }
    slowest = max(by_resource, key=by_resource.__getitem__, default="")
    return Bound(seconds=by_resource.get(slowest, 0.0), resource=slowest, by_resource=by_resource)


class _Work:
    """The steps of a plan, all of one kind and place together: a bound does not ask for their order."""

    def __init__(self, plan: Plan, model: CostModel) -> None:
        self._plan, self._model = plan, model
        self._index = index = {node.id: position for position, node in enumerate(model.topology.nodes)}
        extents, blocks, ranks = plan.tables["extents"], plan.tables["blocks"], plan.tables["ranks"]
        self._size = len(index)
        self._line, self._names = Line(plan.line), [node.id for node in model.topology.nodes]
        self._node_of_rank = np.array([index[name] for name in ranks["node"].to_pylist()], np.int64)
        self._nbytes = extents["end"].to_numpy() - extents["begin"].to_numpy()
        node, route = (extents[name].combine_chunks() for name in ("node", "route"))
        words = np.array([index.get(name, -1) for name in node.dictionary.to_pylist()] or [-1], np.int64)
        self._reader = words[node.indices.to_numpy()]
        is_direct = np.array([word == DIRECT for word in route.dictionary.to_pylist()] or [False])
        self._block_nbytes = blocks["nbytes"].to_numpy()
        self._consumers = blocks["consumers"].to_numpy()
        extent = blocks["extent"].to_numpy()
        self._cutter = self._reader[extent]
        self._pooled = ~is_direct[route.indices.to_numpy()][extent]
        pairs = plan.tables["consumers"]
        owner = pairs["consumers"].to_numpy().astype(np.int64)
        num_sets = int(owner.max(initial=-1)) + 1
        self._sets = Grouped.from_pairs(owner, pairs["rank"].to_numpy().astype(np.int64), num_sets)

    def steps(self) -> Iterator[tuple[Step, float]]:
        """(what is done, with how many bytes)."""
        yield from self._reads()
        yield from self._cuts()
        yield from self._hops()
        yield from self._copies()

    def _reads(self) -> Iterator[tuple[Step, float]]:
        read = np.bincount(self._reader, weights=self._nbytes, minlength=self._size)
        for node in np.flatnonzero(read).tolist():
            yield self._model.read(node, self._plan.chunk_bytes), float(read[node])
            if self._plan.is_referenced:
                yield self._model.verify(node), float(read[node])

    def _cuts(self) -> Iterator[tuple[Step, float]]:
        runs, packed = block_runs(self._plan)
        strided = np.flatnonzero(self._pooled & ~packed)
        num_runs = np.bincount(self._cutter[strided], weights=runs[strided], minlength=self._size)
        cut, summed = (self._cut_bytes(blocks) for blocks in (strided, np.flatnonzero(self._pooled & packed)))
        for node in np.flatnonzero(cut + summed).tolist():
            if cut[node]:
                # So much a byte and so much a run: the mean run of all blocks costs what they cost together.
                yield self._model.cut(node, float(cut[node] / num_runs[node])), float(cut[node])
            yield self._model.cut(node, packed=True), float(summed[node])
            yield self._model.put(node), float(cut[node] + summed[node])

    def _cut_bytes(self, blocks: Int64Array) -> Float64Array:
        """By node, the bytes of some blocks that it cuts."""
        weights = self._block_nbytes[blocks].astype(np.float64)
        return np.asarray(np.bincount(self._cutter[blocks], weights=weights, minlength=self._size), np.float64)

    def _hops(self) -> Iterator[tuple[Step, float]]:
        """Blocks along the line to each consumer node but the one that cuts them."""
        size, num_sets = self._size, len(self._sets)
        key = self._cutter[self._pooled] * max(1, num_sets) + self._consumers[self._pooled]
        nbytes = np.bincount(key, weights=self._block_nbytes[self._pooled], minlength=size * num_sets)
        owner, rank = self._sets.explode(np.arange(num_sets, dtype=np.int64))
        nodes = Grouped.from_pairs(owner, self._node_of_rank[rank], num_sets)
        between = np.zeros((size, size))
        for used in np.flatnonzero(nbytes).tolist():
            source, consumers = divmod(used, max(1, num_sets))
            _, homes = nodes.explode(np.array([consumers]))
            for one, other in self._line.hops(self._names[source], [self._names[home] for home in homes.tolist()]):
                between[self._index[one], self._index[other]] += nbytes[used]
        for here, there in np.argwhere(between).tolist():
            yield self._model.wire(here, there), float(between[here, there])
        for node, taken in enumerate(between.sum(axis=0).tolist()):
            yield self._model.put(node), taken

    def _copies(self) -> Iterator[tuple[Step, float]]:
        taken, read = (self._rank_bytes(blocks) for blocks in (self._pooled, ~self._pooled))
        gpus = self._plan.tables["ranks"]["gpu"].to_pylist()
        for at, (node, gpu) in enumerate(zip(self._node_of_rank.tolist(), gpus, strict=True)):
            position = {item.index: place for place, item in enumerate(self._model.topology.nodes[node].gpus)}[gpu]
            yield self._model.copy(node, position), float(taken[at])
            yield self._model.place(node, position), float(read[at])

    def _rank_bytes(self, blocks: npt.NDArray[np.bool_]) -> Float64Array:
        """By rank, the bytes that it takes of some blocks."""
        segments = self._plan.tables["segments"]
        nbytes = (
            segments["run_bytes"].to_numpy() * segments["num_runs"].to_numpy() * blocks[segments["block"].to_numpy()]
        )
        by_set = np.bincount(segments["consumers"].to_numpy(), weights=nbytes, minlength=len(self._sets))
        owner, rank = self._sets.explode(np.arange(len(self._sets), dtype=np.int64))
        return np.asarray(np.bincount(rank, weights=by_set[owner], minlength=len(self._node_of_rank)), np.float64)


def lower_bound(
    manifest: Manifest,
    demands: Demands,
    model: CostModel,
    *,
    rank_bytes: Sequence[int] | None = None,
    chunk_bytes: int = IoConfig().chunk_bytes,
    direct: bool = True,
    together: Sequence[Group] = (),
    explain: bool = True,
) -> Bound:
    """Seconds that no plan of a load beats, whatever policies made it.

    Over all placements on the model's hardware, and all readers that need some of what they read.

    Args:
        manifest: The checkpoint.
        demands: What the ranks need of it.
        model: The hardware.
        rank_bytes: Device memory that each rank needs; None asks for none, which never gives more.
        chunk_bytes: The chunk grid, where the checkpoint has no recorded checksums.
        direct: Whether ranks may read for themselves.
        together: Only over placements that keep these groups together, as ``kept_together`` gives them.
        explain: Find the seconds of each resource, too, which takes ten times as long; without, it is named by none.

    Returns:
        The bound; infinite where the mesh does not fit. Its resources are named by kind, for all nodes together.
    """
    request = _request(manifest, demands, model, rank_bytes, chunk_bytes, direct=direct)
    assert request.costs is not None
    total = least_seconds(request, together)
    if not explain:
        return Bound(seconds=total if total > 2 * _NOTHING_S else 0.0, resource="", by_resource={})
    by_resource = {
        str(kind): found
        for kind in dict.fromkeys(resource.kind for resource in model.resources)
        if kind not in _UPLINKS
        and (found := least_seconds(request, together, costs=_only(request.costs, kind))) > _NOTHING_S
    }
    slowest = max(by_resource, key=by_resource.__getitem__, default="")
    return Bound(seconds=total if by_resource else 0.0, resource=slowest, by_resource=by_resource)


def search(
    manifest: Manifest,
    demands: Demands,
    model: CostModel,
    deadline_s: float,
    *,
    rank_bytes: Sequence[int] | None = None,
    chunk_bytes: int = IoConfig().chunk_bytes,
    direct: bool = True,
    together: Sequence[Group] = (),
    max_steps: int = 20_000,
) -> Refutation:
    """Whether any plan of a load is done by a deadline, by going through the placements there are.

    Says more than ``lower_bound`` where items are few and whole, and takes seconds to minutes. The arguments are its.

    Args:
        manifest: The checkpoint.
        demands: What the ranks need of it.
        model: The hardware.
        deadline_s: The deadline.
        rank_bytes: Device memory that each rank needs.
        chunk_bytes: The chunk grid.
        direct: Whether ranks may read for themselves.
        together: Groups that are kept.
        max_steps: Nodes to try before giving up.
    """
    request = _request(manifest, demands, model, rank_bytes, chunk_bytes, direct=direct)
    return refute(request, together, deadline_s, max_steps=max_steps)


_UPLINKS = (ResourceKind.RACK_IN, ResourceKind.RACK_OUT)
# Bisection starts here: what takes less takes nothing.
_NOTHING_S = 1e-6


def kept_together(plan: Plan, topology: Topology) -> tuple[Group, ...]:
    """What the placement of a plan keeps on one node, or closer."""
    by_name = {(slot.node.id, slot.gpu.index): slot for slot in slots(topology)}
    ranks = plan.tables["ranks"]
    seats = zip(ranks["node"].to_pylist(), ranks["gpu"].to_pylist(), strict=True)
    return groups_of(plan.parallel, [by_name[node, gpu] for node, gpu in seats])


def _request(
    manifest: Manifest,
    demands: Demands,
    model: CostModel,
    rank_bytes: Sequence[int] | None,
    chunk_bytes: int,
    *,
    direct: bool,
) -> PlacementRequest:
    reference = manifest.reference
    grid = Grid(
        files=manifest.files,
        chunk_bytes=reference.chunk_bytes if reference else chunk_bytes,
        extent_bytes=chunk_bytes,
        max_gap_bytes=0,
    )
    rows = rows_of(demands.slices, grid)
    use = chunk_use(rows, len(demands.consumer_sets), grid)
    return PlacementRequest(
        parallel=demands.parallel,
        rank_bytes=tuple(rank_bytes or (0,) * demands.parallel.world),
        topology=model.topology,
        # Blocks that need no cutting, and ranks that read for themselves where they may, take the least.
        costs=transfer_costs(model, verified=reference is not None, packed=True, placed=direct),
        load=transfer_load(demands, use, direct=direct, strided_bytes=_strided_bytes(rows, use, grid)),
    )


def _strided_bytes(rows: Rows, use: ChunkUse, grid: Grid) -> Float64Array:
    """By kind of chunk, bytes that blocks have to be cut for: of slices with two or more runs in the same chunk."""
    size = grid.chunk_bytes
    strided = np.flatnonzero((rows.stride > rows.run) & (3 * rows.stride <= size))
    begin, run, stride = rows.begin[strided], rows.run[strided], rows.stride[strided]
    # Of chunks that lie within the slice from end to end.
    first, last = -(-begin // size), rows.end[strided] // size
    owner, step = expand(np.maximum(last - first, 0))
    chunk = first[owner] + step
    begin, run, stride = begin[owner], run[owner], stride[owner]
    nbytes = packed((chunk + 1) * size - begin, run, stride) - packed(chunk * size - begin, run, stride)
    kind = use.kind[np.searchsorted(use.chunk, chunk)]
    return np.asarray(np.bincount(kind, weights=nbytes, minlength=len(use.sets)), np.float64)


def _only(costs: TransferCosts, kind: ResourceKind) -> TransferCosts:
    """As if all other resources were endless."""
    keep = np.array([1.0 if item is kind else 0.0 for item in NODE_KINDS])

    def on(chosen: ResourceKind, values: Float64Array) -> Float64Array:
        return values if kind is chosen else np.zeros_like(values)

    return replace(
        costs,
        read=costs.read * keep,
        pack=costs.pack * keep,
        send=costs.send * keep,
        take=costs.take * keep,
        copy=costs.copy * keep,
        cut=None if costs.cut is None else costs.cut * keep,
        storage=on(ResourceKind.STORAGE, costs.storage),
        device=on(ResourceKind.DEVICE, costs.device),
        switch=on(ResourceKind.SWITCH, costs.switch),
        uplink=np.zeros_like(costs.uplink),
    )
