"""Cutting extents into blocks: segments packed back to back, each with its checksum (docs/design/0004)."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megamind_ray.core.program import BlockTable, SegmentTable
from megamind_ray.device.arena import host_buffer
from megamind_ray.device.strided import Bytes, Runs, copy_runs
from megamind_ray.io.checksum import crc32

__all__ = ["BlockCutter", "Crc32Array", "CutBlock", "Move", "Segment", "segments_of"]

Crc32Array = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Move:
    """Runs of one tensor.

    Attributes:
        tensor: Plan id of the module tensor, or its number in a sink.
        src: In the file, at absolute offsets.
        dst: In the view, or in the tensor.
    """

    tensor: int
    src: Runs
    dst: Runs

    @property
    def nbytes(self) -> int:
        return self.src.nbytes


@dataclass(frozen=True, slots=True)
class Segment(Move):
    """A row of a segment table.

    Attributes:
        position: Among the segments of its block.
        block_offset: First byte in the block, where the runs are packed.
    """

    position: int
    block_offset: int


@dataclass(frozen=True, slots=True)
class CutBlock:
    """A block that was just cut.

    Attributes:
        block: Plan id.
        data: Its bytes; valid until the next block is asked for, and while the extent's buffer is.
        crc32: Checksum of each segment.
    """

    block: int
    data: Bytes
    crc32: Crc32Array


def segments_of(table: SegmentTable, begin: int, end: int) -> list[Segment]:
    """Rows ``[begin, end)`` as objects."""
    rows = table.rows(begin, end)
    columns = (
        rows.position,
        rows.tensor,
        rows.block_offset,
        rows.src_offset,
        rows.run_bytes,
        rows.num_runs,
        rows.src_stride_bytes,
        rows.dst_offset,
        rows.dst_stride_bytes,
    )
    # Plain integers in one go: indexing numpy columns one by one costs ten times as much.
    return [
        Segment(tensor, Runs(src, run, num, stride), Runs(dst, run, num, dst_stride), position, block)
        for position, tensor, block, src, run, num, stride, dst, dst_stride in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


class BlockCutter:
    """Cuts the blocks of a program. Several threads may cut different extents at a time.

    Args:
        blocks: Of the program.
        segments: Of those blocks.
    """

    def __init__(self, blocks: BlockTable, segments: SegmentTable) -> None:
        self._blocks = blocks
        self._segments = segments
        self._order = np.argsort(blocks.extent, kind="stable")
        self._extents = blocks.extent[self._order]
        self._local = threading.local()

    def rows_of(self, extent: int) -> list[int]:
        """Rows of the block table that are cut from an extent, in plan order."""
        begin, end = np.searchsorted(self._extents, [extent, extent + 1])
        rows: list[int] = self._order[begin:end].tolist()
        return rows

    def segments_of_row(self, row: int) -> list[Segment]:
        """Segments of a row of the block table."""
        begin, end = self._blocks.first_segment[row : row + 2].tolist()
        return segments_of(self._segments, begin, end)

    def cut(self, extent: int, begin: int, data: Bytes, *, only: Container[int] | None = None) -> Iterator[CutBlock]:
        """Cuts one extent, block by block.

        A block that lies in the extent as it is comes as a view; all others share one scratch buffer of this thread.

        Args:
            extent: Plan id.
            begin: Offset in the file of ``data``'s first byte.
            data: The extent's bytes.
            only: Plan ids of the blocks that are wanted; None for all.
        """
        rows = [row for row in self.rows_of(extent) if only is None or int(self._blocks.block[row]) in only]
        for row in rows:
            segments, nbytes = self.segments_of_row(row), int(self._blocks.nbytes[row])
            packed = _packed_already(segments, nbytes)
            if packed is not None:
                block = data[packed - begin : packed - begin + nbytes]
            else:
                block = self._scratch(nbytes)
                _gather(segments, begin, data, block)
            sums = [crc32(block[segment.block_offset : segment.block_offset + segment.nbytes]) for segment in segments]
            yield CutBlock(int(self._blocks.block[row]), block, np.array(sums, np.uint32))

    def _scratch(self, nbytes: int) -> Bytes:
        # Kept from extent to extent: the first touch of fresh memory takes longer than the copy.
        scratch: Bytes | None = getattr(self._local, "scratch", None)
        if scratch is None or scratch.nbytes < nbytes:
            scratch = self._local.scratch = host_buffer(nbytes)
        return scratch[:nbytes]


def _packed_already(segments: list[Segment], nbytes: int) -> int | None:
    """Offset in the file at which the block lies as it is, or None."""
    if not segments:
        return None
    origin = segments[0].src.offset - segments[0].block_offset
    end = 0
    for segment in segments:
        lies_so = segment.src.contiguous and segment.block_offset == end and segment.src.offset == origin + end
        if not lies_so:
            return None
        end += segment.nbytes
    return origin if end == nbytes else None


def _gather(segments: list[Segment], begin: int, data: Bytes, block: Bytes) -> None:
    for segment in segments:
        copy_runs(data, segment.src.moved(-begin), block, segment.src.packed(segment.block_offset))
