import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.io import crc32


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_it_is_the_crc32_of_zlib_and_can_be_continued(first: Any, second: Any) -> None:
    assert crc32(first) == zlib.crc32(first)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)


@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview, lambda raw: np.frombuffer(raw, np.uint8)])
def test_any_buffer_will_do(convert: Any) -> None:
    assert crc32(convert(b"123456789")) == 0xCBF43926
    assert crc32(convert(b"")) == 0


def test_the_bytes_of_an_array_are_summed_whatever_its_dtype() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)

    assert crc32(array) == zlib.crc32(array.tobytes())


def test_a_strided_view_is_refused() -> None:
    with pytest.raises((ValueError, BufferError)):
        crc32(np.zeros(10, np.uint8)[::2])
