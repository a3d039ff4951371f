"""What one reader reads for itself: every byte that is needed to its place, once, in pieces that become shorter."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from megamind_ray.core.demands import SliceTable
from megamind_ray.core.manifest import FileInfo
from megamind_ray.planning.grid import Grid
from megamind_ray.planning.reads import Pace, Reads, cut_reads

CHUNK_BYTES = 64


def _files(*sizes: int) -> tuple[FileInfo, ...]:
    return tuple(
        FileInfo(path=f"{number}.safetensors", size_bytes=10 + number + size, data_begin=10 + number, mtime_ns=0)
        for number, size in enumerate(sizes)
    )


def _grid(files: tuple[FileInfo, ...], *, gap: int = 0, whole_chunks: bool = False) -> Grid:
    return Grid(files=files, chunk_bytes=CHUNK_BYTES, extent_bytes=1, max_gap_bytes=gap, whole_chunks=whole_chunks)


def _slices(rows: list[tuple[int, int, int, int, int]]) -> SliceTable:
    """Rows of (file, offset, run, number of runs, distance of runs); each goes packed to a tensor of its own."""
    columns = [np.array(column, np.int64) for column in zip(*sorted(rows), strict=True)]
    file, offset, run, num, stride = columns if rows else [np.empty(0, np.int64)] * 5
    zeros = np.zeros(len(rows), np.int64)
    return SliceTable(
        file=file,
        disk_tensor=zeros,
        tensor=np.arange(len(rows)),
        consumers=zeros,
        src_offset=offset,
        run_bytes=run,
        num_runs=num,
        src_stride_bytes=stride,
        dst_offset=zeros,
        dst_stride_bytes=run,
    )


def _placed(reads: Reads) -> dict[tuple[int, int], tuple[int, int]]:
    """By (tensor, byte of it), where it comes from; each piece lies inside its extent."""
    of, placed = reads.pieces, dict[tuple[int, int], tuple[int, int]]()
    for extent in range(len(reads)):
        file, begin, end = (int(column[extent]) for column in (reads.file, reads.begin, reads.end))
        for row in range(int(reads.first[extent]), int(reads.first[extent + 1])):
            for turn in range(int(of.num[row])):
                src, dst = int(of.src[row] + turn * of.stride[row]), int(of.dst[row] + turn * of.dst_stride[row])
                assert begin <= src
                assert src + int(of.run[row]) <= end
                for step in range(int(of.run[row])):
                    key = int(of.tensor[row]), dst + step
                    assert key not in placed
                    placed[key] = file, src + step
    return placed


def _wanted(slices: SliceTable) -> dict[tuple[int, int], tuple[int, int]]:
    return {
        (row, turn * int(slices.run_bytes[row]) + step): (
            int(slices.file[row]),
            int(slices.src_offset[row] + turn * slices.src_stride_bytes[row] + step),
        )
        for row in range(len(slices.file))
        for turn in range(int(slices.num_runs[row]))
        for step in range(int(slices.run_bytes[row]))
    }


def _random_slices(rng: random.Random, files: tuple[FileInfo, ...]) -> SliceTable:
    rows = []
    for _ in range(rng.randint(0, 6)):
        file = rng.randrange(len(files))
        begin, end = files[file].data_begin, files[file].size_bytes
        run = rng.randint(1, min(300, end - begin))
        stride = run + rng.choice([0, 1, 40, 200])
        num = rng.randint(1, max(1, min(5, (end - begin - run) // stride + 1)))
        rows.append((file, rng.randint(begin, end - (num - 1) * stride - run), run, num, stride))
    return _slices(rows)


@pytest.mark.parametrize("seed", range(150))
def test_each_byte_goes_to_its_place_and_extents_are_apart(seed: int) -> None:
    rng = random.Random(seed)
    files = _files(*(rng.randint(300, 3000) for _ in range(3)))
    slices = _random_slices(rng, files)
    whole_chunks, gap = rng.random() < 0.5, rng.choice([0, 16, CHUNK_BYTES])
    pace = Pace(
        num_threads=rng.randint(1, 4), longest_bytes=rng.choice([1, 200, 4000]), shortest_bytes=rng.choice([0, 1, 100])
    )
    reads = cut_reads(slices, _grid(files, gap=gap, whole_chunks=whole_chunks), pace)
    assert _placed(reads) == _wanted(slices)
    extents = list(zip(reads.file.tolist(), reads.begin.tolist(), reads.end.tolist(), strict=True))
    for (file, _, end), (next_file, next_begin, _) in pairwise(extents):
        assert (file, end) <= (next_file, next_begin)
    for file, begin, end in extents:
        assert files[file].data_begin <= begin < end <= files[file].size_bytes
        if whole_chunks:  # only such a chunk can be held to its checksum
            assert (begin - files[file].data_begin) % CHUNK_BYTES == 0
            assert end == files[file].size_bytes or (end - files[file].data_begin) % CHUNK_BYTES == 0


@pytest.fixture
def lengths() -> Callable[..., list[int]]:
    """Lengths of the extents of one whole file of so many chunks."""

    def cut(num_chunks: int, **pace: int) -> list[int]:
        files = _files(num_chunks * CHUNK_BYTES)
        slices = _slices([(0, files[0].data_begin, num_chunks * CHUNK_BYTES, 1, num_chunks * CHUNK_BYTES)])
        reads = cut_reads(slices, _grid(files), Pace(**pace))
        return [int(length) // CHUNK_BYTES for length in reads.end - reads.begin]

    return cut


def test_extents_are_long_first_and_short_at_last(lengths: Callable[..., list[int]]) -> None:
    found = lengths(100, num_threads=2, longest_bytes=16 * CHUNK_BYTES, shortest_bytes=2 * CHUNK_BYTES)
    assert found == sorted(found, reverse=True)
    assert found[0] == 16
    assert found[-1] <= 2
    assert sum(found) == 100


def test_no_extent_is_more_than_half_of_a_threads_share_of_what_is_left(lengths: Callable[..., list[int]]) -> None:
    left = 1000
    for length in lengths(1000, num_threads=4, longest_bytes=1 << 30, shortest_bytes=0):
        assert length <= max(1, left // 8)
        left -= length


def test_with_equal_bounds_all_are_equally_long(lengths: Callable[..., list[int]]) -> None:
    assert lengths(9, num_threads=2, longest_bytes=3 * CHUNK_BYTES, shortest_bytes=3 * CHUNK_BYTES) == [3, 3, 3]


def test_a_chunk_is_the_least(lengths: Callable[..., list[int]]) -> None:
    assert lengths(3, num_threads=8, longest_bytes=1, shortest_bytes=0) == [1, 1, 1]
