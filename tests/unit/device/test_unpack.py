"""Casts, scales, slices and sums by the reference, against values worked out by hand or by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.tensor import DType
from megamind_ray.device.unpack import unpack
from megamind_ray.device.unpack_spec import Scaling, UnpackSpec
from megamind_ray.device.word_sum import host_word_sum, word_sum
from megamind_ray.errors import RequestError


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_deepseek_blocks_are_multiplied_with_their_scales() -> None:
    weight = (torch.randn(130, 200) * 50).to(torch.float8_e4m3fn)
    scale_inv = torch.tensor([[0.5, 2.0], [0.25, 3.0]])
    spec = UnpackSpec(rows=130, cols=200, src=DType.F8_E4M3, dst=DType.BF16, scaling=Scaling.BLOCK)

    got = unpack(_bytes(weight), spec, scales=scale_inv).tensor

    expected = weight.float()
    expected[:128, :128] *= 0.5
    expected[:128, 128:] *= 2.0
    expected[128:, :128] *= 0.25
    expected[128:, 128:] *= 3.0
    assert torch.equal(got, expected.bfloat16())


def test_int8_rows_are_multiplied_with_their_scale() -> None:
    weight = torch.tensor([[1, -128, 127], [0, 5, -7]], dtype=torch.int8)
    spec = UnpackSpec(rows=2, cols=3, src=DType.I8, dst=DType.F32, scaling=Scaling.ROW)

    got = unpack(_bytes(weight), spec, scales=torch.tensor([0.5, -2.0])).tensor

    assert got.tolist() == [[0.5, -64.0, 63.5], [0.0, -10.0, 14.0]]


def test_mxfp4_has_the_first_value_in_the_low_half_and_powers_of_two_as_scales() -> None:
    packed = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8)
    spec = UnpackSpec(rows=1, cols=32, src=DType.F4, dst=DType.F32, scaling=Scaling.MX)

    got = unpack(packed, spec, scales=torch.tensor([[128]], dtype=torch.uint8)).tensor

    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert got.tolist() == [[2 * value for value in (*half, *(-value for value in half))] * 2]


def test_the_ends_of_e8m0_are_a_subnormal_power_and_nan() -> None:
    ones = torch.full((48,), 0x22, dtype=torch.uint8)
    spec = UnpackSpec(rows=3, cols=32, src=DType.F4, dst=DType.F32, scaling=Scaling.MX)

    got = unpack(ones, spec, scales=torch.tensor([[0], [254], [255]], dtype=torch.uint8)).tensor[:, 0]

    assert got[0].item() == 2.0**-127
    assert got[1].item() == 2.0**127
    assert got[2].isnan()


def test_a_slice_of_wider_rows_is_written_transposed_into_wider_rows() -> None:
    wide = torch.arange(24, dtype=torch.float32).view(4, 6)
    whole = torch.zeros(3, 10, dtype=torch.bfloat16)
    spec = UnpackSpec(rows=4, cols=3, row_stride=6, src=DType.F32, dst=DType.BF16, transpose=True)

    unpack(_bytes(wide)[4 * 2 :], spec, out=whole[:, 1:5])

    assert torch.equal(whole[:, 1:5], wide[:, 2:5].t().bfloat16())
    assert not whole[:, 0].any()
    assert not whole[:, 5:].any()


def test_bytes_move_as_they_are_where_the_dtype_stays() -> None:
    values = torch.tensor([[float("nan"), -0.0], [1e-45, 3.0]])
    spec = UnpackSpec(rows=2, cols=2, src=DType.F32, dst=DType.F32, transpose=True)

    got = unpack(_bytes(values), spec).tensor

    assert torch.equal(got.view(torch.int32), values.t().contiguous().view(torch.int32))


@given(data=st.binary(max_size=67), shift=st.integers(0, 3))
def test_word_sums_of_host_and_device_are_those_of_little_endian_words(data: bytes, shift: int) -> None:
    array = np.frombuffer(bytes(shift) + data, np.uint8)[shift:]
    padded = data + bytes(-len(data) % 4)
    expected = sum(int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)) % 2**32

    assert host_word_sum(array) == expected
    assert int(word_sum(torch.tensor(list(bytes(shift) + data), dtype=torch.uint8)[shift:])) == expected


def test_the_word_sum_is_that_of_the_slice_without_the_gaps() -> None:
    wide = torch.randint(0, 256, (5, 9), dtype=torch.uint8)
    spec = UnpackSpec(rows=5, cols=7, row_stride=9, src=DType.U8, dst=DType.U8)

    total = unpack(_bytes(wide), spec, with_sum=True).word_sum

    assert total is not None
    assert int(total) == host_word_sum(wide[:, :7].contiguous().view(-1).numpy())


def test_a_word_sum_sees_a_flipped_bit_and_not_words_that_changed_places() -> None:
    words = np.array([1, 2, 3], np.uint32)
    flipped, swapped = words.copy(), words[[1, 0, 2]]
    flipped[1] ^= 1 << 31

    assert host_word_sum(flipped.view(np.uint8)) != host_word_sum(words.view(np.uint8))
    assert host_word_sum(swapped.view(np.uint8)) == host_word_sum(words.view(np.uint8))


def test_dtypes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(RequestError, match=r"BF16 to F32 with scaling 'block' is not known; .*F8_E4M3"):
        UnpackSpec(rows=1, cols=1, src=DType.BF16, dst=DType.F32, scaling=Scaling.BLOCK)
    with pytest.raises(RequestError, match="F32 to I8"):
        UnpackSpec(rows=1, cols=1, src=DType.F32, dst=DType.I8)
    with pytest.raises(RequestError, match="multiples of 32"):
        UnpackSpec(rows=1, cols=40, src=DType.F4, dst=DType.F32, scaling=Scaling.MX)
    with pytest.raises(RequestError, match="plain copy"):
        UnpackSpec(rows=1, cols=1, src=DType.F64, dst=DType.F64)


def test_memory_that_does_not_fit_the_spec_is_refused() -> None:
    spec = UnpackSpec(rows=2, cols=4, src=DType.F16, dst=DType.F32)
    scaled = UnpackSpec(rows=2, cols=4, src=DType.I8, dst=DType.F32, scaling=Scaling.ROW)
    flat = torch.zeros(17, dtype=torch.uint8)

    with pytest.raises(RequestError, match="n of at least 16"):
        unpack(flat[:15], spec)
    with pytest.raises(RequestError, match="no multiple of 2"):
        unpack(flat[1:], spec)
    with pytest.raises(RequestError, match="leave them out"):
        unpack(flat, spec, scales=torch.ones(2))
    with pytest.raises(RequestError, match=r"scales are none; contiguous float32 \[2\]"):
        unpack(flat, scaled)
    with pytest.raises(RequestError, match=r"scales are torch.float16 \[2\]"):
        unpack(flat, scaled, scales=torch.ones(2, dtype=torch.float16))
    with pytest.raises(RequestError, match=r"out is torch.float32 \[4, 2\]"):
        unpack(flat, spec, out=torch.zeros(4, 2))
