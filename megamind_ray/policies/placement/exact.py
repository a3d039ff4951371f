"""The placement that loads soonest, by branch and bound: for small meshes, and to hold Best-Fit to.

Ranks are placed in order; a branch ends where what is placed already takes as long as the best placement known. GPUs
that are alike are tried once: those of one node with the same memory, links and neighbours, and those of nodes that
are alike and equally full. Equal ranks of a gang that stays on a node take its GPUs in order, since they could change
places.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from megamind_ray.core.ids import NodeId
from megamind_ray.policies.costs import Float64Array, sums
from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest, Seat
from megamind_ray.policies.placement.best_fit import BestFitDecreasing
from megamind_ray.policies.placement.domains import Slot, slots
from megamind_ray.policies.placement.locality import Group, groups_of, is_close
from megamind_ray.policies.placement.makespan import Makespan
from megamind_ray.policies.placement.relaxation import least_seconds

__all__ = ["Exact", "Solution", "solve"]

_MAX_STEPS = 5_000
# Placements that differ by less are equal: sharing out is exact to about this much.
_EQUAL = 1e-6


class Exact:
    """The soonest of the placements that are at least as close-knit as Best-Fit's, if its search comes to an end."""

    name = "exact"

    def place(self, request: PlacementRequest) -> PlacementDecision:
        """See ``PlacementPolicy``. Without the costs of the load this is Best-Fit."""
        decision = BestFitDecreasing().place(request)
        if decision.unplaced or request.costs is None:
            return decision
        first = _taken(request, decision)
        solution = solve(request, first, groups_of(request.parallel, first))
        how = "proven" if solution.is_proven else f"the best of {_MAX_STEPS} steps of search"
        seats = [
            Seat(node=slot.node.id, gpu=slot.gpu.index, reason=f"soonest load as close-knit as this, {how}")
            for slot in solution.taken
        ]
        return PlacementDecision(seats=tuple(seats))


@dataclass(frozen=True, slots=True)
class Solution:
    """What a search found.

    Attributes:
        taken: By rank, its slot.
        seconds: Of the busiest resource.
        is_proven: Whether no placement is sooner.
        num_steps: Slots tried.
    """

    taken: tuple[Slot, ...]
    seconds: float
    is_proven: bool
    num_steps: int


def solve(
    request: PlacementRequest, first: list[Slot], groups: tuple[Group, ...] = (), *, max_steps: int = _MAX_STEPS
) -> Solution:
    """The soonest placement.

    Args:
        request: The question; with costs and load.
        first: A placement to begin with, by rank.
        groups: What stays together.
        max_steps: Slots to try before giving up on a proof.
    """
    search = _Search(request, first, groups, max_steps)
    search.descend(0)
    return Solution(tuple(search.best), search.best_s, search.num_steps < max_steps, search.num_steps)


def _taken(request: PlacementRequest, decision: PlacementDecision) -> list[Slot]:
    by_name = {(slot.node.id, slot.gpu.index): slot for slot in slots(request.topology)}
    return [by_name[seat.node, seat.gpu] for seat in decision.seats if seat is not None]


class _Search:
    def __init__(self, request: PlacementRequest, first: list[Slot], groups: tuple[Group, ...], max_steps: int) -> None:
        assert request.costs is not None
        assert request.load is not None
        self._request, self._costs, self._groups, self._max_steps = request, request.costs, groups, max_steps
        self._makespan = Makespan(request.costs, request.load, request.parallel.world)
        self._least_s = least_seconds(request, groups)
        self._alone = _read_alone(request, groups)
        self._of_rank = [[group for group in groups if rank in group.ranks] for rank in request.parallel.ranks]
        self._every = slots(request.topology)
        self._node_kind = [
            hash(replace(node, id=NodeId(""), address="", rack=None)) ^ hash(int(request.costs.rack[index]))
            for index, node in enumerate(request.topology.nodes)
        ]
        self._placed: list[Slot] = []
        self._used: set[int] = set()
        self._busy: Float64Array = np.zeros_like(request.costs.read)
        self._links: Counter[tuple[str, int]] = Counter()
        self.best, self.best_s, self.num_steps = first, self._seconds(first), 0

    def _seconds(self, taken: list[Slot]) -> float:
        return self._makespan.seconds(np.array([slot.order for slot in taken], np.int64))

    def descend(self, rank: int) -> None:
        """Tries all slots for a rank, and after each all for the ranks behind it."""
        if rank == self._request.parallel.world:
            seconds = self._seconds(self._placed)
            if seconds < self.best_s * (1 - _EQUAL):
                self.best, self.best_s = list(self._placed), seconds
            return
        seen: set[object] = set()
        for slot in self._every:
            if self.num_steps >= self._max_steps or self.best_s <= self._least_s * (1 + _EQUAL):
                return
            if slot.order in self._used or slot.gpu.free_bytes < self._request.rank_bytes[rank]:
                continue
            alike = self._signature(slot)
            if alike in seen or not self._may(rank, slot):
                continue
            seen.add(alike)
            self.num_steps += 1
            self._with(rank, slot)

    def _with(self, rank: int, slot: Slot) -> None:
        costs, nbytes = self._costs, float(self._makespan.rank_bytes[rank])
        before = self._busy[slot.node_index].copy()
        switch = int(costs.gpu_switch[slot.order])
        self._busy[slot.node_index] += self._alone[rank] @ self._uses(slot) + nbytes * costs.copy[slot.order]
        through = nbytes * float(costs.switch[switch]) if switch >= 0 else 0.0
        self._links["switch", switch] += through  # type: ignore[assignment]
        placed_s = max(
            float(self._busy[slot.node_index].max()),
            nbytes * float(costs.device[slot.order]),
            self._links["switch", switch],
        )
        if placed_s < self.best_s * (1 - _EQUAL):
            self._placed.append(slot)
            self._used.add(slot.order)
            self.descend(rank + 1)
            self._used.discard(slot.order)
            self._placed.pop()
        self._links["switch", switch] -= through  # type: ignore[assignment]
        self._busy[slot.node_index] = before

    def _uses(self, slot: Slot) -> Float64Array:
        node = slot.node_index
        return np.stack([self._costs.read[node], self._costs.pack[node]])

    def _may(self, rank: int, slot: Slot) -> bool:
        """Whether groups can still be kept, and equal ranks of a gang are in order."""
        for group in self._of_rank[rank]:
            before = [self._placed[other] for other in group.ranks if other < rank]
            if not before:
                continue
            if not is_close(group, [*before, slot]):
                return False
            last = rank - 1
            is_gang = len(group.ranks) == self._request.parallel.tp and group.num_nodes == 1
            if is_gang and last in group.ranks and self._is_equal(last, rank) and slot.order < self._placed[last].order:
                return False
        return True

    def _is_equal(self, one: int, other: int) -> bool:
        need, nbytes = self._request.rank_bytes, self._makespan.rank_bytes
        return need[one] == need[other] and abs(nbytes[one] - nbytes[other]) < 1

    def _signature(self, slot: Slot) -> object:
        """Equal for slots that make no difference: same GPU, with the same company on its switch, group and node."""
        node = slot.node
        company = [(rank, item) for rank, item in enumerate(self._placed) if item.node_index == slot.node_index]
        switch = next((set(item.gpus) for item in node.switches if slot.gpu.index in item.gpus), set[int]())
        here = node.id if company else self._node_kind[slot.node_index]
        return (
            here,
            replace(slot.gpu, index=0, nvlink_group=None, numa=None),
            slot.gpu.nvlink_group,
            slot.gpu.numa,
            len(switch),
            tuple(rank for rank, item in company if item.gpu.index in switch),
            tuple(sorted(_free(self._every, self._used, slot, switch))),
        )


def _free(every: list[Slot], used: set[int], slot: Slot, switch: set[int]) -> list[tuple[int, float]]:
    """What else is free behind the same switch."""
    return [
        (other.gpu.free_bytes, other.gpu.pcie_bytes_per_s)
        for other in every
        if other.node_index == slot.node_index and other.gpu.index in switch and other.order not in used
    ]


def _read_alone(request: PlacementRequest, groups: tuple[Group, ...]) -> Float64Array:
    """``[rank, 2]``, bytes that are surely read, and packed, on the node of a rank: those of the largest group on one
    node around it that nobody else needs, counted at the group's first rank.
    """
    load = request.load
    assert load is not None
    part, rank = load.members()
    direct = load.is_direct(part, rank)
    owner, first = {}, {}
    for group in sorted(groups, key=lambda group: len(group.ranks)):
        if group.num_nodes == 1:
            owner.update(dict.fromkeys(group.ranks, group.ranks))
    for at in request.parallel.ranks:
        first[at] = owner.get(at, (at,))[0]
    firsts = np.array([first[at] for at in request.parallel.ranks], np.int64)
    needed, homes = np.unique(np.stack([load.part_class[part], firsts[rank]]), axis=1)
    alone = np.bincount(needed, minlength=len(load.class_bytes))[needed] == 1
    needed, homes = needed[alone], homes[alone]
    read = sums(homes, load.class_bytes[needed], request.parallel.world)
    packed = sums(homes, (load.class_bytes * ~direct)[needed], request.parallel.world)
    return np.stack([read, packed], axis=1)
