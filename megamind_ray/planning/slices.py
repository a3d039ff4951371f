"""The columns of ``Demands``: tensors that are cut alike are cut once, and numpy spreads the result over them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megamind_ray.core.demands import Demands, Int64Array, ModuleTensor, SliceTable, ViewTable
from megamind_ray.core.parallel import Coords, ExpertShard, Parallel, Placement
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.errors import RequestError
from megamind_ray.planning.geometry import Box, BoxRows, box_rows
from megamind_ray.planning.naming import ModuleEntry
from megamind_ray.planning.splits import Layout, chunk_bounds, layouts

__all__ = ["SliceBuilder"]

_SLICE_COLUMNS = tuple(SliceTable.__dataclass_fields__)
_VIEW_COLUMNS = tuple(ViewTable.__dataclass_fields__)
Stages = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Class:
    """Module tensors that are cut alike: equal shape, dtype, placement, parts and stages."""

    entry: ModuleEntry
    placement: Placement
    stages: Stages
    expert: int | None
    tensors: list[int] = field(default_factory=list)
    names: list[tuple[int, ...]] = field(default_factory=list)
    parts: list[tuple[Int64Array, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one group of parts: which experts they repeat over, and how far apart those land in the view."""

    group: int
    experts: range
    dst_step_bytes: int
    rows: BoxRows


class SliceBuilder:
    """Collects module tensors and makes ``Demands`` of them."""

    def __init__(self, infos: Sequence[TensorInfo], parallel: Parallel) -> None:
        self._parallel = parallel
        self._file = np.fromiter((info.file for info in infos), dtype=np.int64, count=len(infos))
        self._begin = np.fromiter((info.begin for info in infos), dtype=np.int64, count=len(infos))
        self._classes: dict[tuple[object, ...], _Class] = {}
        self._names: list[str] = []
        self._num_tensors = 0
        self._experts: dict[str, int] = defaultdict(int)
        self._shapes: dict[tuple[int, ...], int] = {}
        self._consumer_sets: dict[tuple[int, ...], int] = {}
        self._slices: dict[str, list[Int64Array]] = {name: [] for name in _SLICE_COLUMNS}
        self._views: dict[str, list[Int64Array]] = {name: [] for name in _VIEW_COLUMNS}
        self._pending: list[tuple[ModuleEntry, Placement, Stages]] = []

    def add(self, entry: ModuleEntry, placement: Placement, stages: Stages) -> None:
        """Adds the next module tensor; ``stages`` are those that hold each of its names."""
        self._pending.append((entry, placement, stages))
        if self._parallel.ep > 1 and isinstance(placement, ExpertShard) and placement.separate:
            self._experts[entry.template] = max(self._experts[entry.template], _expert(entry) + 1)

    def finish(self, tensors: tuple[ModuleTensor, ...], stage_of_layer: tuple[int, ...]) -> Demands:
        """The demands for everything that was added, which ``tensors`` describes in the same order."""
        for entry, placement, stages in self._pending:
            self._classify(entry, placement, stages)
        for item in self._classes.values():
            self._emit(item)
        slices = {name: _joined(columns) for name, columns in self._slices.items()}
        order = np.lexsort((slices["tensor"], slices["consumers"], slices["src_offset"], slices["file"]))
        views = {name: _joined(columns) for name, columns in self._views.items()}
        in_order = np.lexsort((views["alias"], views["name"], views["tensor"], views["rank"]))
        return Demands(
            parallel=self._parallel,
            tensors=tensors,
            names=tuple(self._names),
            shapes=tuple(self._shapes),
            views=ViewTable(**{name: column[in_order] for name, column in views.items()}),
            slices=SliceTable(**{name: column[order] for name, column in slices.items()}),
            consumer_sets=tuple(self._consumer_sets),
            stage_of_layer=stage_of_layer,
        )

    def _classify(self, entry: ModuleEntry, placement: Placement, stages: Stages) -> None:
        expert = None
        if self._parallel.ep > 1 and isinstance(placement, ExpertShard) and placement.separate:
            bounds = chunk_bounds(self._experts[entry.template], self._parallel.ep)
            expert = next(group for group, (begin, end) in enumerate(bounds) if begin <= _expert(entry) < end)
        key = (id(placement), entry.shape, entry.dtype, len(entry.parts), entry.fused, stages, expert)
        item = self._classes.get(key)
        if item is None:
            item = self._classes[key] = _Class(entry, placement, stages, expert)
        item.tensors.append(self._num_tensors)
        item.names.append(tuple(range(len(self._names), len(self._names) + len(entry.names))))
        item.parts.append(entry.parts)
        self._names.extend(entry.names)
        self._num_tensors += 1

    def _emit(self, item: _Class) -> None:
        parts = np.array(item.parts, dtype=np.int64)  # [tensor, group, expert]
        tensors = np.array(item.tensors, dtype=np.int64)
        names = np.array(item.names, dtype=np.int64)
        stages = sorted({stage for held in item.stages for stage in held})
        for layout, places in self._places(item).items():
            ranks = [self._parallel.rank(Coords(stage, dp, tp)) for stage in stages for dp, tp in places]
            consumers = self._consumer_sets.setdefault(tuple(ranks), len(self._consumer_sets))
            for rows in _rows_of(item.entry, layout):
                self._emit_rows(rows, parts, tensors, consumers)
            for stage in stages:
                here = [at for at, held in enumerate(item.stages) if stage in held]
                mine = [self._parallel.rank(Coords(stage, dp, tp)) for dp, tp in places]
                self._emit_views(np.array(mine, dtype=np.int64), tensors, names[:, here], item, layout)

    def _places(self, item: _Class) -> dict[Layout, list[tuple[int, int]]]:
        """Distinct local tensors of a stage, and the (dp, tp) that hold each."""
        mesh = self._parallel
        by_group = isinstance(item.placement, ExpertShard) and mesh.ep > 1
        each = layouts(item.entry.shape, item.placement, mesh.tp, ep=mesh.ep, what=item.entry.names[0])
        places: dict[Layout, list[tuple[int, int]]] = defaultdict(list)
        for dp in range(mesh.dp):
            for tp in range(mesh.tp):
                group = mesh.ep_group(Coords(0, dp, tp))
                if item.expert is None or item.expert == group:
                    places[each[group if by_group else tp]].append((dp, tp))
        return places

    def _emit_rows(self, item: _Rows, parts: Int64Array, tensors: Int64Array, consumers: int) -> None:
        disk = parts[:, item.group, item.experts.start : item.experts.stop]  # [tensor, expert]
        steps = np.arange(len(item.experts), dtype=np.int64) * item.dst_step_bytes
        shape = (*disk.shape, len(item.rows))
        columns: dict[str, Int64Array | np.int64] = {
            "file": self._file[disk][:, :, None],
            "disk_tensor": disk[:, :, None],
            "tensor": tensors[:, None, None],
            "src_offset": self._begin[disk][:, :, None] + item.rows.src_offset,
            "run_bytes": item.rows.run_bytes,
            "num_runs": item.rows.num_runs,
            "src_stride_bytes": item.rows.src_stride_bytes,
            "dst_offset": steps[:, None] + item.rows.dst_offset,
            "dst_stride_bytes": item.rows.dst_stride_bytes,
            "consumers": np.int64(consumers),
        }
        for name, column in columns.items():
            self._slices[name].append(np.broadcast_to(column, shape).ravel())

    def _emit_views(
        self, ranks: Int64Array, tensors: Int64Array, names: Int64Array, item: _Class, layout: Layout
    ) -> None:
        """Views of all ranks that hold the same local tensors; ``names`` is ``[tensor, name]``."""
        num_bytes = item.entry.dtype.nbytes(math.prod(layout.shape))
        if num_bytes is None:
            raise RequestError(
                f"{item.entry.names[0]}: a slice of shape {list(layout.shape)} does not fill whole bytes"
            )
        columns: dict[str, Int64Array | np.int64] = {
            "rank": ranks[:, None, None],
            "tensor": tensors[:, None],
            "name": names,
            "alias": np.minimum(np.arange(names.shape[1], dtype=np.int64), 1),
            "nbytes": np.int64(num_bytes),
            "shape": np.int64(self._shapes.setdefault(layout.shape, len(self._shapes))),
        }
        for name, column in columns.items():
            self._views[name].append(np.broadcast_to(column, (len(ranks), *names.shape)).ravel())


def _expert(entry: ModuleEntry) -> int:
    """The number that follows ``experts.`` (or ``experts.expert_``) in the name."""
    head, _, rest = entry.template.rpartition("experts.")
    if not head or rest.removeprefix("expert_").partition(".")[0] != "0":
        raise RequestError(
            f"{entry.names[0]:.200}: a rule says that it belongs to one expert, but its name has no 'experts.N'"
        )
    return int(entry.numbers[sum(part == "0" for part in head.split("."))])


def _joined(columns: list[Int64Array]) -> Int64Array:
    return np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)


def _rows_of(entry: ModuleEntry, layout: Layout) -> list[_Rows]:
    """The rows of one local tensor, relative to the first byte of each part."""
    found: list[_Rows] = []
    for piece in layout.pieces:
        if entry.fused:
            found += [
                _fused_rows(entry, group, piece.box, piece.corner, layout.shape) for group in range(len(entry.parts))
            ]
        else:
            rows = box_rows(
                entry.shape, entry.dtype.bits, 0, piece.box,
                dst_shape=layout.shape, dst_corner=piece.corner, what=entry.names[0],
            )  # fmt: skip
            found.append(_Rows(0, range(1), 0, rows))
    return [rows for rows in found if len(rows.experts) and len(rows.rows)]


def _fused_rows(entry: ModuleEntry, group: int, box: Box, corner: tuple[int, ...], local: tuple[int, ...]) -> _Rows:
    """The part of a box that lies in one block of dim 1, for the experts of dim 0 that it covers."""
    length = entry.shape[1] // len(entry.parts)
    start = group * length
    begin, end = max(box[1][0], start), min(box[1][1], start + length)
    (first, stop), at = box[0], corner[0]
    step_bytes = _whole_bytes(entry.dtype, math.prod(local[1:]), entry.names[0])
    if begin >= end:
        return _Rows(group, range(0), step_bytes, box_rows((0,), 8, 0, ((0, 0),)))
    rows = box_rows(
        (length, *entry.shape[2:]),
        entry.dtype.bits,
        0,
        ((begin - start, end - start), *box[2:]),
        dst_shape=local[1:],
        dst_corner=(corner[1] + begin - box[1][0], *corner[2:]),
        what=entry.names[0],
    )
    rows.dst_offset[:] += at * step_bytes
    return _Rows(group, range(first, stop), step_bytes, rows)


def _whole_bytes(dtype: DType, num_elements: int, what: str) -> int:
    num_bytes = dtype.nbytes(num_elements)
    if num_bytes is None:
        raise RequestError(f"{what}: one expert of {num_elements} {dtype.label} elements does not fill whole bytes")
    return num_bytes
