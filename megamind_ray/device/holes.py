"""Which ranges of a fixed budget are free: best fit, holes merged when ranges come back."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["HoleList"]


class HoleList:
    """Free ranges of ``[0, size_bytes)``. Not thread-safe; its arena holds a lock.

    Invariant: holes are sorted, do not overlap and do not touch.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._begins: list[int] = [0] if size_bytes else []
        self._ends: list[int] = [size_bytes] if size_bytes else []

    @property
    def free_bytes(self) -> int:
        return sum(self._ends) - sum(self._begins)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest hole."""
        return max((end - begin for begin, end in self.ranges), default=0)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The holes as (first byte, one past the last)."""
        return list(zip(self._begins, self._ends, strict=True))

    def take(self, nbytes: int, alignment: int) -> int | None:
        """Takes a range from the smallest hole that fits, the lowest of equals.

        Returns:
            Its first byte, a multiple of ``alignment``; None where no hole fits.
        """
        if not nbytes:
            return 0
        best: tuple[int, int, int] | None = None
        for row, (begin, end) in enumerate(self.ranges):
            aligned = -(-begin // alignment) * alignment
            if aligned + nbytes <= end and (best is None or end - begin < best[0]):
                best = (end - begin, row, aligned)
        if best is None:
            return None
        _, row, offset = best
        self._cut(row, offset, offset + nbytes)
        return offset

    def give(self, begin: int, end: int) -> tuple[int, int]:
        """Gives a taken range back.

        Returns:
            The hole that it is part of now.
        """
        if begin == end:
            return begin, end
        row = bisect_left(self._begins, begin)
        assert row == 0 or self._ends[row - 1] <= begin, "range is free already"
        assert row == len(self._begins) or end <= self._begins[row], "range is free already"
        first = last = row
        if row > 0 and self._ends[row - 1] == begin:
            first, begin = row - 1, self._begins[row - 1]
        if row < len(self._begins) and self._begins[row] == end:
            last, end = row + 1, self._ends[row]
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]
        return begin, end

    def _cut(self, row: int, begin: int, end: int) -> None:
        hole_begin, hole_end = self._begins[row], self._ends[row]
        rest = [piece for piece in ((hole_begin, begin), (end, hole_end)) if piece[0] < piece[1]]
        self._begins[row : row + 1] = [piece[0] for piece in rest]
        self._ends[row : row + 1] = [piece[1] for piece in rest]
