"""What every implementation of a protocol must do, as test classes to inherit from.

A plug-in author writes ``class TestMyPlane(DataPlaneContract)`` with a ``plane`` fixture, and pytest does the rest.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from megamind_ray.actors.dataplane import DataPlane

__all__ = ["DataPlaneContract"]

_TIMEOUT_S = 30.0


class DataPlaneContract:
    """A wire for blocks (``actors.dataplane.DataPlane``)."""

    @pytest.fixture
    def plane(self) -> DataPlane:
        """The implementation under test."""
        raise NotImplementedError("give the data plane under test as a fixture named 'plane'")

    @pytest.mark.parametrize("nbytes", [0, 1, 100, 1 << 20])
    def test_bytes_come_as_they_were_put(self, plane: DataPlane, nbytes: int) -> None:
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        (got,) = plane.get([plane.put(data)], timeout_s=_TIMEOUT_S)
        assert got.dtype == np.uint8
        assert np.array_equal(got, data)

    def test_one_block_is_fetched_while_others_are_put(self, plane: DataPlane) -> None:
        handles = [plane.put(np.full(1000, number, np.uint8)) for number in range(4)]
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda handle: _fetched(plane, handle)[0], handles)) == [0, 1, 2, 3]

    def test_what_is_offered_is_fetched_and_still_there(self, plane: DataPlane) -> None:
        handle = plane.put(np.full(300_000, 7, np.uint8))
        offered = plane.offer(handle)
        assert np.array_equal(_fetched(plane, offered), np.full(300_000, 7, np.uint8))
        (got,) = plane.get([plane.settle(handle)], timeout_s=_TIMEOUT_S)
        assert np.array_equal(got, np.full(300_000, 7, np.uint8))

    def test_blocks_come_in_the_order_they_were_asked_for(self, plane: DataPlane) -> None:
        handles = [plane.put(np.full(1000 + number, number, np.uint8)) for number in range(5)]
        got = plane.get(handles[::-1], timeout_s=_TIMEOUT_S)
        assert [int(block[0]) for block in got] == [4, 3, 2, 1, 0]
        assert [block.nbytes for block in got] == [1004, 1003, 1002, 1001, 1000]

    def test_a_block_is_a_copy_of_what_was_put(self, plane: DataPlane) -> None:
        """Blocks are cut in buffers that are used again at once."""
        buffer = np.zeros(200_000, np.uint8)
        handle = plane.put(buffer)
        buffer[:] = 1
        (got,) = plane.get([handle], timeout_s=_TIMEOUT_S)
        assert not got.any()

    def test_a_part_of_a_larger_buffer_travels_alone(self, plane: DataPlane) -> None:
        buffer = np.arange(256, dtype=np.uint8)
        (got,) = plane.get([plane.put(buffer[10:20])], timeout_s=_TIMEOUT_S)
        assert got.tolist() == list(range(10, 20))

    def test_nobody_can_write_to_a_block(self, plane: DataPlane) -> None:
        (got,) = plane.get([plane.put(np.zeros(200_000, np.uint8))], timeout_s=_TIMEOUT_S)
        with pytest.raises(ValueError, match="read-only"):
            got[0] = 1
        offered = plane.offer(plane.put(np.zeros(200_000, np.uint8)))
        with plane.fetch(offered, timeout_s=_TIMEOUT_S) as fetched, pytest.raises(ValueError, match="read-only"):
            fetched[0] = 1

    def test_nothing_asked_for_is_nothing_got(self, plane: DataPlane) -> None:
        assert plane.get([], timeout_s=_TIMEOUT_S) == []


def _fetched(plane: DataPlane, handle: object) -> npt.NDArray[np.uint8]:
    with plane.fetch(handle, timeout_s=_TIMEOUT_S) as data:
        return data.copy()
