"""A plan cut into the work of a simulation.

The rows are those of the compiled programs (``planning.compile``). Of very large plans, consecutive extents of a reader
become one **unit**, and its blocks become one for each set of nodes, so that the number of things that are simulated
stays bounded; latencies and calls count for each extent and block all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import ExtentId, NodeId, Rank
from megamind_ray.core.line import Line
from megamind_ray.core.plan import DIRECT, Plan
from megamind_ray.planning.block_runs import block_runs
from megamind_ray.planning.columns import Grouped, distinct
from megamind_ray.sim.work import Block, Unit, Work, rounded

__all__ = ["cut_work"]

_Bool = npt.NDArray[np.bool_]


def cut_work(plan: Plan, *, max_flows: int, max_unit_bytes: int) -> Work:
    """The work of a plan.

    Args:
        plan: What to move.
        max_flows: Extents are merged until about so many flows are left, or nothing can be merged any more.
        max_unit_bytes: Merged extents have no more bytes of blocks than this.
    """
    columns = _Columns.of(plan)
    parts = 1
    while True:
        unit_of_extent = columns.units(parts, max_unit_bytes)
        merged = _merge(columns, unit_of_extent, by_nodes=parts > 1)
        num_units = int(unit_of_extent.max(initial=-1)) + 1
        if _num_flows(columns, merged, num_units) <= max_flows or num_units <= columns.num_readers:
            break
        if parts > 1 and np.bincount(unit_of_extent).max() < parts:
            break  # the pools allow no larger ones
        parts *= 2
    return _build(columns, unit_of_extent, merged)


@dataclass(frozen=True, slots=True)
class _Columns:
    """A plan's columns."""

    nbytes: Int64Array
    pieces: Int64Array
    reader: Int64Array  # index into nodes
    rank: Int64Array
    nodes: tuple[NodeId, ...]
    node_of_rank: tuple[NodeId, ...]
    block_extent: Int64Array
    block_nbytes: Int64Array
    block_set: Int64Array
    block_runs: Int64Array
    block_packed: _Bool
    segment_block: Int64Array
    segment_set: Int64Array
    segment_nbytes: Int64Array
    sets: tuple[tuple[Rank, ...], ...]
    nodes_of_set: tuple[frozenset[NodeId], ...]
    line: Line

    @classmethod
    def of(cls, plan: Plan) -> _Columns:
        extents, blocks, segments = (plan.tables[name] for name in ("extents", "blocks", "segments"))
        begin, end = _ints(extents, "begin"), _ints(extents, "end")
        data_begin = _ints(plan.tables["files"], "data_begin")[_ints(extents, "file")]
        node = extents["node"].combine_chunks()
        node_of_rank = tuple(NodeId(name) for name in plan.tables["ranks"]["node"].to_pylist())
        pairs = plan.tables["consumers"]
        owner = _ints(pairs, "consumers")
        grouped = Grouped.from_pairs(owner, _ints(pairs, "rank"), int(owner.max(initial=-1)) + 1)
        first, values = grouped.first.tolist(), [Rank(rank) for rank in grouped.values.tolist()]
        sets = tuple(tuple(values[first[i] : first[i + 1]]) for i in range(len(grouped)))
        runs, packed = block_runs(plan)
        direct = np.array([word == DIRECT for word in extents["route"].to_pylist()], np.bool_)
        return cls(
            nbytes=end - begin,
            pieces=-(-(end - data_begin) // plan.chunk_bytes) - (begin - data_begin) // plan.chunk_bytes,
            reader=np.asarray(node.indices.to_numpy(), np.int64),
            rank=np.where(direct, _ints(extents, "rank"), -1),
            nodes=tuple(NodeId(name) for name in node.dictionary.to_pylist()),
            node_of_rank=node_of_rank,
            block_extent=_ints(blocks, "extent"),
            block_nbytes=_ints(blocks, "nbytes"),
            block_set=_ints(blocks, "consumers"),
            block_runs=runs,
            block_packed=packed,
            segment_block=_ints(segments, "block"),
            segment_set=_ints(segments, "consumers"),
            segment_nbytes=_ints(segments, "run_bytes") * _ints(segments, "num_runs"),
            sets=sets,
            nodes_of_set=tuple(frozenset(node_of_rank[rank] for rank in members) for members in sets),
            line=Line(plan.line),
        )

    @property
    def num_readers(self) -> int:
        return len(distinct(self._owner()))

    def _owner(self) -> Int64Array:
        """Who reads an extent: agents by their node, then ranks."""
        return np.where(self.rank >= 0, len(self.nodes) + self.rank, self.reader)

    def units(self, parts: int, max_bytes: int) -> Int64Array:
        """By extent its unit: up to ``parts`` consecutive ones of a reader, numbered by their first one."""
        num_extents = len(self.nbytes)
        if parts == 1:
            return np.arange(num_extents, dtype=np.int64)
        sizes = np.bincount(self.block_extent, weights=self.block_nbytes, minlength=num_extents).tolist()
        unit = np.zeros(num_extents, np.int64)
        open_units: dict[int, tuple[int, int, float]] = {}
        num_units = 0
        for extent, owner in enumerate(self._owner().tolist()):
            number, length, nbytes = open_units.get(owner, (-1, parts, 0.0))
            if length >= parts or nbytes + sizes[extent] > max_bytes:
                number, length, nbytes = num_units, 0, 0.0
                num_units += 1
            open_units[owner] = (number, length + 1, nbytes + sizes[extent])
            unit[extent] = number
        return unit


def _ints(table: object, name: str) -> Int64Array:
    return np.asarray(table[name].to_numpy(), np.int64)  # type: ignore[index]


def _merge(columns: _Columns, unit_of_extent: Int64Array, *, by_nodes: bool) -> Int64Array:
    """By block of the plan, the block of the work: the same one, or one for each unit and set of consumer nodes."""
    num_blocks = len(columns.block_extent)
    if not by_nodes:
        return np.arange(num_blocks, dtype=np.int64)
    numbers: dict[frozenset[NodeId], int] = {}
    group = np.array([numbers.setdefault(nodes, len(numbers)) for nodes in columns.nodes_of_set] or [0], np.int64)
    key = unit_of_extent[columns.block_extent] * max(1, len(numbers)) + group[columns.block_set]
    keys, first = np.unique(key, return_index=True)
    number = np.empty(len(keys), np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(len(keys))
    return number[np.searchsorted(keys, key)]


def _num_flows(columns: _Columns, merged: Int64Array, num_units: int) -> int:
    """About how many flows it takes: reads, cuts, relays, and what ranks take."""
    ranks = np.array([len(members) for members in columns.sets] or [0], np.int64)
    nodes = np.array([len(members) for members in columns.nodes_of_set] or [0], np.int64)
    num_blocks = int(merged.max(initial=-1)) + 1
    pair = distinct(merged * len(ranks) + columns.block_set)
    block, one_set = pair // len(ranks), pair % len(ranks)
    relays = np.zeros(num_blocks, np.int64)
    np.maximum.at(relays, block, nodes[one_set])
    return 2 * num_units + 2 * num_blocks + 4 * int(np.maximum(relays - 1, 0).sum()) + 3 * int(ranks[one_set].sum())


def _build(columns: _Columns, unit_of_extent: Int64Array, merged: Int64Array) -> Work:
    num_units, num_blocks = int(unit_of_extent.max(initial=-1)) + 1, int(merged.max(initial=-1)) + 1
    unit_of_block = np.zeros(num_blocks, np.int64)
    unit_of_block[merged] = unit_of_extent[columns.block_extent]
    blocks = _blocks(columns, merged, unit_of_block.tolist())
    blocks_in: list[list[Block]] = [[] for _ in range(num_units)]
    for block in blocks:
        blocks_in[block.unit].append(block)
    nbytes, parts, pieces = (
        np.bincount(unit_of_extent, weights=weights, minlength=num_units).astype(np.int64).tolist()
        for weights in (columns.nbytes, np.ones(len(columns.nbytes)), columns.pieces)
    )
    first = np.searchsorted(np.maximum.accumulate(unit_of_extent), np.arange(num_units)).tolist()
    units = tuple(
        Unit(
            unit=unit,
            node=columns.nodes[columns.reader[extent]],
            rank=Rank(int(columns.rank[extent])) if columns.rank[extent] >= 0 else None,
            nbytes=nbytes[unit],
            parts=parts[unit],
            pieces=pieces[unit],
            extent=ExtentId(extent),
            blocks=tuple(blocks_in[unit]),
        )
        for unit, extent in enumerate(first)
    )
    used = {unit.node for unit in units} | set(columns.node_of_rank)
    units_of: defaultdict[NodeId | Rank, list[Unit]] = defaultdict(list)
    for unit in units:
        units_of[unit.node if unit.rank is None else unit.rank].append(unit)
    blocks_of: defaultdict[Rank, list[Block]] = defaultdict(list)
    for block in blocks:
        for rank in block.bytes_of:
            blocks_of[rank].append(block)
    return Work(
        units=units,
        blocks=blocks,
        unit_of_extent=unit_of_extent,
        nodes=tuple(node for node in columns.nodes if node in used),
        node_of_rank=columns.node_of_rank,
        parts=max(parts, default=1),
        line=columns.line,
        relays=_relays(units, columns.node_of_rank, columns.line),
        units_of=units_of,
        blocks_of=blocks_of,
    )


def _blocks(columns: _Columns, merged: Int64Array, unit_of_block: Sequence[int]) -> tuple[Block, ...]:
    num_blocks = len(unit_of_block)
    strided = ~columns.block_packed
    nbytes, cut_bytes, runs, parts = (
        np.bincount(merged, weights=weights, minlength=num_blocks).astype(np.int64).tolist()
        for weights in (
            columns.block_nbytes,
            columns.block_nbytes * strided,
            columns.block_runs * strided,
            np.ones(len(merged)),
        )
    )
    bytes_of = _bytes_of(columns, merged, num_blocks)
    return tuple(
        Block(
            block=block,
            unit=unit_of_block[block],
            nbytes=nbytes[block],
            parts=parts[block],
            bytes_of=bytes_of[block],
            cuts=_cuts(nbytes[block], cut_bytes[block], runs[block]),
        )
        for block in range(num_blocks)
    )


def _bytes_of(columns: _Columns, merged: Int64Array, num_blocks: int) -> list[dict[Rank, int]]:
    """By block and rank, how much of it the rank takes."""
    num_sets = max(1, len(columns.sets))
    pair = merged[columns.segment_block] * num_sets + columns.segment_set
    pairs = distinct(pair)
    sizes = np.bincount(np.searchsorted(pairs, pair), weights=columns.segment_nbytes, minlength=len(pairs))
    bytes_of: list[dict[Rank, int]] = [{} for _ in range(num_blocks)]
    for key, size in zip(pairs.tolist(), sizes.astype(np.int64).tolist(), strict=True):
        block, one_set = divmod(key, num_sets)
        mine = bytes_of[block]
        for rank in columns.sets[one_set]:
            mine[rank] = mine.get(rank, 0) + size
    return [dict(sorted(mine.items())) for mine in bytes_of]


def _cuts(nbytes: int, strided_bytes: int, num_runs: int) -> tuple[tuple[int, int], ...]:
    parts = ((0, nbytes - strided_bytes), (rounded(strided_bytes // max(1, num_runs)), strided_bytes))
    return tuple(part for part in parts if part[1])


def _relays(units: Iterable[Unit], node_of_rank: Sequence[NodeId], line: Line) -> dict[NodeId, tuple[NodeId, ...]]:
    homes = {
        (unit.node, frozenset(node_of_rank[rank] for rank in block.bytes_of))
        for unit in units
        if unit.rank is None
        for block in unit.blocks
    }
    taken: defaultdict[NodeId, set[NodeId]] = defaultdict(set)
    for reader, needing in homes:
        for source, target in line.hops(reader, needing):
            taken[target].add(source)
    return {node: tuple(sorted(peers)) for node, peers in taken.items()}
