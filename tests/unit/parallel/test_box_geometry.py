from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.errors import RequestError
from megamind_ray.planning.geometry import BoxRows, box_rows


def rows_of(rows: BoxRows) -> list[tuple[int, ...]]:
    """(src_offset, run_bytes, num_runs, src_stride, dst_offset, dst_stride) of each row."""
    columns = (
        rows.src_offset,
        rows.run_bytes,
        rows.num_runs,
        rows.src_stride_bytes,
        rows.dst_offset,
        rows.dst_stride_bytes,
    )
    return [tuple(int(value) for value in row) for row in zip(*columns, strict=True)]


def apply(rows: BoxRows, src: np.ndarray, dst: np.ndarray) -> None:
    """Copies byte by byte and insists that nothing is written twice."""
    written = set[int]()
    for src_at, run, count, src_step, dst_at, dst_step in rows_of(rows):
        for step in range(count):
            for byte in range(run):
                assert dst_at + step * dst_step + byte not in written
                written.add(dst_at + step * dst_step + byte)
                dst[dst_at + step * dst_step + byte] = src[src_at + step * src_step + byte]


def test_whole_tensor_is_one_run() -> None:
    assert rows_of(box_rows((4, 6), 16, 1000, ((0, 4), (0, 6)))) == [(1000, 48, 1, 48, 0, 48)]


def test_rows_of_a_matrix_are_one_run() -> None:
    assert rows_of(box_rows((4, 6), 16, 0, ((1, 3), (0, 6)))) == [(12, 24, 1, 24, 0, 24)]


def test_columns_of_a_matrix_are_one_run_per_row() -> None:
    assert rows_of(box_rows((4, 6), 16, 0, ((0, 4), (2, 5)))) == [(4, 6, 4, 12, 0, 6)]


def test_scalar_is_one_element() -> None:
    assert rows_of(box_rows((), 32, 64, ())) == [(64, 4, 1, 4, 0, 4)]


def test_empty_box_has_no_rows() -> None:
    assert len(box_rows((4, 6), 16, 0, ((2, 2), (0, 6)))) == 0


def test_outer_dims_that_keep_their_stride_are_one_loop() -> None:
    # All experts and rows, some columns: E x H runs at one distance.
    assert rows_of(box_rows((3, 4, 8), 8, 0, ((0, 3), (0, 4), (2, 4)))) == [(2, 2, 12, 8, 0, 2)]


def test_two_cut_dims_take_as_few_rows_as_possible() -> None:
    rows = box_rows((100, 4, 8), 8, 0, ((0, 100), (0, 2), (0, 4)))
    assert len(rows) == 2
    assert set(rows.num_runs.tolist()) == {100}


def test_box_lands_in_the_corner_of_a_larger_destination() -> None:
    rows = box_rows((2, 4), 8, 0, ((0, 2), (0, 4)), dst_shape=(3, 10), dst_corner=(1, 5))
    assert rows_of(rows) == [(0, 4, 2, 4, 15, 10)]


def test_four_bit_values_split_between_bytes() -> None:
    assert rows_of(box_rows((2, 8), 4, 0, ((0, 2), (4, 8)))) == [(2, 2, 2, 4, 0, 2)]


@pytest.mark.parametrize("columns", [(1, 8), (0, 3)])
def test_split_inside_a_byte_is_refused(columns: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match=r"w\.x: its elements have 4 bits .* units of 2 elements"):
        box_rows((2, 8), 4, 0, ((0, 2), columns), what="w.x")


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    box = []
    for size in shape:
        begin = draw(st.integers(0, size))
        box.append((begin, draw(st.integers(begin, size))))
    return shape, tuple(box)


@given(boxes(), st.sampled_from([1, 2, 4]), st.integers(0, 9))
def test_rows_give_what_numpy_slicing_gives(
    case: tuple[tuple[int, ...], tuple[tuple[int, int], ...]], itemsize: int, begin: int
) -> None:
    shape, box = case
    num_bytes = int(np.prod(shape)) * itemsize
    file = np.arange(begin + num_bytes, dtype=np.uint8)
    whole = file[begin:].reshape((*shape, itemsize))
    expected = whole[tuple(slice(start, stop) for start, stop in box)]
    got = np.zeros(expected.size, dtype=np.uint8)
    apply(box_rows(shape, itemsize * 8, begin, box), file, got)
    assert got.tobytes() == expected.tobytes()
