"""For which ranks a node has GPUs that are done with them by a deadline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megamind_ray.policies.costs import Float64Array, TransferCosts
from megamind_ray.policies.placement.base import PlacementRequest
from megamind_ray.policies.placement.domains import Level, Slot, slots
from megamind_ray.policies.placement.locality import Group

__all__ = ["Rooms", "cheapest_copies"]

_ROUNDING = 1e-6


class Rooms:
    """What GPUs there are for items in time.

    Attributes:
        kind: By node, equal for nodes that are alike in all that is looked at.
    """

    def __init__(
        self,
        request: PlacementRequest,
        costs: TransferCosts,
        rank_bytes: Float64Array,
        items: Sequence[Group],
        late_s: float,
        *,
        by_rack: bool,
    ) -> None:
        self._items = items
        self._by_rack = by_rack
        self._sizes = [len(item.ranks) for item in items]
        every = slots(request.topology)
        self._shape = [
            (min(request.rank_bytes[rank] for rank in item.ranks), float(rank_bytes[index]))
            for index, item in enumerate(items)
        ]
        num_nodes = len(costs.read)
        self._seats = {
            shape: [_seats(every, costs, node, *shape, late_s) for node in range(num_nodes)]
            for shape in set(self._shape)
        }
        self._whole = {
            (shape, item.level, len(item.ranks)): [
                _whole(every, costs, node, *shape, late_s, item.level, len(item.ranks)) for node in range(num_nodes)
            ]
            for shape, item in zip(self._shape, items, strict=True)
        }
        self.kind = [self._kind(costs, node) for node in range(num_nodes)]

    def _kind(self, costs: TransferCosts, node: int) -> object:
        rows = (costs.read, costs.pack, costs.send, costs.take, cheapest_copies(costs))
        racks = costs.rack[node] if self._by_rack else 0
        rooms = (*(seats[node] for seats in self._seats.values()), *(whole[node] for whole in self._whole.values()))
        return (*(row[node].tobytes() for row in rows), costs.crosses[node], costs.storage[node], int(racks), rooms)

    def holds(self, node: int, here: Sequence[int]) -> bool:
        """Whether the node has GPUs for all items that are on it."""
        for shape, seats in self._seats.items():
            need, rank_bytes = shape
            larger = [self._shape[item][0] >= need and self._shape[item][1] >= rank_bytes for item in here]
            ranks = sum(self._sizes[item] for item, counts in zip(here, larger, strict=True) if counts)
            if ranks > seats[node]:
                return False
        for (shape, level, size), whole in self._whole.items():
            count = sum(
                self._sizes[item] == size and self._items[item].level <= level and self._shape[item] == shape
                for item in here
            )
            if count > whole[node]:
                return False
        return True


def _seats(every: Sequence[Slot], costs: TransferCosts, node: int, need: int, rank_bytes: float, late_s: float) -> int:
    """GPUs of a node that hold a rank and are done with it, as many behind a switch as that lets through."""
    free, behind = 0, dict[int, int]()
    for slot in every:
        if slot.node_index == node and _is_usable(slot, costs, need, rank_bytes, late_s):
            switch = int(costs.gpu_switch[slot.order])
            if switch < 0:
                free += 1
            else:
                behind[switch] = behind.get(switch, 0) + 1
    for switch, count in behind.items():
        each_s = rank_bytes * float(costs.switch[switch])
        free += min(count, int(late_s / each_s + _ROUNDING)) if each_s > 0 else count
    return free


def _whole(
    every: Sequence[Slot],
    costs: TransferCosts,
    node: int,
    need: int,
    rank_bytes: float,
    late_s: float,
    level: Level,
    size: int,
) -> int:
    """How many items of a size fit the domains of a node that are close enough for them."""
    usable = [slot for slot in every if slot.node_index == node and _is_usable(slot, costs, need, rank_bytes, late_s)]
    if level >= Level.NODE or size == 1:
        return len(usable) // size
    inside: dict[tuple[Level, int], int] = {}
    for slot in usable:
        for at, name in ((Level.NVLINK, slot.gpu.nvlink_group), (Level.NUMA, slot.gpu.numa)):
            if at <= level and name is not None:
                inside[at, name] = inside.get((at, name), 0) + 1
    return min(len(usable) // size, sum(count // size for count in inside.values()))


def _is_usable(slot: Slot, costs: TransferCosts, need: int, rank_bytes: float, late_s: float) -> bool:
    return slot.gpu.free_bytes >= need and rank_bytes * float(costs.device[slot.order]) <= late_s


def cheapest_copies(costs: TransferCosts) -> Float64Array:
    """``[node, kind]``, a byte copied into the GPU for which that takes least."""
    copy = np.full_like(costs.read, np.inf)
    np.minimum.at(copy, costs.gpu_node, costs.copy)
    return np.where(np.isinf(copy), 0.0, copy)
