"""Improving a placement exchange by exchange, as long as the busiest resource gets less to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megamind_ray.core.demands import Int64Array
from megamind_ray.policies.placement.base import PlacementRequest
from megamind_ray.policies.placement.domains import Slot
from megamind_ray.policies.placement.locality import Group, is_kept
from megamind_ray.policies.placement.makespan import Makespan

__all__ = ["descend"]

_WORTH, _NO_WORSE = 0.9995, 1.0001
_MAX_TRIALS = 1500


def descend(
    request: PlacementRequest,
    every: Sequence[Slot],
    taken: Sequence[Slot],
    makespan: Makespan,
    groups: Sequence[Group],
    enough_s: float,
) -> list[Slot]:
    """A placement that no move of a rank or gang makes better, or the best that some number of trials found.

    Args:
        request: The question.
        every: Slots that may be taken.
        taken: By rank, the slot to begin with.
        makespan: What a placement costs.
        groups: What stays as close as it is.
        enough_s: When to stop.
    """
    best, trials = list(taken), 0
    seconds, strain = makespan.strain(_orders(taken))
    improved = True
    while improved and seconds > enough_s and trials < _MAX_TRIALS:
        improved = False
        for candidate in _moves(request, every, best, makespan):
            if not (_fits(request, candidate) and is_kept(groups, candidate)):
                continue
            trials += 1
            now, now_strain = makespan.strain(_orders(candidate))
            # Where several nodes are equally busy no single move makes the busiest less so, but it strains fewer.
            if now <= seconds * _NO_WORSE and now_strain < strain * _WORTH:
                best, seconds, strain, improved = candidate, now, now_strain, True
                break
            if trials >= _MAX_TRIALS:
                break
    return best


def _orders(taken: Sequence[Slot]) -> Int64Array:
    return np.array([slot.order for slot in taken], np.int64)


def _fits(request: PlacementRequest, taken: Sequence[Slot]) -> bool:
    return all(slot.gpu.free_bytes >= need for slot, need in zip(taken, request.rank_bytes, strict=True))


def _moves(
    request: PlacementRequest, every: Sequence[Slot], taken: list[Slot], makespan: Makespan
) -> Iterator[list[Slot]]:
    """Placements that take something from the busiest node: gangs moved and exchanged, then ranks."""
    node = _busiest_node(taken, makespan)
    tp, world = request.parallel.tp, request.parallel.world
    used = {slot.order for slot in taken}
    free = [slot for slot in every if slot.order not in used]
    gangs = [range(first, first + tp) for first in range(0, world, tp)]
    hot = [gang for gang in gangs if node is None or any(taken[rank].node_index == node for rank in gang)]
    if tp > 1:
        for gang in hot:
            yield from _elsewhere(taken, gang, free)
            for partner in gangs:
                if partner is not gang:
                    yield _exchanged(taken, list(zip(gang, partner, strict=True)))
    for gang in hot:
        for rank in gang:
            if node is None or taken[rank].node_index == node:
                for slot in free:
                    moved = list(taken)
                    moved[rank] = slot
                    yield moved
                for other in request.parallel.ranks:
                    if (other != rank and request.rank_bytes[other] != request.rank_bytes[rank]) or tp == 1:
                        yield _exchanged(taken, [(rank, other)])


def _busiest_node(taken: Sequence[Slot], makespan: Makespan) -> int | None:
    """None where what is busiest is no node's own."""
    orders = _orders(taken)
    busy, links = makespan.busy(orders)
    if float(links.max(initial=0.0)) >= busy.seconds:
        return makespan.node_of_link(int(links.argmax()))
    if busy.nodes.max(initial=0.0) >= busy.seconds:
        return int(busy.nodes.max(axis=1).argmax())
    return None


def _elsewhere(taken: list[Slot], gang: range, free: Sequence[Slot]) -> Iterator[list[Slot]]:
    """The gang on another node's free slots, on other ones of its own node; or over nodes of another rack."""
    by_place: dict[tuple[int, int | None], list[Slot]] = {}
    mine = [taken[rank] for rank in gang]
    for slot in [*mine, *free]:
        by_place.setdefault((slot.node_index, slot.gpu.nvlink_group), []).append(slot)
    by_node: dict[int, list[Slot]] = {}
    for (node, _), slots in by_place.items():
        by_node.setdefault(node, []).extend(slots)
    by_rack: dict[str | None, list[Slot]] = {}
    if len({slot.node_index for slot in mine}) > 1:  # no node holds it
        for slots in sorted(by_node.values(), key=len, reverse=True):
            by_rack.setdefault(slots[0].node.rack, []).extend(sorted(slots, key=lambda slot: -slot.gpu.free_bytes))
    whole = [slots[: len(gang)] for slots in by_rack.values()]
    for slots in [*by_place.values(), *by_node.values(), *whole]:
        if len(slots) >= len(gang):
            moved = list(taken)
            # Roomy GPUs for whoever was on a roomy one before.
            order = sorted(gang, key=lambda rank: -taken[rank].gpu.free_bytes)
            roomy = sorted(slots, key=lambda slot: -slot.gpu.free_bytes)[: len(gang)]
            for rank, slot in zip(order, roomy, strict=True):
                moved[rank] = slot
            yield moved


def _exchanged(taken: list[Slot], pairs: Sequence[tuple[int, int]]) -> list[Slot]:
    moved = list(taken)
    for one, other in pairs:
        moved[one], moved[other] = taken[other], taken[one]
    return moved
