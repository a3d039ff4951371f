from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from megamind_ray.config import Config
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.program import BlockTable, SegmentTable
from megamind_ray.engine.cut import BlockCutter
from megamind_ray.planning.compile import compile_agent, compile_rank


def _column(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def _table(**columns: list[int]) -> SegmentTable:
    num_segments = len(columns["tensor"])
    return SegmentTable(
        position=_column(*range(num_segments)), **{name: _column(*values) for name, values in columns.items()}
    )


def _one_block(segments: SegmentTable) -> BlockCutter:
    nbytes = int(segments.nbytes.sum())
    blocks = BlockTable(
        block=_column(4),
        extent=_column(9),
        nbytes=_column(nbytes),
        consumers=_column(0),
        num_segments=_column(len(segments)),
        first_segment=_column(0, len(segments)),
    )
    return BlockCutter(blocks, segments)


EXTENT = np.arange(64, dtype=np.uint8)


def test_rows_of_a_column_slice_become_contiguous() -> None:
    cutter = _one_block(
        _table(
            tensor=[0],
            block_offset=[0],
            src_offset=[102],
            run_bytes=[3],
            num_runs=[4],
            src_stride_bytes=[10],
            dst_offset=[0],
            dst_stride_bytes=[3],
        )
    )

    (block,) = cutter.cut(9, 100, EXTENT)

    assert block.block == 4
    assert block.data.tolist() == [2, 3, 4, 12, 13, 14, 22, 23, 24, 32, 33, 34]
    assert block.crc32.tolist() == [zlib.crc32(block.data.tobytes())]


def test_each_segment_has_its_own_checksum() -> None:
    cutter = _one_block(
        _table(
            tensor=[0, 1],
            block_offset=[0, 4],
            src_offset=[120, 100],
            run_bytes=[4, 2],
            num_runs=[1, 2],
            src_stride_bytes=[4, 8],
            dst_offset=[0, 0],
            dst_stride_bytes=[4, 2],
        )
    )

    (block,) = cutter.cut(9, 100, EXTENT)

    assert block.data.tolist() == [20, 21, 22, 23, 0, 1, 8, 9]
    assert block.crc32.tolist() == [zlib.crc32(bytes([20, 21, 22, 23])), zlib.crc32(bytes([0, 1, 8, 9]))]


def test_a_block_that_lies_in_the_extent_as_it_is_is_not_copied() -> None:
    cutter = _one_block(
        _table(
            tensor=[0, 1],
            block_offset=[0, 5],
            src_offset=[110, 115],
            run_bytes=[5, 3],
            num_runs=[1, 1],
            src_stride_bytes=[5, 3],
            dst_offset=[0, 0],
            dst_stride_bytes=[5, 3],
        )
    )

    (block,) = cutter.cut(9, 100, EXTENT)

    assert block.data.tolist() == list(range(10, 18))
    assert np.shares_memory(block.data, EXTENT)


def test_an_extent_of_another_number_has_no_blocks(llama: Any, plan_for: Callable[..., Any], config: Config) -> None:
    plan, manifest = plan_for(llama.path, Parallel(), config)
    program = compile_rank(plan, manifest, Rank(0), LoadId("m#0"))

    assert BlockCutter(program.blocks, program.segments).rows_of(10**6) == []


def test_only_wanted_blocks_are_cut(llama: Any, plan_for: Callable[..., Any], pool_config: Config) -> None:
    plan, manifest = plan_for(llama.path, Parallel(tp=8), pool_config)  # a block for each of two nodes
    program = compile_agent(
        plan, manifest, NodeId("n0"), LoadId("m#0"), credit_bytes=0, keep_blocks=np.empty(0, np.int64)
    )
    row = int(np.argmax([np.sum(program.blocks.extent == extent) for extent in program.extents.extent]))
    extent = int(program.extents.extent[row])
    begin, end = int(program.extents.begin[row]), int(program.extents.end[row])
    data = np.fromfile(llama.file, np.uint8)[begin:end]
    cutter = BlockCutter(program.blocks, program.segments)

    every = [block.block for block in cutter.cut(extent, begin, data)]
    some = [block.block for block in cutter.cut(extent, begin, data, only={every[-1]})]

    assert len(every) > 1
    assert some == [every[-1]]
