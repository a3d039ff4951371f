"""A plan cut into one program per executor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import ExtentId, LoadId, NodeId, Rank
from megamind_ray.core.line import Line
from megamind_ray.core.load_machine import LoadFacts
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.plan import DIRECT, Plan
from megamind_ray.core.program import (
    AgentProgram,
    BlockTable,
    ExtentTable,
    FileTable,
    RankProgram,
    SegmentTable,
    View,
)
from megamind_ray.core.tensor import DType
from megamind_ray.errors import RequestError
from megamind_ray.planning.columns import Grouped, expand

__all__ = ["compile_agent", "compile_rank", "file_table", "load_facts", "relay_sources"]

_Mask = npt.NDArray[np.bool_]


def compile_rank(plan: Plan, manifest: Manifest, rank: Rank, load: LoadId) -> RankProgram:
    """What one rank does.

    Raises:
        RequestError: The plan has no such rank.
    """
    if rank not in plan.parallel.ranks:
        raise RequestError(f"rank {rank}: the plan has ranks 0 to {plan.parallel.world - 1}")
    columns = _Columns.of(plan)
    own = columns.direct & (_ints(plan.tables["extents"], "rank") == rank)
    blocks = np.flatnonzero(columns.consumed_by((rank,)))
    through_pool = ~columns.direct[columns.block_extent[blocks]]
    extents = np.flatnonzero(own)
    return RankProgram(
        load=load,
        rank=rank,
        coords=plan.parallel.coords(rank),
        arena_bytes=int(_ints(plan.tables["ranks"], "arena_bytes")[rank]),
        views=_views(plan, rank),
        files=file_table(manifest, plan.chunk_bytes, columns.files_of(extents)),
        extents=columns.extent_table(extents),
        blocks=columns.block_table(blocks, rank),
        segments=columns.segment_table(blocks, rank),
        pool_blocks=blocks[through_pool],
    )


def compile_agent(
    plan: Plan,
    manifest: Manifest,
    node: NodeId,
    load: LoadId,
    *,
    credit_bytes: int,
    keep_blocks: Int64Array,
    extents: Collection[ExtentId] | None = None,
    ranks: Collection[Rank] | None = None,
) -> AgentProgram:
    """What one node agent does.

    Args:
        plan: The plan.
        manifest: The checkpoint that it was made for.
        node: Node of the agent.
        load: The load.
        credit_bytes: Bytes of blocks that this load may have in the node's pool at a time.
        keep_blocks: Plan ids of the blocks that stay in the node's pool, ascending.
        extents: Compile a fragment that reads these extents, whoever was to read them by plan and by whatever route.
        ranks: Only blocks that one of these ranks consumes, and consumer sets without all other ranks.

    Raises:
        RequestError: The plan has no such extent.
    """
    columns = _Columns.of(plan)
    if extents is None:
        chosen = np.flatnonzero(~columns.direct & (columns.reader == columns.nodes.get(node, -1)))
    else:
        chosen = np.unique(np.fromiter(extents, np.int64, len(extents)))
        if len(chosen) and not 0 <= chosen[0] <= chosen[-1] < len(columns.begin):
            raise RequestError(f"extents {chosen.tolist()}: the plan has extents 0 to {len(columns.begin) - 1}")
    wanted = np.isin(columns.block_extent, chosen)
    if ranks is not None:
        wanted &= columns.consumed_by(ranks)
        chosen = np.unique(columns.block_extent[wanted])
    blocks = np.flatnonzero(wanted)
    return AgentProgram(
        load=load,
        node=node,
        files=file_table(manifest, plan.chunk_bytes, columns.files_of(chosen)),
        extents=columns.extent_table(chosen),
        blocks=columns.block_table(blocks),
        segments=columns.segment_table(blocks),
        consumer_sets=columns.consumer_sets(blocks, ranks),
        node_of_rank={Rank(rank): NodeId(home) for rank, home in enumerate(plan.tables["ranks"]["node"].to_pylist())},
        line=plan.line,
        relays=columns.relays(plan, node) if extents is None else {},
        keep_blocks=np.asarray(keep_blocks, np.int64),
        credit_bytes=credit_bytes,
    )


def load_facts(plan: Plan, *, max_worker_restarts: int) -> LoadFacts:
    """What the state machine of the load needs to know of the plan."""
    columns = _Columns.of(plan)
    names = list(columns.nodes)
    used = set(plan.tables["ranks"]["node"].to_pylist()) | {names[i] for i in np.unique(columns.reader).tolist()}
    return LoadFacts(
        nodes=tuple(NodeId(name) for name in names if name in used),
        num_ranks=plan.parallel.world,
        reader={
            ExtentId(extent): NodeId(names[columns.reader[extent]])
            for extent in np.flatnonzero(~columns.direct).tolist()
        },
        consumers={ExtentId(extent): ranks for extent, ranks in enumerate(columns.consumers())},
        extent_bytes={ExtentId(extent): nbytes for extent, nbytes in enumerate((columns.end - columns.begin).tolist())},
        max_worker_restarts=max_worker_restarts,
    )


def relay_sources(plan: Plan, nodes: Collection[NodeId]) -> dict[NodeId, tuple[NodeId, ...]]:
    """By node, the nodes that it takes blocks from, for its own ranks and for nodes further on."""
    columns = _Columns.of(plan)
    return {node: tuple(map(NodeId, columns.relays(plan, node))) for node in nodes}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """The columns of a plan that programs are cut from, as numpy. ``reader`` is an index into ``nodes``."""

    file: Int64Array
    begin: Int64Array
    end: Int64Array
    direct: _Mask
    reader: Int64Array
    nodes: Mapping[str, int]
    block_extent: Int64Array
    block_nbytes: Int64Array
    block_consumers: Int64Array
    first_segment: Int64Array
    sets: Grouped
    segments: pa.Table
    segment_consumers: Int64Array

    @classmethod
    def of(cls, plan: Plan) -> _Columns:
        extents, blocks, segments = plan.tables["extents"], plan.tables["blocks"], plan.tables["segments"]
        pairs = plan.tables["consumers"]
        owner = _ints(pairs, "consumers")
        num_sets = int(owner.max(initial=-1)) + 1
        route, routes = _words(extents, "route")
        reader, names = _words(extents, "node")
        return cls(
            file=_ints(extents, "file"),
            begin=_ints(extents, "begin"),
            end=_ints(extents, "end"),
            direct=np.array([word == DIRECT for word in routes] or [False])[route],
            reader=reader,
            nodes={name: index for index, name in enumerate(names)},
            block_extent=_ints(blocks, "extent"),
            block_nbytes=_ints(blocks, "nbytes"),
            block_consumers=_ints(blocks, "consumers"),
            first_segment=_firsts(segments["block"].to_numpy(), len(blocks)),
            sets=Grouped.from_pairs(owner, _ints(pairs, "rank"), num_sets),
            segments=segments,
            segment_consumers=_ints(segments, "consumers"),
        )

    def consumers(self) -> list[tuple[Rank, ...]]:
        """By extent, its ranks. Extents with the same sets have the same tuple: wide meshes have large ones."""
        first = _firsts(self.block_extent, len(self.begin)).tolist()
        known: dict[bytes, tuple[Rank, ...]] = {}
        found: list[tuple[Rank, ...]] = []
        for begin, end in pairwise(first):
            sets = self.block_consumers[begin:end]
            key = sets.tobytes()
            if key not in known:
                _, ranks = self.sets.explode(sets)
                known[key] = tuple(Rank(rank) for rank in np.unique(ranks).tolist())
            found.append(known[key])
        return found

    def consumed_by(self, ranks: Collection[Rank]) -> _Mask:
        """By block, whether one of the ranks consumes it."""
        result: _Mask = self._sets_with(ranks)[self.block_consumers]
        return result

    def _sets_with(self, ranks: Collection[Rank]) -> _Mask:
        """By set, whether one of the ranks is in it."""
        owner, rank = self.sets.explode(np.arange(len(self.sets), dtype=np.int64))
        chosen = np.zeros(len(self.sets), np.bool_)
        chosen[owner[np.isin(rank, list(ranks))]] = True
        return chosen

    def files_of(self, extents: Int64Array) -> list[int]:
        files: list[int] = np.unique(self.file[extents]).tolist()
        return files

    def extent_table(self, extents: Int64Array) -> ExtentTable:
        return ExtentTable(extent=extents, file=self.file[extents], begin=self.begin[extents], end=self.end[extents])

    def block_table(self, blocks: Int64Array, rank: Rank | None = None) -> BlockTable:
        """Rows of some blocks, with as many segments as ``segment_table`` gives."""
        owner, _ = self._segments_of(blocks, rank)
        return BlockTable(
            block=blocks,
            extent=self.block_extent[blocks],
            nbytes=self.block_nbytes[blocks],
            consumers=self.block_consumers[blocks],
            num_segments=np.diff(self.first_segment)[blocks],
            first_segment=_firsts(owner, len(blocks)),
        )

    def segment_table(self, blocks: Int64Array, rank: Rank | None = None) -> SegmentTable:
        """Rows of the segments of some blocks, where a rank is given of those that it takes."""
        owner, rows = self._segments_of(blocks, rank)
        names = [name for name in SegmentTable.__slots__ if name != "position"]
        return SegmentTable(
            position=rows - self.first_segment[blocks][owner],
            **{name: self.segments[name].to_numpy()[rows].astype(np.int64) for name in names},
        )

    def _segments_of(self, blocks: Int64Array, rank: Rank | None) -> tuple[Int64Array, Int64Array]:
        """By segment, which of the blocks it is of, and its row in the plan."""
        owner, step = expand(np.diff(self.first_segment)[blocks])
        rows = self.first_segment[blocks][owner] + step
        if rank is None:
            return owner, rows
        own = self._sets_with((rank,))[self.segment_consumers[rows]]
        return owner[own], rows[own]

    def consumer_sets(self, blocks: Int64Array, ranks: Collection[Rank] | None) -> dict[int, tuple[int, ...]]:
        members = {}
        for index in np.unique(self.block_consumers[blocks]).tolist():
            values = self.sets.values[self.sets.first[index] : self.sets.first[index + 1]].tolist()
            members[index] = tuple(rank for rank in values if ranks is None or rank in ranks)
        return members

    def relays(self, plan: Plan, node: NodeId) -> dict[str, int]:
        """By other node, the blocks that ``node`` takes from it, for its own ranks and for nodes further on."""
        line, names, homes = Line(plan.line), list(self.nodes), plan.tables["ranks"]["node"].to_pylist()
        here = [Rank(rank) for rank, home in enumerate(homes) if home == node]
        taken = self.consumed_by(here) & ~self.direct[self.block_extent]
        num_readers = max(1, len(names))
        keys, counts = np.unique(
            self.block_consumers[taken] * num_readers + self.reader[self.block_extent][taken], return_counts=True
        )
        found: Counter[str] = Counter()
        near: dict[int, list[NodeId]] = {}
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            consumers, reader = divmod(key, num_readers)
            if consumers not in near:
                _, ranks = self.sets.explode(np.array([consumers]))
                near[consumers] = line.next_to(node, {homes[rank] for rank in ranks.tolist()})
            if names[reader] != node:
                found[line.source(node, NodeId(names[reader]), near[consumers])] += count
        return dict(sorted(found.items()))


def _firsts(ascending: npt.NDArray[np.integer[Any]], num: int) -> Int64Array:
    """Where each value from 0 to ``num`` begins."""
    return np.concatenate([[0], np.cumsum(np.bincount(ascending, minlength=num))]).astype(np.int64)


def _ints(table: pa.Table, name: str) -> Int64Array:
    return np.asarray(table[name].to_numpy(), np.int64)


def _words(table: pa.Table, name: str) -> tuple[Int64Array, list[str]]:
    """A dictionary column as indices and words."""
    column = table[name].combine_chunks()
    return np.asarray(column.indices.to_numpy(), np.int64), column.dictionary.to_pylist()


def _views(plan: Plan, rank: Rank) -> tuple[View, ...]:
    table = plan.tables["views"]
    # Both of one type: numpy would convert the whole column to that of the other.
    first, last = np.searchsorted(table["rank"].to_numpy(), np.array([rank, rank + 1], np.int32)).tolist()
    rows = table.slice(first, last - first).to_pydict()
    dtypes = [DType[label] for label in plan.tables["tensors"]["dtype"].to_pylist()]
    return tuple(
        View(
            name=name,
            tensor=tensor,
            dtype=dtypes[tensor],
            shape=tuple(shape),
            offset=offset,
            nbytes=nbytes,
            alias=alias,
        )
        for name, tensor, shape, offset, nbytes, alias in zip(
            *(rows[key] for key in ("name", "tensor", "shape", "offset", "nbytes", "alias")), strict=True
        )
    )


def file_table(manifest: Manifest, chunk_bytes: int, files: Collection[int] | None = None) -> FileTable:
    """All files by id, but checksums and tensor names only of those in ``files`` (None: of all)."""
    reference = manifest.reference
    chosen = sorted(range(len(manifest.files)) if files is None else files)
    tensors: dict[int, list[tuple[int, int, str]]] = {file: [] for file in chosen}
    for tensor in manifest.tensors.values() if chosen else ():
        if tensor.file in tensors:
            tensors[tensor.file].append((tensor.begin, tensor.end, tensor.name))
    return FileTable(
        root=manifest.root,
        files=manifest.files,
        chunk_bytes=chunk_bytes,
        reference_crc32={file: np.array(reference.files[file].chunks_crc32, np.int64) for file in chosen}
        if reference
        else {},
        reference_origin=reference.origin if reference else "",
        disk_tensors={file: tuple(rows) for file, rows in tensors.items()},
    )
