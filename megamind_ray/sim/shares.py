"""Max-min fair shares: how much each flow gets where several want more than there is.

Progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): all rates rise together, in proportion to their
weights, until a flow reaches its own cap or something that it uses is full; those flows stay, the others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["FloatArray", "IndexArray", "Lanes", "fair_rates", "usage"]

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]

_Mask = npt.NDArray[np.bool_]
_CLOSE = 1e-12  # levels that differ by less are one: symmetric resources fill up together


@dataclass(frozen=True, slots=True)
class Lanes:
    """Flows that are alike, in rows: a lane is any number of flows that use the same resources in the same way.

    All of a lane get the same rate, so what is computed grows with the lanes, not with the flows.

    Attributes:
        index: Resources that a flow of the lane uses, shape (lanes, most uses of one); unused places hold the number of
            resources.
        units: Units of each for each byte; 0 in unused places.
        alone: What a flow has where there is no other, bytes/s.
        weight: Share of a flow against others.
    """

    index: IndexArray
    units: FloatArray
    alone: FloatArray
    weight: FloatArray

    def __len__(self) -> int:
        return len(self.alone)

    @classmethod
    def of(
        cls, uses: Sequence[Sequence[tuple[int, float]]], cap: FloatArray, weight: FloatArray, capacity: FloatArray
    ) -> Lanes:
        """From what a flow of each lane uses, and the most that it can have, bytes/s."""
        width = max([1, *map(len, uses)])
        index = np.full((len(uses), width), len(capacity), np.intp)
        units = np.zeros((len(uses), width))
        for row, pairs in enumerate(uses):
            for column, (resource, amount) in enumerate(pairs):
                index[row, column], units[row, column] = resource, amount
        there = np.append(capacity, np.inf)[index]
        slowest = np.divide(there, units, out=np.full(units.shape, np.inf), where=units > 0).min(axis=1)
        return cls(index, units, np.minimum(cap, slowest), weight)

    def rows(self, rows: IndexArray) -> Lanes:
        """Some of them."""
        return Lanes(self.index[rows], self.units[rows], self.alone[rows], self.weight[rows])


def fair_rates(capacity: FloatArray, lanes: Lanes, count: FloatArray) -> FloatArray:
    """The rate of each flow of each lane, bytes/s.

    Args:
        capacity: Of each resource, units/s.
        lanes: What the flows use.
        count: Flows of each lane, more than 0.
    """
    rates = lanes.alone.copy()
    free = np.append(capacity, np.inf)
    wanted = np.bincount(lanes.index.ravel(), (lanes.units * (rates * count)[:, None]).ravel(), len(free))
    # What has enough for all of its flows, each as fast as it would be alone, holds up none of them.
    scarce = wanted > free
    if scarce.any():
        held = np.flatnonzero(scarce[lanes.index].any(axis=1))
        free[~scarce] = np.inf
        rates[held] = _fill(free, lanes.rows(held), count[held])
    return rates


def _fill(free: FloatArray, lanes: Lanes, count: FloatArray) -> FloatArray:
    """Progressive filling; ``free`` has one entry more than there are resources, for unused places."""
    rates = np.zeros(len(lanes))
    # How much of each resource a lane takes as the common level rises by one.
    slopes = lanes.units * (lanes.weight * count)[:, None]
    top = lanes.alone / lanes.weight
    rising = np.arange(len(lanes))
    while len(rising):
        index, slope = lanes.index[rising], slopes[rising]
        demand = np.bincount(index.ravel(), slope.ravel(), len(free))
        level = np.divide(free, demand, out=np.full(len(free), np.inf), where=demand > 0)
        reach = level[index]
        lowest = reach.min(axis=1)
        # As others stop, what is left for the rest only grows: who comes to its cap below its lowest level keeps it.
        stops: _Mask = np.less_equal(top[rising], lowest)
        if stops.any():
            rates[rising[stops]] = lanes.alone[rising[stops]]
        else:
            stops = _held_up(index, reach, lowest, len(free))
            rates[rising[stops]] = lanes.weight[rising[stops]] * lowest[stops]
        ended = rising[stops]
        taken = lanes.units[ended] * (rates[ended] * count[ended])[:, None]
        free = np.maximum(free - np.bincount(lanes.index[ended].ravel(), taken.ravel(), len(free)), 0.0)
        rising = rising[~stops]
    return rates


def _held_up(index: IndexArray, reach: FloatArray, lowest: FloatArray, num_resources: int) -> _Mask:
    """Flows at a resource that is full before any other one that its flows use. There is always one: the lowest."""
    full_first = np.ones(num_resources, np.bool_)
    full_first[index[reach > lowest[:, None] * (1 + _CLOSE)]] = False
    return np.asarray(full_first[index].any(axis=1), np.bool_)


def usage(lanes: Lanes, rates: FloatArray, count: FloatArray, num_resources: int) -> FloatArray:
    """Units/s of each resource that flows at these rates take."""
    taken = lanes.units * (rates * count)[:, None]
    sums = np.bincount(lanes.index.ravel(), taken.ravel(), num_resources + 1)
    return np.asarray(sums[:num_resources], np.float64)
