"""Seconds that no placement beats: what must be true of any placement that is done by a deadline, however it is found.

An *item* is ranks that stay on one node. By a deadline a node can hold so many items: as its GPUs have room and links
fast enough, as its switches let through, as its disks can read what only they need and its network can bring the rest.
If all nodes together hold fewer items than there are, or read less than all bytes, the deadline cannot be kept. Items
differ, so the question is asked for the k largest, each taken as the smallest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megamind_ray.core.demands import Int64Array
from megamind_ray.policies.costs import Float64Array, TransferCosts, TransferLoad, sums
from megamind_ray.policies.placement.base import PlacementRequest
from megamind_ray.policies.placement.domains import Level, Slot, slots
from megamind_ray.policies.placement.locality import Group

__all__ = ["least_seconds"]

_PRECISION = 1e-4
_MAX_CUTS = 6
# For what is counted in floating point: 2.9999999 items are 3.
_ROUNDING = 1e-6
_FOREVER = 1e15
_Mask = npt.NDArray[np.bool_]


def least_seconds(
    request: PlacementRequest, groups: Sequence[Group] = (), *, costs: TransferCosts | None = None
) -> float:
    """A lower bound on the busiest resource's seconds over all placements that keep the groups, and all readers.

    Args:
        request: Mesh, hardware, costs and load.
        groups: What stays together; without any, ranks may go anywhere.
        costs: In place of the request's, for example those of some resources alone.

    Returns:
        Seconds; infinite where the mesh does not fit.
    """
    assert request.load is not None
    chosen = request.costs if costs is None else costs
    assert chosen is not None
    ranks = [Group((rank,), Level.NODE, 1) for rank in request.parallel.ranks]
    # Of groups within groups, the inner ones say more about links and the outer ones more about nodes.
    sizes = sorted({len(group.ranks) for group in groups if len(group.ranks) > 1})
    questions = [(ranks, _num_nodes(request, groups)), *(_items(request, groups, size) for size in sizes)]
    return max(_Relaxation(request, chosen, items, num_nodes).least_seconds() for items, num_nodes in questions)


def _items(request: PlacementRequest, groups: Sequence[Group], size: int) -> tuple[list[Group], int]:
    """The groups of a size that stay on one node with the ranks outside of them, and how many nodes there may be."""
    found = [group for group in groups if len(group.ranks) == size and group.num_nodes == 1]
    inside = {rank for group in found for rank in group.ranks}
    outside = [Group((rank,), Level.NODE, 1) for rank in request.parallel.ranks if rank not in inside]
    return [*found, *outside], _num_nodes(request, groups)


def _num_nodes(request: PlacementRequest, groups: Sequence[Group]) -> int:
    """How many nodes all groups together may lie on at most."""
    total, left = 0, set(request.parallel.ranks)
    for group in sorted(groups, key=lambda group: group.num_nodes / len(group.ranks)):
        if left.issuperset(group.ranks):
            total += group.num_nodes
            left.difference_update(group.ranks)
    return total + len(left)


@dataclass(frozen=True, slots=True)
class _Floor:
    """What each of ``count`` items has at least.

    Attributes:
        count: Items.
        size: Ranks of an item.
        need: Device memory of a rank.
        rank_bytes: Bytes to the device of a rank.
        copied: Bytes to all devices of an item.
        alone: Bytes read for nobody else.
        packed: Those of ``alone`` that pass the pool.
        inflow: Bytes that come to its node, read there or taken in.
        shared: Those of an item's ``inflow`` that are not its ``alone``.
        spread: By how many items each byte is shared that is not ``alone``; on fewer, it has to leave the node.
        common: Those of them that are shared by the same items, the most there are of such.
        level: How far apart its ranks may be.
    """

    count: int
    size: int
    need: int
    rank_bytes: float
    copied: float
    alone: float
    packed: float
    inflow: float
    shared: float
    spread: int
    common: float
    level: Level


class _Relaxation:
    def __init__(self, request: PlacementRequest, costs: TransferCosts, items: Sequence[Group], num_nodes: int) -> None:
        load = request.load
        assert load is not None
        self._costs = costs
        self._num_nodes = num_nodes
        self._hardware = _Hardware.of(request, costs)
        self._facts = _Facts.of(load, request, items)
        self._floors = self._facts.floors(items)
        self._work = (float(load.class_bytes.sum()), self._facts.packed_total, float(self._facts.copied.sum()))
        self._strided = self._facts.strided_total

    def least_seconds(self) -> float:
        late = 1e-6
        while not self._is_possible(late):
            late *= 4
            if late > _FOREVER:
                return float("inf")
        early = late / 4
        while late - early > _PRECISION * late:
            middle = (early + late) / 2
            early, late = (early, middle) if self._is_possible(middle) else (middle, late)
        return early

    def _is_possible(self, deadline_s: float) -> bool:
        room = np.zeros(0)
        most = self._held(self._floors[-1], deadline_s)
        for floor in self._floors:
            room = self._room(floor, deadline_s, most)
            if np.sort(room)[::-1][: self._num_nodes].sum() < floor.count:
                return False
        # The last floor is that of all items: nodes without room for it hold none.
        return self._can_read(deadline_s, room > 0) and self._can_work(deadline_s, room)

    def _held(self, floor: _Floor, deadline_s: float) -> Float64Array:
        """By node, for how many items it has GPUs, and time for what is their own."""
        costs, hardware = self._costs, self._hardware
        usable = (hardware.free >= floor.need) & (floor.rank_bytes * costs.device <= deadline_s)
        room = hardware.seats(usable, floor, deadline_s, costs)
        once = (floor.inflow - floor.alone) * np.minimum(costs.read, costs.take)
        each = floor.alone * costs.read + floor.packed * costs.pack + floor.copied * hardware.copy
        least: Float64Array = np.minimum(room, _whole(_ratio(deadline_s - once, each)).min(axis=1))
        return least

    def _room(self, floor: _Floor, deadline_s: float, most: Float64Array) -> Float64Array:
        """By node, how many items it holds, where it holds at most ``most`` of any kind."""
        costs, room = self._costs, self._held(floor, deadline_s)
        read, take, send = (_ratio(deadline_s, cost).min(axis=1) for cost in (costs.read, costs.take, costs.send))
        # What a node reads of shared bytes it sends on, unless it holds all that want them, which may be smaller items.
        sent = np.where(most < floor.spread, send, np.inf)
        wanted = (floor.inflow - floor.alone) * (1 - _ROUNDING)
        room = np.minimum(room, _whole(_ratio(read - np.maximum(wanted - take, 0.0), floor.alone)))
        room = np.where(np.minimum(read, sent) + take < floor.shared * (1 - _ROUNDING), 0.0, room)
        # Either all that want a byte are here and it is read here, or it is taken in, or read and sent on.
        both = np.maximum(read, np.minimum(read, send) + take)
        return np.maximum(np.where(both < floor.common * (1 - _ROUNDING), 0.0, room), 0.0)

    def _can_read(self, deadline_s: float, holds: _Mask) -> bool:
        """Whether the best nodes read all bytes, no more nodes than there may be."""
        costs = self._costs
        read = np.where(holds, _ratio(deadline_s, costs.read).min(axis=1), 0.0)
        local = costs.storage == 0
        best = np.sort(read)[::-1][: self._num_nodes].sum()
        slowest = float(costs.storage.max(initial=0.0))
        from_storage = float(_ratio(deadline_s, np.float64(slowest))) if (holds & ~local).any() else 0.0
        return bool(min(best, read[local].sum() + from_storage) >= self._work[0] * (1 - _ROUNDING))

    def _can_work(self, deadline_s: float, room: Float64Array) -> bool:
        """Whether the best nodes do all reading, packing, copying and sending with each kind of their resources.

        A node that takes at least ``u`` times as long for each of them as the fastest gives ``1 / u`` of its time.
        """
        costs, holds = self._costs, room > 0
        taken = self._facts.taken(room)
        cut = np.zeros_like(costs.read) if costs.cut is None else costs.cut
        amounts = (*self._work, taken, taken, self._strided)
        for kind in range(costs.read.shape[1]):
            steps = (costs.read, costs.pack, self._hardware.copy, costs.take, costs.send, cut)
            columns = [step[holds, kind] for step in steps]
            work = [(amount, column) for amount, column in zip(amounts, columns, strict=True) if amount > 0]
            # What some node does for nothing may all be done there.
            work = [(amount, column) for amount, column in work if len(column) and column.min() > 0]
            if work:
                slower = np.min([column / column.min() for _, column in work], axis=0)
                given_s = float(np.sort(1 / slower)[::-1][: self._num_nodes].sum()) * deadline_s
                if given_s < sum(amount * float(column.min()) for amount, column in work) * (1 - _ROUNDING):
                    return False
        return True


@dataclass(frozen=True, slots=True)
class _Hardware:
    """What GPUs a deadline leaves: free memory, groups, switches, and the cheapest copy of each node."""

    free: Float64Array
    closer: Mapping[Level, tuple[Int64Array, Int64Array]]
    node_of_switch: Int64Array
    copy: Float64Array

    @classmethod
    def of(cls, request: PlacementRequest, costs: TransferCosts) -> _Hardware:
        every = slots(request.topology)
        switched = costs.gpu_switch >= 0
        node_of_switch = np.zeros(len(costs.switch), np.int64)
        node_of_switch[costs.gpu_switch[switched]] = costs.gpu_node[switched]
        copy = np.full_like(costs.read, np.inf)
        np.minimum.at(copy, costs.gpu_node, costs.copy)
        return cls(
            free=np.array([slot.gpu.free_bytes for slot in every], np.float64),
            closer={
                Level.NVLINK: _numbered(every, [slot.gpu.nvlink_group for slot in every]),
                Level.NUMA: _numbered(every, [slot.gpu.numa for slot in every]),
            },
            node_of_switch=node_of_switch,
            copy=np.where(np.isinf(copy), 0.0, copy),
        )

    def seats(self, usable: _Mask, floor: _Floor, deadline_s: float, costs: TransferCosts) -> Float64Array:
        """By node, for how many items it has GPUs, and switches that are done in time."""
        num_nodes = len(costs.read)
        room = np.bincount(costs.gpu_node[usable], minlength=num_nodes) // floor.size
        if floor.level < Level.NODE:
            whole = np.zeros(num_nodes)
            for level, (number, node) in self.closer.items():
                if level <= floor.level:
                    inside = np.bincount(number[usable & (number >= 0)], minlength=len(node))
                    whole += sums(node, inside // floor.size, num_nodes)
            room = np.minimum(room, whole.astype(np.int64))
        switched = costs.gpu_switch >= 0
        behind = np.bincount(costs.gpu_switch[usable & switched], minlength=len(costs.switch))
        through = np.minimum(behind, _whole(_ratio(deadline_s, floor.rank_bytes * costs.switch)))
        ranks = np.bincount(costs.gpu_node[usable & ~switched], minlength=num_nodes).astype(np.float64)
        ranks += sums(self.node_of_switch, through, num_nodes)
        return np.minimum(room, np.floor(ranks / floor.size))


@dataclass(frozen=True, slots=True)
class _Facts:
    """By item: see ``_Floor``."""

    need: Int64Array
    rank_bytes: Float64Array
    copied: Float64Array
    alone: Float64Array
    packed: Float64Array
    inflow: Float64Array
    spread: Int64Array
    common: Float64Array
    packed_total: float
    strided_total: float
    shared_by: Int64Array
    shared_need: Float64Array
    shared_bytes: Float64Array

    @classmethod
    def of(cls, load: TransferLoad, request: PlacementRequest, items: Sequence[Group]) -> _Facts:
        num, world = len(items), request.parallel.world
        item_of = np.zeros(world, np.int64)
        for index, item in enumerate(items):
            item_of[list(item.ranks)] = index
        part, rank = load.members()
        to_device = sums(rank, load.part_bytes[part], world)
        direct = load.is_direct(part, rank)
        # A part comes to an item once, however many of its ranks want it.
        wanted, by = np.divmod(np.unique(part * num + item_of[rank]), num)
        home = np.unique(load.part_class[wanted] * num + by)
        owner, reader = np.divmod(home, num)
        alone = np.bincount(owner, minlength=len(load.class_bytes))[owner] == 1
        owner, reader = owner[alone], reader[alone]
        pooled = load.class_bytes * ~direct
        return cls(
            need=np.array([min(request.rank_bytes[rank] for rank in item.ranks) for item in items], np.int64),
            rank_bytes=np.array([to_device[list(item.ranks)].min() for item in items]),
            copied=sums(item_of, to_device, num),
            alone=sums(reader, load.class_bytes[owner], num),
            packed=sums(reader, pooled[owner], num),
            inflow=sums(by, load.part_bytes[wanted], num),
            **_sharing(load, wanted, by, num),
            packed_total=float(pooled.sum()),
            strided_total=0.0 if load.strided_bytes is None else float((load.strided_bytes * ~direct).sum()),
            **_shared(load, wanted, by),
        )

    def taken(self, room: Float64Array) -> float:
        """Bytes that cross between nodes: each class comes to as many nodes as its items need, and is read on one."""
        most = np.cumsum(np.sort(room)[::-1])
        num_nodes = np.searchsorted(most, self.shared_by) + 1
        return float(np.maximum(num_nodes * self.shared_need - self.shared_bytes, 0.0).sum())

    def floors(self, items: Sequence[Group]) -> list[_Floor]:
        """The k largest items, for some k and each order of size; all of them last."""
        found: dict[_Floor, None] = {}
        level = np.array([group.level for group in items])
        for some in [*(np.flatnonzero(level == value) for value in np.unique(level)), np.arange(len(items))]:
            for size in (self.alone, self.rank_bytes, self.inflow, self.need):
                order = some[np.argsort(-size[some], kind="stable")]
                # Cuts where the size changes say most; few of them say nearly as much.
                ends = np.append(np.flatnonzero(np.diff(size[order]) != 0) + 1, len(order))
                picked = np.unique(np.linspace(0, len(ends) - 1, min(_MAX_CUTS, len(ends))).astype(np.int64))
                for end in ends[picked].tolist():
                    found[self._floor(items, order[:end])] = None
        return [*found, self._floor(items, np.arange(len(items)))]

    def _floor(self, items: Sequence[Group], chosen: Int64Array) -> _Floor:
        groups = [items[index] for index in chosen.tolist()]
        size = min(len(group.ranks) for group in groups)
        return _Floor(
            count=len(groups),
            size=size,
            need=int(self.need[chosen].min()),
            rank_bytes=float(self.rank_bytes[chosen].min()),
            copied=float(self.copied[chosen].min()),
            alone=float(self.alone[chosen].min()),
            packed=float(self.packed[chosen].min()),
            inflow=float(np.maximum(self.inflow, self.alone)[chosen].min()),
            shared=float(np.maximum(self.inflow - self.alone, 0.0)[chosen].min()),
            spread=int(self.spread[chosen].min()),
            common=float(self.common[chosen].min()),
            level=max(group.level for group in groups) if size > 1 else Level.NODE,
        )


def _sharing(load: TransferLoad, wanted: Int64Array, item: Int64Array, num: int) -> dict[str, Any]:
    """``spread`` and ``common`` by item; the columns are a part and an item that wants it, all such pairs."""
    keys, index = np.unique(load.part_class[wanted] * num + item, return_inverse=True)
    needed = sums(index, load.part_bytes[wanted], len(keys))
    owner, of = np.divmod(keys, num)
    sharers = np.bincount(owner, minlength=len(load.class_bytes))[owner]
    spread = np.full(num, num, np.int64)
    np.minimum.at(spread, of[sharers > 1], sharers[sharers > 1])
    first = [*np.flatnonzero(np.diff(owner, prepend=-1)).tolist(), len(owner)]
    together: dict[bytes, Float64Array] = {}
    for begin, end in pairwise(first):
        if end - begin > 1:
            key = of[begin:end].tobytes()
            before = together.get(key)
            together[key] = needed[begin:end] if before is None else before + needed[begin:end]
    common = np.zeros(num)
    for key, nbytes in together.items():
        sharing = np.frombuffer(key, np.int64)
        common[sharing] = np.maximum(common[sharing], nbytes)
    return {"spread": spread, "common": common}


def _shared(load: TransferLoad, wanted: Int64Array, item: Int64Array) -> dict[str, Any]:
    """Classes that several items need, alike ones together: by how many, what each needs at least, distinct bytes.

    Args:
        load: The load.
        wanted: A part, and
        item: an item that wants it; all such pairs.
    """
    width = int(item.max(initial=0)) + 1
    keys, index = np.unique(load.part_class[wanted] * width + item, return_inverse=True)
    needed = sums(index, load.part_bytes[wanted], len(keys))
    owner = keys // width
    num = np.bincount(owner, minlength=len(load.class_bytes))
    least = np.full(len(load.class_bytes), np.inf)
    np.minimum.at(least, owner, needed)
    several = np.flatnonzero(num > 1)
    return {
        "shared_by": num[several].astype(np.int64),
        "shared_need": least[several],
        "shared_bytes": load.class_bytes[several],
    }


def _numbered(every: Sequence[Slot], names: Sequence[int | None]) -> tuple[Int64Array, Int64Array]:
    """By slot the number of its group, -1 for none; by group its node."""
    numbers: dict[tuple[int, int], int] = {}
    number = [
        -1 if name is None else numbers.setdefault((slot.node_index, name), len(numbers))
        for slot, name in zip(every, names, strict=True)
    ]
    return np.array(number, np.int64), np.array([node for node, _ in numbers], np.int64)


def _ratio(amount: float | Float64Array, unit: float | Float64Array) -> Float64Array:
    """How many units an amount is; of what takes nothing there is no end, once something is left."""
    top, bottom = np.broadcast_arrays(np.asarray(amount, np.float64), np.asarray(unit, np.float64))
    free = np.where(top >= 0, np.inf, -np.inf)
    np.divide(top, bottom, out=free, where=bottom > 0)
    return free


def _whole(values: Float64Array) -> Float64Array:
    return np.floor(values + _ROUNDING)
