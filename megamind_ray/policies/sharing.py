"""Sharing out what several nodes need over those that could read it, so that the busiest resource is done early.

A *class* is bytes that one set of nodes needs, each of them all or a part. Whichever member reads a byte sends it to
the next one on each side of it, and those on to the next, along a line (docs/design/0024). A member at an end sends
what it reads once and passes nothing on; one in the middle sends what it reads twice, and passes on what others read.
The same holds for racks and their uplinks, which carry what is read from storage outside of a rack, too (0025). A byte
that a member reads is one that it does not take in. For one class and a
deadline the bytes that a member may read are therefore an interval: at most what its disks, processors and outgoing
links can do by then, at least what its incoming links cannot; racks add intervals over their members. The smallest
deadline for which the intervals leave room for all bytes is found by bisection. Several classes are shared out one
after the other, smaller sets first because they have less choice, and each again against the rest until nothing
improves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megamind_ray.core.demands import Int64Array
from megamind_ray.policies.costs import Float64Array, TransferCosts, sums

__all__ = ["Busy", "NodeClass", "can_share", "share_out"]

# How near to the smallest deadline bisection comes.
_PRECISION = 1e-8
_SLACK = 1e-12
_SWEEPS = 4
# An improvement of the busiest resource that is worth another sweep.
_WORTH = 1e-3
# Stands for "no limit" in sums and products, where an infinity would make a nan.
_NONE = 1e300
_Ranges = tuple[Float64Array, Float64Array, Float64Array, Float64Array]


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Bytes that several nodes need.

    Attributes:
        members: The nodes, ascending; two or more.
        nbytes: Distinct bytes.
        need: By member, the share of the bytes that it needs.
    """

    members: Int64Array
    nbytes: float
    need: Float64Array


@dataclass(slots=True)
class Busy:
    """Seconds for which resources are busy; changed in place.

    Attributes:
        nodes: ``[node, kind]``.
        rack_in: ``[rack]``.
        rack_out: ``[rack]``.
        storage: Of the shared storage.
    """

    nodes: Float64Array
    rack_in: Float64Array
    rack_out: Float64Array
    storage: float = 0.0

    @classmethod
    def idle(cls, costs: TransferCosts) -> Busy:
        num_racks = len(costs.uplink)
        return cls(np.zeros_like(costs.read), np.zeros(num_racks), np.zeros(num_racks))

    @property
    def seconds(self) -> float:
        """Of the busiest resource."""
        parts = (self.nodes, self.rack_in, self.rack_out)
        return max(self.storage, *(float(part.max(initial=0.0)) for part in parts))

    def add_alone(self, costs: TransferCosts, read: Float64Array, packed: Float64Array) -> None:
        """Counts bytes that one node alone needs: by node, those that it reads, and those of them that it packs."""
        self.nodes += read[:, None] * costs.read + packed[:, None] * costs.pack
        self._add_storage(costs, np.arange(len(read)), read)

    def add(self, costs: TransferCosts, item: NodeClass, read: Float64Array, sign: float = 1.0) -> None:
        """Counts a class of which each member reads so many bytes; ``sign=-1`` takes it off again."""
        self._add(costs, _Way.of(costs, item), read, sign)

    def _add(self, costs: TransferCosts, way: _Way, read: Float64Array, sign: float = 1.0) -> None:
        total, members, around = float(read.sum()), way.item.members, way.around
        here = read[:, None] * way.per_byte + (total - read)[:, None] * way.taken + total * way.passed
        self.nodes[members] += sign * here
        self._add_storage(costs, members, sign * read)
        if len(around.racks) > 1:
            inside = sums(around.index, read, 0)
            leaving = around.sends * inside + total * around.passed_on
            self.rack_in[around.racks] += sign * costs.uplink[around.racks] * around.need * (total - inside)
            self.rack_out[around.racks] += sign * costs.uplink[around.racks] * leaving

    def _add_storage(self, costs: TransferCosts, nodes: Int64Array, read: Float64Array) -> None:
        self.storage += float(read @ costs.storage[nodes])
        crossing = costs.crosses[nodes] * read
        self.rack_in += costs.uplink * sums(costs.rack[nodes], crossing, len(costs.uplink))
        if costs.storage_rack >= 0:
            self.rack_out[costs.storage_rack] += costs.uplink[costs.storage_rack] * float(crossing.sum())


def share_out(
    costs: TransferCosts, busy: Busy, classes: Sequence[NodeClass], room: Float64Array | None = None
) -> list[Float64Array]:
    """By class, the bytes that each member reads; ``busy`` is left with all of them counted.

    Args:
        costs: Seconds per byte.
        busy: What is busy without the classes.
        classes: In the order in which they choose first; fewest members first is best.
        room: By node, how many bytes it should read at most; what fits nowhere is shared out by time alone.
    """
    left = None if room is None else room.copy()
    ways = [_Way.of(costs, item) for item in classes]
    shares = [_taken(costs, busy, way, left) for way in ways]
    if len(classes) < 2:
        return shares
    level = busy.seconds
    for _ in range(_SWEEPS):
        for position, way in enumerate(ways):
            busy._add(costs, way, shares[position], -1.0)
            if left is not None:
                left[way.item.members] += shares[position]
            shares[position] = _taken(costs, busy, way, left)
        if busy.seconds > level * (1 - _WORTH):
            break
        level = busy.seconds
    return shares


def can_share(costs: TransferCosts, busy: Busy, classes: Sequence[NodeClass], deadline_s: float) -> bool:
    """Whether each of the classes, were it alone with what is busy, could be shared out by a deadline.

    If not, ``share_out`` comes to no deadline so early; it takes a small part of its time.
    """
    for item in classes:
        way = _Way.of(costs, item)
        room = np.full(len(item.members), item.nbytes)
        ranges = _ranges(costs, busy, way, room, way.without(busy), way.per_byte - way.taken)
        if ranges(deadline_s)[1] < 0:
            return False
    return True


def _taken(costs: TransferCosts, busy: Busy, way: _Way, left: Float64Array | None) -> Float64Array:
    """The share of each member, counted in ``busy`` and taken from what room is ``left``."""
    members = way.item.members
    room = np.full(len(members), np.inf) if left is None else np.maximum(left[members], 0.0)
    share = _share(costs, busy, way, room)
    busy._add(costs, way, share)
    if left is not None:
        left[members] -= share
    return share


def _share(costs: TransferCosts, busy: Busy, way: _Way, room: Float64Array) -> Float64Array:
    total, item = float(room.sum()), way.item
    if total >= item.nbytes:
        return _within(costs, busy, way, np.minimum(room, item.nbytes))
    # Not all can be kept anyway: what does not fit is spread by time alone.
    full = Busy(busy.nodes.copy(), busy.rack_in.copy(), busy.rack_out.copy())
    full._add(costs, way, room)
    rest = replace(item, nbytes=item.nbytes - total)
    return room + _within(costs, full, replace(way, item=rest), np.full(len(room), rest.nbytes))


def _within(costs: TransferCosts, busy: Busy, way: _Way, room: Float64Array) -> Float64Array:
    """The share of each member at the smallest deadline that leaves room for all bytes."""
    item, around = way.item, way.around
    base, slope = way.without(busy), way.per_byte - way.taken
    # A resource that reading neither loads nor spares does not count: it is as busy whoever reads.
    late = max(float(np.where(slope != 0, base + item.nbytes * np.abs(slope), 0.0).max()), 1e-12)
    found = _earliest(_ranges(costs, busy, way, room, base, slope), late)
    low, high, rack_low, rack_high = found
    share = np.empty(len(low))
    for rack, amount in enumerate(_fill(rack_low, rack_high, item.nbytes).tolist()):
        here = around.index == rack
        share[here] = _fill(low[here], high[here], amount)
    return share


def _earliest(ranges: Callable[[float], tuple[_Ranges, float]], late: float) -> _Ranges:
    """The ranges at the smallest deadline that leaves room for all bytes, to a precision.

    What is missing, or left, is piecewise linear in the deadline. So a straight line between a deadline that is too
    early and one that is not soon tells where nothing is missing; a halving now and then makes sure of an end.
    """
    early, missing = 0.0, -np.inf
    found, left = ranges(late)
    while left < 0:
        early, missing, late = late, left, 2 * late
        found, left = ranges(late)
    turn = 0
    while late - early > _PRECISION * late:
        middle = (early + late) / 2
        if turn % 3 and missing > -np.inf and left - missing > 0:
            # A little to each side of where the line says, by turns, so that both ends come near.
            root = early - missing * (late - early) / (left - missing)
            aside = _PRECISION * late / 3
            middle = min(max(root + (aside if turn % 3 == 1 else -aside), early + aside), late - aside)
        turn += 1
        better, more = ranges(middle)
        if more >= 0:
            late, left, found = middle, more, better
        else:
            early, missing = middle, more
    return found


def _ranges(
    costs: TransferCosts, busy: Busy, way: _Way, room: Float64Array, base: Float64Array, slope: Float64Array
) -> Callable[[float], tuple[_Ranges, float]]:
    """By deadline the least and most bytes by member, and by rack; and the bytes to spare, or less than none."""
    nodes, item, around = _Limits.of(base, slope), way.item, way.around
    index, uplinks = around.index, around.limits(costs, busy, item) if len(around.racks) > 1 else None
    # Rooms may add up to just the bytes, give or take a rounding.
    slack = item.nbytes * _SLACK

    def at(deadline_s: float) -> tuple[_Ranges, float]:
        least, most = nodes.at(deadline_s)
        low, high = np.maximum(least.max(axis=1), 0.0), np.minimum(np.maximum(most.min(axis=1), 0.0), room)
        rack_low, rack_high = sums(index, low, 0), sums(index, high, 0)
        short = float((high - low).min())
        if uplinks is not None:
            least, most = uplinks.at(deadline_s)
            rack_low = np.maximum(rack_low, least.max(axis=1))
            rack_high = np.minimum(rack_high, np.maximum(most.min(axis=1), 0.0))
            short = min(short, float((rack_high - rack_low).min()))
        spare = min(item.nbytes - float(rack_low.sum()), float(rack_high.sum()) - item.nbytes) + slack
        return (low, high, rack_low, rack_high), min(short, spare) if short < 0 else spare

    return at


@dataclass(frozen=True, slots=True)
class _Limits:
    """Bytes read at a deadline ``t``: at most ``(t - high) / high_s``, at least ``(low - t) / low_s``."""

    high: Float64Array
    high_s: Float64Array
    low: Float64Array
    low_s: Float64Array

    @classmethod
    def of(cls, base: Float64Array, slope: Float64Array) -> _Limits:
        """From the seconds that are busy without reading, and those that a byte adds or spares."""
        rising, falling = slope > 0, slope < 0
        return cls(
            high=np.where(rising, base, -_NONE),
            high_s=np.where(rising, slope, 1.0),
            low=np.where(falling, base, -_NONE),
            low_s=np.where(falling, -slope, 1.0),
        )

    def at(self, deadline_s: float) -> tuple[Float64Array, Float64Array]:
        return (self.low - deadline_s) / self.low_s, (deadline_s - self.high) / self.high_s


@dataclass(frozen=True, slots=True)
class _Racks:
    """The racks of a class.

    Attributes:
        racks: Those that have members, ascending.
        index: By member, the place of its rack among them.
        need: By rack, the share of the bytes that it needs.
        crossing: By rack, the part of what is read there that comes over its uplink.
        sends: By rack, how often it sends a byte that is read there to another one.
        passed_on: By rack, how often it sends on a byte that is read in another one.
    """

    racks: Int64Array
    index: Int64Array
    need: Float64Array
    crossing: Float64Array
    sends: Float64Array
    passed_on: Float64Array

    @classmethod
    def of(cls, costs: TransferCosts, item: NodeClass) -> _Racks:
        members = item.members
        racks, index = np.unique(costs.rack[members], return_inverse=True)
        need = np.minimum(sums(index, item.need, 0), 1.0)
        # Racks stand together on the line: one of its nodes says where.
        place = np.zeros(len(racks), np.int64)
        place[index] = costs.line[members]
        sends, passed_on = _along(need, place)
        crossing = sums(index, costs.crosses[members], 0) / np.bincount(index)
        return cls(racks, index, need, crossing, sends, passed_on)

    def limits(self, costs: TransferCosts, busy: Busy, item: NodeClass) -> _Limits:
        """Limits of what is read inside each rack: what of it enters and leaves, and what enters and leaves instead."""
        uplink, storage = costs.uplink[self.racks], self.racks == costs.storage_rack
        # What is read elsewhere leaves the storage's rack.
        others = float(self.crossing[~storage].mean()) if storage.any() and not storage.all() else 0.0
        leaving = self.passed_on + others * storage
        base = np.stack([self.need, leaving], axis=1)
        more = np.stack([self.crossing - self.need, self.sends - leaving], axis=1)
        now = np.stack([busy.rack_in[self.racks], busy.rack_out[self.racks]], axis=1)
        return _Limits.of(now + item.nbytes * uplink[:, None] * base, uplink[:, None] * more)


@dataclass(frozen=True, slots=True)
class _Way:
    """What a byte of a class costs by who reads it: the same however much each reads.

    Attributes:
        item: The class.
        per_byte: ``[member, kind]``, seconds of a byte that the member reads, beyond ``passed``.
        taken: The same, of one that another reads.
        passed: The same, of each byte, whoever reads it.
        around: The racks.
    """

    item: NodeClass
    per_byte: Float64Array
    taken: Float64Array
    passed: Float64Array
    around: _Racks

    @classmethod
    def of(cls, costs: TransferCosts, item: NodeClass) -> _Way:
        members = item.members
        sends, passed_on = _along(item.need, costs.line[members])
        send = costs.send[members]
        return cls(
            item=item,
            per_byte=costs.read[members] + costs.pack[members] + (sends - passed_on)[:, None] * send,
            taken=item.need[:, None] * costs.take[members],
            passed=passed_on[:, None] * send,
            around=_Racks.of(costs, item),
        )

    def without(self, busy: Busy) -> Float64Array:
        """``[member, kind]``, for how long members are busy if they read nothing."""
        result: Float64Array = busy.nodes[self.item.members] + self.item.nbytes * (self.taken + self.passed)
        return result


def _along(need: Float64Array, place: Int64Array) -> tuple[Float64Array, Float64Array]:
    """By member, how often it sends a byte that it reads itself, and one that another reads.

    Exact where all need all: once at an end, else twice; and never at an end, else once. Members that need parts of
    their own pass nothing on.

    Args:
        need: By member, the share of the bytes that it needs.
        place: By member, its place on the line.
    """
    order = np.argsort(place, kind="stable")
    along = need[order]
    up_to = np.cumsum(along)
    below, above = up_to - along, float(up_to[-1]) - up_to
    sends, passed_on = np.empty(len(need)), np.empty(len(need))
    sends[order] = np.minimum(below, 1.0) + np.minimum(above, 1.0)
    # Further hops after the first one on each side, by whoever stands between two others.
    rest = float((np.maximum(below - 1.0, 0.0) + np.maximum(above - 1.0, 0.0)).mean())
    between = along * (below > _SLACK) * (above > _SLACK)
    amount = float(between.sum()) * (1 - 1 / len(need))
    passed_on[order] = np.minimum(between * (rest / amount), along) if amount > 0 else 0.0
    return sends, passed_on


def _fill(low: Float64Array, high: Float64Array, amount: float) -> Float64Array:
    """Values between the limits that add up to an amount, all equally far along their way."""
    span = float((high - low).sum())
    part = (amount - float(low.sum())) / span if span > 0 else 0.0
    return low + (high - low) * min(max(part, 0.0), 1.0)
