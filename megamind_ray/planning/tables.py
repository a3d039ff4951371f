"""The Arrow tables of a plan from columns (schemas: ``core.plan.TABLES``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megamind_ray.core.demands import Demands, Int64Array, ModuleTensor
from megamind_ray.core.manifest import FileInfo
from megamind_ray.core.plan import DIRECT, POOL, TABLES
from megamind_ray.core.topology import Topology
from megamind_ray.planning.arena import ArenaLayout
from megamind_ray.planning.columns import group_sets
from megamind_ray.planning.extents import Cut
from megamind_ray.policies.placement.base import Seat
from megamind_ray.policies.routing.base import RoutingDecision

__all__ = [
    "block_table",
    "consumer_table",
    "extent_table",
    "file_table",
    "rank_table",
    "segment_table",
    "tensor_table",
    "view_table",
]


def file_table(files: Sequence[FileInfo]) -> pa.Table:
    return _table(
        "files",
        file=np.arange(len(files)),
        path=[file.path for file in files],
        size_bytes=[file.size_bytes for file in files],
        mtime_ns=[file.mtime_ns for file in files],
        data_begin=[file.data_begin for file in files],
    )


def tensor_table(tensors: Sequence[ModuleTensor]) -> pa.Table:
    return _table(
        "tensors",
        tensor=np.arange(len(tensors)),
        name=[tensor.name for tensor in tensors],
        dtype=[tensor.dtype.label for tensor in tensors],
        shape=[tensor.shape for tensor in tensors],
        nbytes=[tensor.nbytes for tensor in tensors],
        placement=[tensor.placement for tensor in tensors],
        reason=[tensor.reason for tensor in tensors],
        replicated=[tensor.replicated for tensor in tensors],
    )


def rank_table(demands: Demands, seats: Sequence[Seat], arena_bytes: Int64Array) -> pa.Table:
    coords = [demands.parallel.coords(rank) for rank in demands.parallel.ranks]
    return _table(
        "ranks",
        rank=np.arange(len(coords)),
        pp=[at.pp for at in coords],
        dp=[at.dp for at in coords],
        tp=[at.tp for at in coords],
        node=[seat.node for seat in seats],
        gpu=[seat.gpu for seat in seats],
        arena_bytes=arena_bytes,
        reason=[seat.reason for seat in seats],
    )


def view_table(demands: Demands, layout: ArenaLayout) -> pa.Table:
    views, order = demands.views, layout.order
    return _table(
        "views",
        rank=views.rank[order],
        tensor=views.tensor[order],
        name=_words(views.name[order], demands.names),
        alias=views.alias[order] != 0,
        shape=_shapes(views.shape[order], demands.shapes),
        offset=layout.offset[order],
        nbytes=views.nbytes[order],
    )


def extent_table(cut: Cut, decision: RoutingDecision, topology: Topology) -> pa.Table:
    return _table(
        "extents",
        extent=np.arange(len(cut.file)),
        file=cut.file,
        begin=cut.begin,
        end=cut.end,
        route=_words(decision.direct.astype(np.int64), (POOL, DIRECT)),
        node=_words(decision.node, [node.id for node in topology.nodes]),
        rank=np.where(decision.direct, cut.only_rank, -1),
        reason=_words(decision.reason, decision.reasons),
    )


def block_table(cut: Cut) -> pa.Table:
    return _table(
        "blocks",
        block=np.arange(len(cut.block_extent)),
        extent=cut.block_extent,
        nbytes=cut.block_nbytes,
        consumers=cut.block_consumers,
    )


def consumer_table(sets: Sequence[tuple[int, ...]]) -> pa.Table:
    owner, rank = group_sets(sets).explode(np.arange(len(sets), dtype=np.int64))
    return _table("consumers", consumers=owner, rank=rank)


def segment_table(cut: Cut) -> pa.Table:
    return _table("segments", **{name: getattr(cut.segments, name) for name in TABLES["segments"].names})


def _table(table: str, /, **columns: object) -> pa.Table:
    schema = TABLES[table]
    arrays = [_array(columns[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(values: object, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)


def _words(index: Int64Array, words: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(index.astype(np.int32)), pa.array(words, pa.string()))


def _shapes(index: Int64Array, shapes: Sequence[tuple[int, ...]]) -> pa.ListArray:
    grouped = group_sets(shapes)
    owner, size = grouped.explode(index)
    first: npt.NDArray[np.int32] = np.searchsorted(owner, np.arange(len(index) + 1)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(first), pa.array(size))
