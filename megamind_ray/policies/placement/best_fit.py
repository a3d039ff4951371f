"""Best-Fit Decreasing over gangs of ranks that talk to each other, within a deadline for the load (docs/design/0005).

The item is a *gang*: the tp ranks of one (pp, dp), or with ep > 1 first the whole stage. The bin is a *domain*: an
NVLink group, a NUMA node, a node, then a rack, or as a last resort all nodes together. Items are taken in decreasing
bytes; among the domains that hold an item the closest-knit wins, then the nearest to its neighbouring stages, then the
tightest.

Where the costs of the load are known, a domain holds a gang only if its disks, links and processors are done with it by
a deadline, and the deadline is made as short as it can be. What is close-knit stays so: see ``locality``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from megamind_ray.core.ids import NodeId
from megamind_ray.core.parallel import Coords
from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest, Seat
from megamind_ray.policies.placement.deadline import Deadline, Traffic
from megamind_ray.policies.placement.descent import descend
from megamind_ray.policies.placement.domains import Domain, Level, Slot, domains, few_nodes, gangs, slots
from megamind_ray.policies.placement.locality import Group, groups_of, is_kept
from megamind_ray.policies.placement.makespan import Makespan
from megamind_ray.policies.placement.one_by_one import one_by_one
from megamind_ray.policies.placement.relaxation import least_seconds
from megamind_ray.units import format_bytes

__all__ = ["BestFitDecreasing"]

# A placement that is so near to what none can beat is not improved.
_GOOD_ENOUGH = 1.01
# One that is so much sooner is worth another node, gang by gang less tight.
_WORTH = 0.995
_NUM_DEADLINES, _NUM_DEADLINES_OF_LARGE = 8, 3
# Improving change by change is for meshes that people look at.
_MAX_DESCENT_RANKS = 128
# It may take as long as the rest of planning and a part of the seconds by which the load could be shorter at best, and
# never more than two seconds; counted in steps, which take about so long, so that equal requests get equal placements
# on every machine.
_PART_OF_GAIN, _STEP_S, _LEAST_STEPS, _MAX_STEPS = 0.25, 0.15e-3, 1_000, 13_000


class BestFitDecreasing:
    """Best-Fit Decreasing with gangs."""

    name = "best_fit"

    def place(self, request: PlacementRequest) -> PlacementDecision:
        """See ``PlacementPolicy``.

        A single node that holds the whole mesh is taken where there is one, the one that loads it soonest, then the
        tightest; no stage boundary crosses the network then. Otherwise gangs spread over the cluster. Where keeping
        gangs together leaves a rank without a GPU, ranks are placed one by one, which finds a placement if there is
        any.
        """
        every = slots(request.topology)
        clock = _Clock.of(request)
        best = _on_one_node(request, every, clock) or _Attempt(request, every).run()
        if len(best) < request.parallel.world:
            return one_by_one(request)
        if clock is not None:
            best = _sooner(request, every, best, clock)
        seats = [best[rank] for rank in request.parallel.ranks]
        return PlacementDecision(seats=tuple(_seat(request, rank, taken) for rank, taken in enumerate(seats)))


@dataclass(frozen=True, slots=True)
class _Taken:
    """The slot of a rank, and why that one."""

    slot: Slot
    reason: str


_Placed = dict[int, _Taken]


@dataclass(frozen=True, slots=True)
class _Clock:
    """What tells how long a placement takes to load."""

    makespan: Makespan
    traffic: Traffic

    @classmethod
    def of(cls, request: PlacementRequest) -> _Clock | None:
        if request.costs is None or request.load is None:
            return None
        makespan = Makespan(request.costs, request.load, request.parallel.world)
        return cls(makespan, Traffic(request.costs, request.load, request.parallel, makespan.rank_bytes))

    def seconds(self, placed: _Placed) -> float:
        return self.makespan.seconds(np.array([placed[rank].slot.order for rank in range(len(placed))], np.int64))


def _seat(request: PlacementRequest, rank: int, taken: _Taken) -> Seat:
    left = format_bytes(taken.slot.gpu.free_bytes - request.rank_bytes[rank])
    return Seat(node=taken.slot.node.id, gpu=taken.slot.gpu.index, reason=f"{taken.reason}; {left} stays free")


def _on_one_node(request: PlacementRequest, every: Sequence[Slot], clock: _Clock | None) -> _Placed | None:
    """The mesh on the tightest node of those that load it soonest; None where no node holds it."""
    best: tuple[float, _Placed] | None = None
    seen: set[object] = set()
    nodes = sorted(request.topology.nodes, key=lambda node: sum(gpu.free_bytes for gpu in node.gpus))
    for node in nodes:
        hardware = replace(node, id=NodeId(""), address="", rack=None)
        if len(node.gpus) < request.parallel.world or hardware in seen:
            continue
        seen.add(hardware)
        here = [slot for slot in every if slot.node is node]
        placed = _Attempt(request, here).run()
        if len(placed) < request.parallel.world:
            continue
        if clock is None:
            return placed
        placed = _sooner(request, here, placed, clock)
        seconds = clock.seconds(placed)
        if best is None or seconds < best[0] * _WORTH:
            best = (seconds, placed)
    return None if best is None else best[1]


def _sooner(request: PlacementRequest, every: Sequence[Slot], first: _Placed, clock: _Clock) -> _Placed:
    """The first placement, or one as close-knit that is loaded earlier."""
    groups = groups_of(request.parallel, _slots_of(first))
    least_s = least_seconds(request, groups)
    best, best_s = first, clock.seconds(first)
    last_level = max(group.level for group in groups)
    # Twice: in the middle of what is left between a deadline that was not kept and the best that was.
    early_s = least_s
    is_large = request.parallel.world > _MAX_DESCENT_RANKS
    for _ in range(_NUM_DEADLINES_OF_LARGE if is_large else _NUM_DEADLINES):
        if best_s <= least_s * _GOOD_ENOUGH or early_s >= best_s * _WORTH:
            break
        deadline_s = (early_s + best_s) / 2 if early_s > least_s else min(least_s * _GOOD_ENOUGH, best_s)
        placed = _Attempt(request, every, Deadline(deadline_s, clock.traffic), last_level=last_level).run()
        seconds = clock.seconds(placed) if _is_as_close(request, placed, groups) else np.inf
        if seconds < best_s * _WORTH:
            best, best_s = placed, seconds
        else:
            early_s = max(deadline_s, early_s * (1 + 1e-9))
    if best_s > least_s * _GOOD_ENOUGH and request.parallel.world <= _MAX_DESCENT_RANKS:
        num_steps = min(_MAX_STEPS, _LEAST_STEPS + int((best_s - least_s) * _PART_OF_GAIN / _STEP_S))
        best = _descended(request, every, best, clock, groups, least_s * _GOOD_ENOUGH, num_steps)
    return best


def _is_as_close(request: PlacementRequest, placed: _Placed, groups: Sequence[Group]) -> bool:
    return len(placed) == request.parallel.world and is_kept(groups, _slots_of(placed))


def _descended(
    request: PlacementRequest,
    every: Sequence[Slot],
    placed: _Placed,
    clock: _Clock,
    groups: Sequence[Group],
    enough_s: float,
    num_steps: int,
) -> _Placed:
    taken = _slots_of(placed)
    better = descend(request, every, taken, clock.makespan, groups, enough_s, num_steps)
    reason = "{} exchanged for one that loads sooner"
    return {
        rank: placed[rank]
        if slot is taken[rank]
        else _Taken(slot, reason.format(f"GPU {taken[rank].node.id}:{taken[rank].gpu.index}"))
        for rank, slot in enumerate(better)
    }


def _slots_of(placed: _Placed) -> list[Slot]:
    return [placed[rank].slot for rank in range(len(placed))]


@dataclass(frozen=True, slots=True)
class _Fit:
    """A domain that holds a gang: what is left there, and which slot each rank would take."""

    left: tuple[int, int, int]
    chosen: tuple[tuple[int, Slot], ...]


class _Attempt:
    """One pass over all gangs; ``taken`` and ``placed`` grow as gangs are placed."""

    def __init__(
        self,
        request: PlacementRequest,
        every: Sequence[Slot],
        deadline: Deadline | None = None,
        *,
        last_level: Level = Level.CLUSTER,
    ) -> None:
        self.parallel = request.parallel
        self.need = request.rank_bytes
        self.deadline = deadline
        self.last_level = last_level
        self.domains = domains(every)
        self.taken: set[int] = set()
        self.placed: _Placed = {}
        # What holds for one gang holds for all that are alike, until somebody takes a slot of the domain's node.
        self.fits: dict[object, dict[int, tuple[int, _Fit | None]]] = {}
        self.version: dict[int, int] = {}
        self._num_asked = 0

    def run(self) -> _Placed:
        """Seats by rank; ranks of gangs that nothing holds are missing."""
        for gang in self._in_decreasing_bytes(gangs(self.parallel)):
            if self.deadline is not None and len(self.placed) < self._num_asked:
                break  # a gang found no domain that is done in time
            self._num_asked += len(gang)
            # An expert-parallel stage exchanges tokens among all its ranks: keep it together if any domain can.
            whole = len(gang) > self.parallel.tp
            if self.place(gang, last_level=Level.NODE if whole else self.last_level) or not whole:
                continue
            tp = self.parallel.tp
            for part in self._in_decreasing_bytes([gang[i : i + tp] for i in range(0, len(gang), tp)]):
                self.place(part, last_level=self.last_level)
        return self.placed

    def _in_decreasing_bytes(self, gangs: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return sorted(gangs, key=lambda gang: -sum(self.need[rank] for rank in gang))

    def place(self, gang: tuple[int, ...], *, last_level: Level) -> bool:
        """Places a gang in the best domain up to a level; False where none holds it."""
        best: tuple[tuple[int, ...], Domain, _Fit] | None = None
        alone = len(gang) == 1
        near = self._neighbours(gang)
        fits = self.fits.setdefault(self._kind(gang), {})
        for position, domain in enumerate(self.domains):
            # A rank alone talks to nobody over NVLink: for it only tightness counts, whatever the domain, and every GPU
            # is in the domain of its node.
            looser = best is not None and not alone and domain.level > best[1].level
            if domain.level > last_level or looser or (alone and domain.level >= Level.RACK):
                break
            fit = self._fit(gang, position, domain, fits)
            if fit is not None:
                cost = (near.distance(domain, fit), *fit.left)
                if best is None or cost < best[0]:
                    best = (cost, domain, fit)
        if best is None:
            return False
        self._take(gang, best[1], best[2])
        return True

    def _kind(self, gang: tuple[int, ...]) -> object:
        sizes = tuple(self.need[rank] for rank in gang)
        return sizes if self.deadline is None else (sizes, self.deadline.traffic.kind(gang))

    def _fit(
        self, gang: tuple[int, ...], position: int, domain: Domain, fits: dict[int, tuple[int, _Fit | None]]
    ) -> _Fit | None:
        version = len(self.taken)
        if domain.level < Level.RACK:
            version = self.version.get(domain.slots[0].node_index, 0)
            known = fits.get(position)
            if known is not None and known[0] == version:
                fit = known[1]
                # Another gang of the same kind: the same slots, in the order of its own ranks.
                return fit and replace(fit, chosen=tuple((gang[at], slot) for at, (_, slot) in enumerate(fit.chosen)))
        free = [slot for slot in domain.slots if slot.order not in self.taken]
        chosen = self._choose(gang, free, spans_nodes=domain.level >= Level.RACK)
        fit = None
        if chosen is not None:
            left = sum(slot.gpu.free_bytes for slot in free) - sum(self.need[rank] for rank in gang)
            first = min(slot.order for slot in chosen.values())
            fit = _Fit((len(free) - len(gang), left, first), tuple((rank, chosen[rank]) for rank in gang))
        fits[position] = (version, fit)
        return fit

    def _choose(self, gang: tuple[int, ...], free: list[Slot], *, spans_nodes: bool) -> dict[int, Slot] | None:
        """The slot of each rank, or None. Largest rank first, each on the smallest GPU that holds it."""
        if len(free) < len(gang):
            return None
        ranks = sorted(gang, key=lambda rank: -self.need[rank])
        free = few_nodes(free, [self.need[rank] for rank in ranks]) if spans_nodes else list(free)
        trial = None if self.deadline is None else self.deadline.trial(gang)
        if trial is not None and not spans_nodes and not trial.allows_all(free[0]):
            return None
        allows = None if trial is None else trial.allows if spans_nodes else trial.allows_link
        chosen: dict[int, Slot] = {}
        for rank in ranks:
            fitting = [
                slot
                for slot in free
                if slot.gpu.free_bytes >= self.need[rank] and (allows is None or allows(rank, slot))
            ]
            if not fitting:
                return None
            # Over several nodes the order of the nodes counts for more than tightness within one.
            slot = fitting[0] if spans_nodes else min(fitting, key=lambda slot: slot.gpu.free_bytes)
            free.remove(slot)
            chosen[rank] = slot
            if trial is not None:
                trial.add(rank, slot)
        return self._dealt(ranks, chosen)

    def _dealt(self, ranks: Sequence[int], chosen: dict[int, Slot]) -> dict[int, Slot]:
        """Larger ranks on GPUs with more free memory; among equal ranks, rank order follows GPU order."""
        free = list(chosen.values())
        if self.deadline is None:
            free.sort(key=lambda slot: (-slot.gpu.free_bytes, slot.order))
        dealt: dict[int, Slot] = {}
        for _, equal in groupby(ranks, key=lambda rank: self.need[rank]):
            group = list(equal)
            mine, free = free[: len(group)], free[len(group) :]
            dealt |= zip(group, sorted(mine, key=lambda slot: slot.order), strict=True)
        return dealt

    def _neighbours(self, gang: tuple[int, ...]) -> _Near:
        nodes: set[int] = set()
        racks: set[str | None] = set()
        for rank in gang:
            at = self.parallel.coords(rank)
            for pp in (at.pp - 1, at.pp + 1):
                if 0 <= pp < self.parallel.pp:
                    taken = self.placed.get(self.parallel.rank(Coords(pp, at.dp, at.tp)))
                    if taken is not None:
                        nodes.add(taken.slot.node_index)
                        racks.add(taken.slot.node.rack)
        return _Near(nodes, racks - {None})

    def _take(self, gang: tuple[int, ...], domain: Domain, fit: _Fit) -> None:
        pp, dp = self.parallel.coords(gang[0]).pp, self.parallel.coords(gang[0]).dp
        who = f"{len(gang)} rank{'s' if len(gang) > 1 else ''} of stage {pp}" + (
            "" if len(gang) > self.parallel.tp else f", dp={dp}"
        )
        in_time = "" if self.deadline is None else f" of those that load within {self.deadline.seconds:.3g} s"
        why = f"{who} ({format_bytes(sum(self.need[rank] for rank in gang))}): tightest fit in {domain.label}{in_time}"
        for rank, slot in fit.chosen:
            self.placed[rank] = _Taken(slot, why)
            self.taken.add(slot.order)
            self.version[slot.node_index] = self.version.get(slot.node_index, 0) + 1
        if self.deadline is not None:
            self.deadline.take(gang, fit.chosen)


@dataclass(frozen=True, slots=True)
class _Near:
    """Where the neighbouring stages of a gang are."""

    nodes: set[int]
    racks: set[str | None]

    def distance(self, domain: Domain, fit: _Fit) -> int:
        """0 where a neighbouring stage is on the same node (or none is placed yet), 1 in its rack, else 2."""
        if not self.nodes:
            return 0
        here = [slot for _, slot in fit.chosen] if domain.level >= Level.RACK else domain.slots[:1]
        if any(slot.node_index in self.nodes for slot in here):
            return 0
        return 1 if any(slot.node.rack in self.racks for slot in here) else 2
