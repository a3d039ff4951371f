"""Best-Fit Decreasing over gangs of ranks that talk to each other, with a topology cost (docs/design/0005).

The item is a *gang*: the tp ranks of one (pp, dp), or with ep > 1 first the whole stage. The bin is a *domain*: an
NVLink group, a NUMA node, a node, or as a last resort all nodes together. Items are taken in decreasing bytes; among
the domains that hold an item the closest-knit wins, then the nearest to its neighbouring stages, then the tightest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megamind_ray.core.ids import NodeId
from megamind_ray.core.parallel import Coords, Parallel
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest, Seat
from megamind_ray.units import format_bytes

__all__ = ["BestFitDecreasing"]

_NVLINK, _NUMA, _NODE, _CLUSTER = range(4)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A GPU that may take one rank; ``order`` is its place in the topology."""

    order: int
    node: Node
    gpu: Gpu


@dataclass(frozen=True, slots=True)
class _Domain:
    """GPUs that reach each other at one level."""

    level: int
    label: str
    slots: tuple[_Slot, ...]


class BestFitDecreasing:
    """Best-Fit Decreasing with gangs."""

    name = "best_fit"

    def place(self, request: PlacementRequest) -> PlacementDecision:
        """See ``PlacementPolicy``.

        The tightest single node that holds the whole mesh is taken where there is one; no stage boundary crosses the
        network then. Otherwise gangs spread over the cluster. Where keeping gangs together leaves a rank without a
        GPU, ranks are placed one by one, which finds a placement if there is any.
        """
        nodes = sorted(request.topology.nodes, key=lambda node: sum(gpu.free_bytes for gpu in node.gpus))
        for node in nodes:
            if len(node.gpus) >= request.parallel.world:
                decision = _Attempt(replace(request, topology=replace(request.topology, nodes=(node,)))).run()
                if not decision.unplaced:
                    return decision
        decision = _Attempt(request).run()
        return decision if not decision.unplaced else _one_by_one(request)


class _Attempt:
    """One pass over all gangs; ``taken`` and ``seats`` grow as gangs are placed."""

    def __init__(self, request: PlacementRequest) -> None:
        self.parallel = request.parallel
        self.need = request.rank_bytes
        self.domains = _domains(request.topology)
        self.rack_of = {node.id: node.rack for node in request.topology.nodes}
        self.taken: set[int] = set()
        self.seats: dict[int, Seat] = {}

    def run(self) -> PlacementDecision:
        for gang in self._in_decreasing_bytes(_gangs(self.parallel)):
            # An expert-parallel stage exchanges tokens among all its ranks: keep it together if any domain can.
            whole = len(gang) > self.parallel.tp
            if self._place(gang, last_level=_NODE if whole else _CLUSTER) or not whole:
                continue
            tp = self.parallel.tp
            for part in self._in_decreasing_bytes([gang[i : i + tp] for i in range(0, len(gang), tp)]):
                self._place(part, last_level=_CLUSTER)
        return PlacementDecision(seats=tuple(self.seats.get(rank) for rank in self.parallel.ranks))

    def _in_decreasing_bytes(self, gangs: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return sorted(gangs, key=lambda gang: -sum(self.need[rank] for rank in gang))

    def _place(self, gang: tuple[int, ...], *, last_level: int) -> bool:
        best: tuple[tuple[int, ...], _Domain, tuple[_Slot, ...]] | None = None
        for domain in self.domains:
            # A rank alone talks to nobody over NVLink: for it only tightness counts, whatever the domain.
            looser = best is not None and len(gang) > 1 and domain.level > best[1].level
            if domain.level > last_level or looser:
                break
            free = [slot for slot in domain.slots if slot.order not in self.taken]
            chosen = self._choose(gang, free, spans_nodes=domain.level == _CLUSTER)
            if chosen is None:
                continue
            left = sum(slot.gpu.free_bytes for slot in free) - sum(self.need[rank] for rank in gang)
            cost = (self._distance(gang, chosen), len(free) - len(gang), left, chosen[0].order)
            if best is None or cost < best[0]:
                best = (cost, domain, chosen)
        if best is None:
            return False
        self._seat(gang, best[1], best[2])
        return True

    def _choose(self, gang: tuple[int, ...], free: list[_Slot], *, spans_nodes: bool) -> tuple[_Slot, ...] | None:
        """The slots for a gang, or None. Largest rank first, each on the smallest GPU that holds it."""
        if len(free) < len(gang):
            return None
        needs = sorted((self.need[rank] for rank in gang), reverse=True)
        free = _fewest_nodes(free, needs) if spans_nodes else list(free)
        chosen: list[_Slot] = []
        for need in needs:
            fitting = [slot for slot in free if slot.gpu.free_bytes >= need]
            if not fitting:
                return None
            # Over several nodes the order of the nodes counts for more than tightness within one.
            slot = fitting[0] if spans_nodes else min(fitting, key=lambda slot: slot.gpu.free_bytes)
            free.remove(slot)
            chosen.append(slot)
        return tuple(sorted(chosen, key=lambda slot: slot.order))

    def _distance(self, gang: tuple[int, ...], chosen: Sequence[_Slot]) -> int:
        """0 where a neighbouring stage is on the same node (or none is placed yet), 1 in its rack, else 2."""
        mine = {slot.node.id for slot in chosen}
        racks = {self.rack_of[node] for node in mine} - {None}
        near = [seat.node for rank in gang for seat in self._neighbours(self.parallel.coords(rank))]
        if not near or any(node in mine for node in near):
            return 0
        return 1 if any(self.rack_of[node] in racks for node in near) else 2

    def _neighbours(self, at: Coords) -> list[Seat]:
        stages = [pp for pp in (at.pp - 1, at.pp + 1) if 0 <= pp < self.parallel.pp]
        ranks = [self.parallel.rank(Coords(pp, at.dp, at.tp)) for pp in stages]
        return [self.seats[rank] for rank in ranks if rank in self.seats]

    def _seat(self, gang: tuple[int, ...], domain: _Domain, chosen: tuple[_Slot, ...]) -> None:
        """Larger ranks on GPUs with more free memory; among equal ranks, rank order follows GPU order."""
        ranks = sorted(gang, key=lambda rank: -self.need[rank])
        slots = sorted(chosen, key=lambda slot: -slot.gpu.free_bytes)
        pp, dp = self.parallel.coords(gang[0]).pp, self.parallel.coords(gang[0]).dp
        who = f"{len(gang)} rank{'s' if len(gang) > 1 else ''} of stage {pp}" + (
            "" if len(gang) > self.parallel.tp else f", dp={dp}"
        )
        why = f"{who} ({format_bytes(sum(self.need[rank] for rank in gang))}): tightest fit in {domain.label}"
        for _, equal in groupby(ranks, key=lambda rank: self.need[rank]):
            group = list(equal)
            for rank, slot in zip(group, sorted(slots[: len(group)], key=lambda slot: slot.order), strict=True):
                left = format_bytes(slot.gpu.free_bytes - self.need[rank])
                self.seats[rank] = Seat(node=slot.node.id, gpu=slot.gpu.index, reason=f"{why}; {left} stays free")
                self.taken.add(slot.order)
            slots = slots[len(group) :]


def _one_by_one(request: PlacementRequest) -> PlacementDecision:
    """Largest rank first, each on the smallest free GPU that holds it: complete whenever any placement is."""
    free = [(node.id, gpu) for node in request.topology.nodes for gpu in node.gpus]
    seats: dict[int, Seat] = {}
    for rank in sorted(request.parallel.ranks, key=lambda rank: -request.rank_bytes[rank]):
        fitting = [item for item in free if item[1].free_bytes >= request.rank_bytes[rank]]
        if fitting:
            best = min(fitting, key=lambda item: item[1].free_bytes)
            free.remove(best)
            reason = "smallest GPU that holds it; no placement that keeps gangs together fits"
            seats[rank] = Seat(node=best[0], gpu=best[1].index, reason=reason)
    return PlacementDecision(seats=tuple(seats.get(rank) for rank in request.parallel.ranks))


def _gangs(parallel: Parallel) -> list[tuple[int, ...]]:
    size = parallel.dp * parallel.tp if parallel.ep > 1 else parallel.tp
    return [tuple(range(first, first + size)) for first in range(0, parallel.world, size)]


def _domains(topology: Topology) -> list[_Domain]:
    """All domains, closest-knit first, in topology order within a level."""
    slots: list[_Slot] = []
    for node in topology.nodes:
        for gpu in sorted(node.gpus, key=lambda gpu: gpu.index):
            slots.append(_Slot(len(slots), node, gpu))
    found: dict[tuple[int, NodeId, int | None], list[_Slot]] = {}
    for slot in slots:
        if slot.gpu.nvlink_group is not None:
            found.setdefault((_NVLINK, slot.node.id, slot.gpu.nvlink_group), []).append(slot)
        if slot.gpu.numa is not None:
            found.setdefault((_NUMA, slot.node.id, slot.gpu.numa), []).append(slot)
        found.setdefault((_NODE, slot.node.id, None), []).append(slot)
    labels = {_NVLINK: "NVLink group {} of node {}", _NUMA: "NUMA node {} of node {}", _NODE: "node {1}"}
    domains = [
        _Domain(level, labels[level].format(part, node), tuple(members))
        for (level, node, part), members in found.items()
    ]
    domains.append(_Domain(_CLUSTER, "several nodes (no single node holds the whole gang)", tuple(slots)))
    return sorted(domains, key=lambda domain: domain.level)


def _fewest_nodes(free: Sequence[_Slot], needs: Sequence[int]) -> list[_Slot]:
    """Free slots in an order that touches few nodes when they are taken from the front.

    Nodes with most useful GPUs come first, but the last one needed is the one with the fewest that are enough.
    """
    by_node: dict[NodeId, list[_Slot]] = {}
    for slot in free:
        by_node.setdefault(slot.node.id, []).append(slot)
    useful = {node: sum(slot.gpu.free_bytes >= needs[-1] for slot in slots) for node, slots in by_node.items()}
    order: list[_Slot] = []
    missing = len(needs)
    while by_node:
        enough = [node for node in by_node if useful[node] >= missing > 0]
        node = min(enough, key=useful.__getitem__) if enough else max(by_node, key=useful.__getitem__)
        missing -= useful[node]
        order += by_node.pop(node)
    return order
