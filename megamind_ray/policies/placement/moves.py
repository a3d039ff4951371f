"""Placements that are one change away from another: gangs moved and exchanged, alone and with their copies; ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, zip_longest

import numpy as np

from megamind_ray.core.ids import NodeId
from megamind_ray.policies.placement.base import PlacementRequest
from megamind_ray.policies.placement.domains import Level, Slot
from megamind_ray.policies.placement.item_bytes import ItemBytes
from megamind_ray.policies.placement.locality import Group
from megamind_ray.policies.placement.makespan import Strain

__all__ = ["Moves"]

Taken = Sequence[Slot]
_Gang = tuple[int, ...]
# Sets of nodes over which a gang that no node holds may be moved.
_MAX_SPREADS = 500


class Moves:
    """Changes to placements of one request.

    Args:
        request: The question; with its load.
        every: Slots that may be taken.
        groups: What stays together.
    """

    def __init__(self, request: PlacementRequest, every: Sequence[Slot], groups: Sequence[Group]) -> None:
        assert request.load is not None
        tp, self._need = request.parallel.tp, request.rank_bytes
        self._every = every
        self._gangs: list[_Gang] = [tuple(range(first, first + tp)) for first in range(0, request.parallel.world, tp)]
        self._width = {group.ranks: group.num_nodes for group in groups}
        load = ItemBytes.of(request.load, request, [Group(gang, Level.NODE, 1) for gang in self._gangs])
        # Gangs that may change places without any effect: copies of a stage.
        kinds: dict[Hashable, int] = {}
        self._kind = [
            kinds.setdefault((load.needs[index].tobytes(), tuple(self._need[rank] for rank in gang)), len(kinds))
            for index, gang in enumerate(self._gangs)
        ]
        places: dict[Hashable, int] = {}
        self._place = {
            slot.order: places.setdefault((slot.node_index, replace(slot.gpu, index=0), _switch(slot)), len(places))
            for slot in every
        }
        hardware: dict[Hashable, int] = {}
        self._hardware = {
            slot.node_index: hardware.setdefault(replace(slot.node, id=NodeId(""), address=""), len(hardware))
            for slot in every
        }

    def key(self, taken: Taken) -> Hashable:
        """Equal for placements that differ in nothing but which of several alike is where."""
        found = sorted(
            (kind, tuple(self._place[taken[rank].order] for rank in gang))
            for kind, gang in zip(self._kind, self._gangs, strict=True)
        )
        return tuple(found)

    def of(self, taken: Taken, strain: Strain) -> Iterator[list[Slot]]:
        """Placements that take something from the busiest nodes, or anything from anywhere if it is no node's own."""
        used = {slot.order for slot in taken}
        free = [slot for slot in self._every if slot.order not in used]
        if not strain.hot:
            yield from self._from(taken, free, strain, {slot.node_index for slot in taken})
        for node in sorted(strain.hot, key=lambda node: (-float(strain.nodes[node]), node)):
            yield from self._from(taken, free, strain, {node})

    def _from(self, taken: Taken, free: Sequence[Slot], strain: Strain, hot: Collection[int]) -> Iterator[list[Slot]]:
        """Those that change something on some nodes."""
        here = [any(taken[rank].node_index in hot for rank in gang) for gang in self._gangs]
        # A link or switch that is busier than its node is relieved by a rank.
        if strain.hot and all(strain.nodes[node] < strain.seconds for node in hot):
            yield from self._of_ranks(taken, free, hot, here)
        for gang, is_hot in zip(self._gangs, here, strict=True):
            if is_hot:
                yield from self._elsewhere(taken, gang, free, strain)
                for partner in self._gangs:
                    if partner is not gang:
                        yield self._exchanged(taken, gang, partner)
        # What a node shares with another it need not, once the other's copies are there or elsewhere.
        shared = {kind for kind, is_hot in zip(self._kind, here, strict=True) if is_hot}
        for kind, gang, is_hot in zip(self._kind, self._gangs, here, strict=True):
            if kind in shared and not is_hot:
                yield from self._elsewhere(taken, gang, free, strain)
        yield from self._blocks(taken, free, strain, hot)
        yield from self._of_ranks(taken, free, hot, here)

    def _of_ranks(
        self, taken: Taken, free: Sequence[Slot], hot: Collection[int], here: Sequence[bool]
    ) -> Iterator[list[Slot]]:
        for gang, is_hot in zip(self._gangs, here, strict=True):
            if is_hot:
                yield from self._ranks(taken, gang, free, hot)

    def _elsewhere(self, taken: Taken, gang: _Gang, free: Sequence[Slot], strain: Strain) -> Iterator[list[Slot]]:
        """The gang on another node's free slots, on other ones of its own node; or over nodes of another rack."""
        by_place: dict[tuple[int, int | None], list[Slot]] = defaultdict(list)
        by_node: dict[int, list[Slot]] = defaultdict(list)
        mine = [taken[rank] for rank in gang]
        for slot in [*mine, *free]:
            by_place[slot.node_index, slot.gpu.nvlink_group].append(slot)
            by_node[slot.node_index].append(slot)
        apart = _spread(by_node, len(gang), self._width.get(gang, 1))
        near = [*by_place.values(), *by_node.values()]
        near = [slots for slots in near if len(slots) >= len(gang)]
        near.sort(key=lambda slots: float(strain.nodes[slots[0].node_index]))
        full = {slot.node_index for slot in taken}
        seen: set[Hashable] = set()
        for slots in near:
            if slots[0].node_index not in full:  # of empty nodes that are alike, one
                kind = (self._hardware[slots[0].node_index], slots[0].gpu.nvlink_group, len(slots))
                if kind in seen:
                    continue
                seen.add(kind)
            yield self._onto(taken, [gang], slots)
        for slots in apart:
            yield self._onto(taken, [gang], slots)

    def _blocks(self, taken: Taken, free: Sequence[Slot], strain: Strain, hot: Collection[int]) -> Iterator[list[Slot]]:
        """All copies of a stage that are on a node on another one, or exchanged for as many copies of another stage."""
        blocks: dict[tuple[int, int], list[_Gang]] = defaultdict(list)
        for kind, gang in zip(self._kind, self._gangs, strict=True):
            nodes = {taken[rank].node_index for rank in gang}
            if len(nodes) == 1:
                blocks[kind, nodes.pop()].append(gang)
        by_node: dict[int, list[Slot]] = defaultdict(list)
        for slot in free:
            by_node[slot.node_index].append(slot)
        targets = sorted(by_node, key=lambda node: float(strain.nodes[node]))
        for (kind, node), gangs in blocks.items():
            if node not in hot:
                continue
            for target in targets:
                most = min(len(gangs), len(by_node[target]) // len(gangs[0]))
                if target != node:
                    for num in range(most, 1, -1):
                        yield self._onto(taken, gangs[:num], by_node[target])
            for (other, place), partners in blocks.items():
                if place != node and other != kind:
                    for num in range(min(len(gangs), len(partners)), 1, -1):
                        yield self._exchanged(taken, _joined(gangs[:num]), _joined(partners[:num]))

    def _ranks(self, taken: Taken, gang: _Gang, free: Sequence[Slot], hot: Collection[int]) -> Iterator[list[Slot]]:
        """A rank on another GPU, or exchanged with one that is larger or smaller."""
        nodes = {taken[rank].node_index for rank in gang}
        stays = len(gang) > 1 and len(nodes) == 1
        for rank in gang:
            if taken[rank].node_index not in hot:
                continue
            seen: set[int] = set()
            for slot in free:
                place = self._place[slot.order]
                if place not in seen and not (stays and slot.node_index not in nodes):
                    seen.add(place)
                    moved = list(taken)
                    moved[rank] = slot
                    yield moved
            for other in range(len(taken) if len(gang) > 1 else 0):
                # Equal ranks of a gang over several nodes share bytes with some more than with others.
                differs = self._need[other] != self._need[rank] or (other in gang and not stays)
                if differs and not (stays and taken[other].node_index not in nodes):
                    yield self._exchanged(taken, (rank,), (other,))

    def _onto(self, taken: Taken, gangs: Sequence[_Gang], slots: Sequence[Slot]) -> list[Slot]:
        """Gangs on some slots: roomy GPUs for whoever was on a roomy one before."""
        ranks = sorted(_joined(gangs), key=lambda rank: (-self._need[rank], -taken[rank].gpu.free_bytes))
        roomy = sorted(slots, key=lambda slot: -slot.gpu.free_bytes)[: len(ranks)]
        moved = list(taken)
        for rank, slot in zip(ranks, roomy, strict=True):
            moved[rank] = slot
        return moved

    def _exchanged(self, taken: Taken, some: _Gang, others: _Gang) -> list[Slot]:
        """Two gangs of as many ranks in each other's places, the largest ranks on the roomiest GPUs."""
        moved = list(taken)
        for ranks, places in ((some, others), (others, some)):
            roomy = sorted((taken[rank] for rank in places), key=lambda slot: (-slot.gpu.free_bytes, slot.order))
            for rank, slot in zip(sorted(ranks, key=lambda rank: -self._need[rank]), roomy, strict=True):
                moved[rank] = slot
        return moved


def _spread(by_node: Mapping[int, Sequence[Slot]], size: int, num_nodes: int) -> Iterator[list[Slot]]:
    """As many free slots on each of some nodes, as nearly as can be; those with fewer give all they have."""
    nodes = [sorted(slots, key=lambda slot: -slot.gpu.free_bytes) for slots in by_node.values()]
    if num_nodes < 2:
        return  # it stays on a node
    for chosen in islice(combinations(nodes, num_nodes), _MAX_SPREADS):
        if sum(map(len, chosen)) >= size:
            rounds = zip_longest(*chosen)
            yield [slot for row in rounds for slot in row if slot is not None][:size]


def _joined(gangs: Sequence[_Gang]) -> _Gang:
    return tuple(np.concatenate([np.array(gang, np.int64) for gang in gangs]).tolist())


def _switch(slot: Slot) -> tuple[int, ...]:
    return next((item.gpus for item in slot.node.switches if slot.gpu.index in item.gpus), ())
