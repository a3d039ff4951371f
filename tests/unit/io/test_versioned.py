"""The body of an answer, put into place."""

from __future__ import annotations

import zlib

import pytest

from megamind_ray.io import ShortReadError
from megamind_ray.io.versioned import fill

BODY = bytes(range(100))


@pytest.mark.parametrize("pieces", [[BODY], [BODY[:1], memoryview(BODY)[1:60], BODY[60:]], [b"", BODY, b""]])
@pytest.mark.parametrize(("summed", "value"), [(True, zlib.crc32(BODY)), (False, 0)])
def test_pieces_come_into_place_and_are_summed_on_the_way(
    pieces: list[bytes | memoryview], summed: bool, value: int
) -> None:
    place = bytearray(len(BODY))

    assert fill(memoryview(place), pieces, 7, summed=summed) == value
    assert place == BODY


def test_a_body_that_ends_early_is_a_short_read() -> None:
    with pytest.raises(ShortReadError, match="ended after 90 of 100 bytes at offset 7"):
        fill(memoryview(bytearray(100)), [BODY[:50], BODY[:40]], 7, summed=False)


def test_a_body_that_goes_on_is_another_failed_attempt() -> None:
    with pytest.raises(OSError, match="goes on after the 99 bytes at offset 7"):
        fill(memoryview(bytearray(99)), [BODY[:50], BODY[50:]], 7, summed=False)
