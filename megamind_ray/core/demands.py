"""What each rank needs of a checkpoint: the contract between the parallel plan and the planner of transfers.

Everything is columnar. A *slice row* says that ``num_runs`` runs of ``run_bytes`` bytes, ``src_stride_bytes`` apart in
a file, land ``dst_stride_bytes`` apart in a view, for a set of consumer ranks that hold the same view.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megamind_ray.core.parallel import Parallel
from megamind_ray.core.tensor import DType

__all__ = ["Demands", "Int64Array", "ModuleTensor", "SliceTable", "ViewTable"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTensor:
    """A tensor as the module names it, assembled from one or more tensors on disk.

    Attributes:
        name: Name in the module.
        dtype: Element type.
        shape: Global shape, before any split.
        nbytes: Global size.
        placement: Its placement in words, for ``Plan.explain``.
        reason: Which rule gave it, or why none did.
        replicated: Whether each rank of its stages holds it whole by rule or for want of one.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    placement: str
    reason: str
    replicated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewTable:
    """The tensors that ranks hold, one row per (rank, name).

    Attributes:
        rank: Rank.
        tensor: Index into ``Demands.tensors``.
        name: Index into ``Demands.names``; a tied tensor has one row per name.
        alias: 1 where the bytes are those of an earlier row of the same rank and tensor.
        nbytes: Size of the local tensor.
        shape: Index into ``Demands.shapes``.
    """

    rank: Int64Array
    tensor: Int64Array
    name: Int64Array
    alias: Int64Array
    nbytes: Int64Array
    shape: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceTable:
    """Distinct slices, one row per strided piece; sorted by (file, src_offset).

    Attributes:
        file: Index into the manifest's files.
        disk_tensor: Index into the manifest's tensors, in their order.
        tensor: Index into ``Demands.tensors``.
        src_offset: Absolute offset of the first run in the file.
        run_bytes: Bytes of a run.
        num_runs: Runs.
        src_stride_bytes: Distance of two runs in the file (``run_bytes`` where there is one run).
        dst_offset: Offset of the first run in the local view.
        dst_stride_bytes: Distance of two runs in the local view.
        consumers: Index into ``Demands.consumer_sets``.
    """

    file: Int64Array
    disk_tensor: Int64Array
    tensor: Int64Array
    src_offset: Int64Array
    run_bytes: Int64Array
    num_runs: Int64Array
    src_stride_bytes: Int64Array
    dst_offset: Int64Array
    dst_stride_bytes: Int64Array
    consumers: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """All that the ranks of a mesh need.

    Attributes:
        parallel: The mesh.
        tensors: Module tensors in the order of the checkpoint.
        names: Names that views go by.
        shapes: Distinct local shapes.
        views: See ``ViewTable``.
        slices: See ``SliceTable``.
        consumer_sets: Distinct sets of ranks, each ascending.
        stage_of_layer: For each layer its pipeline stage.
    """

    parallel: Parallel
    tensors: tuple[ModuleTensor, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    views: ViewTable
    slices: SliceTable
    consumer_sets: tuple[tuple[int, ...], ...]
    stage_of_layer: tuple[int, ...] = ()

    @property
    def bytes_total(self) -> int:
        """Distinct bytes demanded of the checkpoint.

        Two slices of one tensor are equal or disjoint (docs/design/0002), so equal ones are counted once.
        """
        rows = self.slices
        keys = (rows.num_runs, rows.run_bytes, rows.src_offset, rows.file)
        order = np.lexsort(keys)
        fresh = np.zeros(len(order), np.bool_)
        fresh[:1] = True
        for key in keys:
            fresh[1:] |= key[order[1:]] != key[order[:-1]]
        distinct = order[fresh]
        return int((rows.run_bytes[distinct] * rows.num_runs[distinct]).sum())
