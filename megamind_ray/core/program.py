"""Programs: a plan compiled for one executor each. Numpy columns, so that they travel to actors in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.manifest import FileInfo
from megamind_ray.core.parallel import Coords
from megamind_ray.core.tensor import DType

__all__ = ["AgentProgram", "BlockTable", "ExtentTable", "FileTable", "RankProgram", "SegmentTable", "View"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTable:
    """The data files that a program reads.

    Attributes:
        root: Folder, as a path or URI.
        files: By the file ids of the plan.
        chunk_bytes: The chunk grid.
        reference_crc32: Per file the trusted checksum of each chunk, or None.
        reference_origin: Where those come from.
        disk_tensors: (first byte, one past the last, name) of each tensor of a file, for naming what a wrong byte hits;
            by file, only the files that the program reads.
    """

    root: str
    files: tuple[FileInfo, ...]
    chunk_bytes: int
    reference_crc32: Mapping[int, Int64Array] = field(default_factory=dict)
    reference_origin: str = ""
    disk_tensors: Mapping[int, tuple[tuple[int, int, str], ...]] = field(default_factory=dict)

    def uri(self, file: int) -> str:
        return f"{self.root}/{self.files[file].path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentTable:
    """Extents in the order in which to read them. ``extent`` holds plan ids."""

    extent: Int64Array
    file: Int64Array
    begin: Int64Array
    end: Int64Array

    def __len__(self) -> int:
        return len(self.extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Blocks in plan order.

    Attributes:
        block: Plan ids.
        extent: Plan ids of what they are cut from.
        nbytes: Sizes.
        consumers: Set of the ranks that take some of it.
        num_segments: Segments of the whole block, and so checksums that come with it.
        first_segment: One entry more than there are blocks: those of block row ``i`` that the program is about are
            ``[first_segment[i], first_segment[i + 1])`` of its ``SegmentTable``. An agent's are all of the block, a
            rank's those that it takes.
    """

    block: Int64Array
    extent: Int64Array
    nbytes: Int64Array
    consumers: Int64Array
    num_segments: Int64Array
    first_segment: Int64Array

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTable:
    """Segments, grouped by block; the columns are those of the plan's ``segments`` table.

    ``position`` is the place of a segment among all those of its block, and so of its checksum.
    """

    position: Int64Array
    tensor: Int64Array
    block_offset: Int64Array
    src_offset: Int64Array
    run_bytes: Int64Array
    num_runs: Int64Array
    src_stride_bytes: Int64Array
    dst_offset: Int64Array
    dst_stride_bytes: Int64Array

    def __len__(self) -> int:
        return len(self.tensor)

    def rows(self, begin: int, end: int) -> SegmentTable:
        """A view of some rows."""
        return SegmentTable(**{name: getattr(self, name)[begin:end] for name in self.__slots__})

    @property
    def nbytes(self) -> Int64Array:
        return np.multiply(self.run_bytes, self.num_runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor of a rank: ``nbytes`` at ``offset`` of its arena allocation. Aliases repeat tensor and offset."""

    name: str
    tensor: int
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    alias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """What one rank does: read its direct extents, take its pool blocks, copy all to its views.

    Attributes:
        load: The load it belongs to.
        rank: Rank in the mesh.
        coords: Its coordinates.
        arena_bytes: Arena allocation it needs.
        views: What it will hold.
        files: For its direct reads.
        extents: Direct extents, in reading order.
        blocks: Blocks that it consumes, direct and pool.
        segments: Of those blocks.
        pool_blocks: Plan ids of the blocks that come from the pool, ascending.
    """

    load: LoadId
    rank: Rank
    coords: Coords
    arena_bytes: int
    views: tuple[View, ...]
    files: FileTable
    extents: ExtentTable
    blocks: BlockTable
    segments: SegmentTable
    pool_blocks: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram:
    """What one node agent does: read its extents, cut blocks, publish them, relay blocks of other nodes to its ranks.

    Attributes:
        load: The load it belongs to.
        node: The node.
        files: What to read from.
        extents: Pool extents that this node reads, in reading order.
        blocks: Blocks cut from them.
        segments: Of those blocks.
        consumer_sets: Ranks of each set that ``blocks.consumers`` names.
        node_of_rank: For every rank its node.
        line: Nodes in the order in which they hand blocks on; empty: each hands to all by itself.
        relays: For each other node, the number of blocks that this one takes from it.
        keep_blocks: Plan ids of blocks that stay in this node's pool, ascending.
        credit_bytes: Bytes of blocks that this load may have in this node's pool at a time.
    """

    load: LoadId
    node: NodeId
    files: FileTable
    extents: ExtentTable
    blocks: BlockTable
    segments: SegmentTable
    consumer_sets: Mapping[int, tuple[int, ...]]
    node_of_rank: Mapping[Rank, NodeId]
    line: tuple[NodeId, ...] = ()
    relays: Mapping[str, int]
    keep_blocks: Int64Array
    credit_bytes: int
