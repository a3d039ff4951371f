"""Improving a placement change by change, best first: the least strained one that is known is changed next.

A change that is better is followed at once. Where none is, those that were looked at before are changed in turn, the
least strained first, even if they are a little worse than the best: so two changes are found of which neither alone is
one for the better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

from megamind_ray.core.demands import Int64Array
from megamind_ray.policies.placement.base import PlacementRequest
from megamind_ray.policies.placement.domains import Slot
from megamind_ray.policies.placement.locality import Group, is_kept
from megamind_ray.policies.placement.makespan import Makespan
from megamind_ray.policies.placement.moves import Moves

__all__ = ["descend"]

# What is looked at may be so much slower than the best: a second change may make up for it.
_DETOUR = 1.3
# Steps of a placement that is looked at in full, of one that is seen to be too slow at a glance, and of one that cannot
# be or was seen before.
_LOOK_STEPS, _GLANCE_STEPS, _SKIP_STEPS = 20, 4, 1


def descend(
    request: PlacementRequest,
    every: Sequence[Slot],
    taken: Sequence[Slot],
    makespan: Makespan,
    groups: Sequence[Group],
    enough_s: float,
    max_steps: int,
) -> list[Slot]:
    """The placement that loads soonest of those that some number of steps comes upon.

    Args:
        request: The question.
        every: Slots that may be taken.
        taken: By rank, the slot to begin with.
        makespan: What a placement costs.
        groups: What stays as close as it is.
        enough_s: When to stop.
        max_steps: How many steps at most.
    """
    moves = Moves(request, every, groups)
    first = makespan.strain(_orders(taken))
    assert first is not None
    best, best_s = list(taken), (first.seconds, first.mean)
    seen = {moves.key(taken)}
    waiting: list[tuple[float, int, Iterator[list[Slot]]]] = [(first.mean, 0, moves.of(taken, first))]
    left = max_steps
    while waiting and best_s[0] > enough_s and left > 0:
        candidate = next(waiting[0][2], None)
        if candidate is None:
            heappop(waiting)
            continue
        left -= _SKIP_STEPS
        key = moves.key(candidate)
        if key in seen:
            continue
        seen.add(key)
        if not (_fits(request, candidate) and is_kept(groups, candidate)):
            continue
        strain = makespan.strain(_orders(candidate), best_s[0] * _DETOUR)
        left -= _GLANCE_STEPS if strain is None else _LOOK_STEPS
        if strain is None:
            continue
        if (strain.seconds, strain.mean) < best_s:
            best, best_s = candidate, (strain.seconds, strain.mean)
        heappush(waiting, (strain.mean, len(seen), moves.of(candidate, strain)))
    return best


def _orders(taken: Sequence[Slot]) -> Int64Array:
    return np.array([slot.order for slot in taken], np.int64)


def _fits(request: PlacementRequest, taken: Sequence[Slot]) -> bool:
    return all(slot.gpu.free_bytes >= need for slot, need in zip(taken, request.rank_bytes, strict=True))
