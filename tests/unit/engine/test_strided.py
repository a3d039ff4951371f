from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.device.strided import Runs, copy_runs


@st.composite
def _copies(draw: st.DrawFn) -> tuple[Runs, Runs]:
    run, num = draw(st.integers(0, 80)), draw(st.integers(0, 9))
    src_gap, dst_gap = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    src_offset, dst_offset = draw(st.integers(0, 17)), draw(st.integers(0, 17))
    return Runs(src_offset, run, num, run + src_gap), Runs(dst_offset, run, num, run + dst_gap)


@given(_copies())
def test_every_byte_of_every_run_lands_in_its_place_and_no_other_byte_changes(copies: tuple[Runs, Runs]) -> None:
    src_runs, dst_runs = copies
    src = np.random.default_rng(0).integers(0, 256, 1200, dtype=np.uint8)
    dst = np.full(1200, 7, np.uint8)
    expected = dst.copy()
    for run in range(src_runs.num_runs):
        for byte in range(src_runs.run_bytes):
            at = dst_runs.offset + run * dst_runs.stride_bytes + byte
            expected[at] = src[src_runs.offset + run * src_runs.stride_bytes + byte]

    copy_runs(src, src_runs, dst, dst_runs)

    assert np.array_equal(dst, expected)


def test_a_read_only_source_is_fine() -> None:
    src = np.arange(8, dtype=np.uint8)
    src.flags.writeable = False
    dst = np.zeros(4, np.uint8)

    copy_runs(src, Runs(0, 1, 4, 2), dst, Runs(0, 1, 4, 1))

    assert dst.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("bad", [Runs(4, 2, 3, 2), Runs(-1, 2, 1, 2), Runs(0, 2, 2, 1)])
def test_runs_outside_their_buffer_are_refused(bad: Runs) -> None:
    fits = Runs(0, 2, bad.num_runs, 2)
    buffer = np.zeros(8, np.uint8)

    with pytest.raises(ValueError, match="do not fit"):
        copy_runs(buffer, fits, buffer.copy(), bad)
