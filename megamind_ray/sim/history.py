"""Values over time in a bounded number of samples."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose

import numpy as np

from megamind_ray.sim.shares import FloatArray

__all__ = ["History", "StepSeries"]


class History:
    """Rates of many things over time, as means over spans of equal length, which double when there are too many.

    Args:
        width: How many things.
        max_samples: Most spans.
        span_s: Length of the first ones.
    """

    def __init__(self, width: int, *, max_samples: int = 512, span_s: float = 1e-3) -> None:
        self._sums = np.zeros((max_samples + max_samples % 2, width))
        self.span_s = span_s

    def add(self, begin_s: float, end_s: float, rates: FloatArray) -> None:
        """These rates, from ``begin_s`` to ``end_s``."""
        while end_s > self.span_s * len(self._sums):
            half = len(self._sums) // 2
            self._sums[:half] = self._sums[0::2] + self._sums[1::2]
            self._sums[half:] = 0.0
            self.span_s *= 2
        first, last = int(begin_s / self.span_s), int(end_s / self.span_s)
        for row in range(first, min(last, len(self._sums) - 1) + 1):
            part_s = min(end_s, (row + 1) * self.span_s) - max(begin_s, row * self.span_s)
            if part_s > 0:
                self._sums[row] += rates * part_s

    def samples(self, column: int, end_s: float) -> Iterator[tuple[float, float]]:
        """(time, rate) from each change on; 0 from ``end_s`` on."""
        before = 0.0
        for row, total in enumerate(self._sums[:, column].tolist()):
            at_s = row * self.span_s
            if at_s >= end_s:
                break
            rate = total / min(self.span_s, end_s - at_s)
            if not isclose(rate, before, rel_tol=1e-6):
                yield at_s, rate
                before = rate
        if before:
            yield end_s, 0.0


class StepSeries:
    """A value that changes in steps; of changes that follow each other too fast, the last one is kept.

    Args:
        max_samples: Most that are kept.
    """

    def __init__(self, max_samples: int = 512) -> None:
        self._max_samples = max_samples
        self._apart_s = 0.0
        self._samples: list[tuple[float, float]] = []

    def set(self, at_s: float, value: float) -> None:
        """The value from ``at_s`` on; times do not go back."""
        samples = self._samples
        if samples and at_s < samples[-1][0] + self._apart_s:
            samples[-1] = (samples[-1][0], value)
            return
        samples.append((at_s, value))
        if len(samples) >= self._max_samples:
            self._apart_s = max(self._apart_s * 2, 2 * at_s / self._max_samples)
            kept = [samples[0]]
            for sample in samples[1:]:
                if sample[0] < kept[-1][0] + self._apart_s:
                    kept[-1] = (kept[-1][0], sample[1])
                else:
                    kept.append(sample)
            self._samples = kept

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return iter(self._samples)
