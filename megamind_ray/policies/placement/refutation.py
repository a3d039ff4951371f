"""Whether any placement at all is done by a deadline: a search over nodes that ends with a proof or with a candidate.

``relaxation`` asks what all placements have in common; here they are gone through, item by item, and a branch ends
where what is placed already cannot be done in time, whoever reads and however blocks are handed on. An *item* is ranks
that stay on one node. Nothing is assumed of readers but that they need some of what they read, and of the line along
which blocks go only that there is one: all but the two at its ends hand on what others read (docs/design/0020, 0024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megamind_ray.policies.costs import Float64Array, TransferCosts, sums
from megamind_ray.policies.placement.base import PlacementRequest
from megamind_ray.policies.placement.domains import Level
from megamind_ray.policies.placement.headroom import at_most, is_enough, most_of
from megamind_ray.policies.placement.item_bytes import ItemBytes
from megamind_ray.policies.placement.locality import Group
from megamind_ray.policies.placement.rooms import Rooms, cheapest_copies
from megamind_ray.policies.placement.weighing import Weighing

__all__ = ["Refutation", "is_refuted", "refute"]

_ROUNDING = 1e-6
_LARGE = 1e300
# Weights to try for a placement of all items against which nothing else speaks, and for all such together.
_ROUNDS, _ALL_ROUNDS = 1_000, 50_000


@dataclass(frozen=True, slots=True)
class Refutation:
    """What a search found.

    Attributes:
        is_proven: No placement is done by the deadline.
        candidate: By rank a node, if nothing speaks against it; None where there is none, or none was found in time.
        num_steps: Nodes tried.
    """

    is_proven: bool
    candidate: tuple[int, ...] | None
    num_steps: int


def refute(
    request: PlacementRequest,
    groups: Sequence[Group],
    deadline_s: float,
    *,
    max_steps: int = 20_000,
) -> Refutation:
    """Whether a placement that keeps the groups can be done by a deadline.

    Args:
        request: The question; with costs and load.
        groups: What stays together.
        deadline_s: The deadline.
        max_steps: Nodes to try before giving up.
    """
    assert request.costs is not None
    assert request.load is not None
    items = _items_of(request, groups)
    load = ItemBytes.of(request.load, request, items)
    search = _Search(request, request.costs, load, items, groups, deadline_s, max_steps)
    candidate = search.descend(0) if search.is_possible() else None
    is_proven = candidate is None and search.num_steps < max_steps
    return Refutation(is_proven, candidate, search.num_steps)


def is_refuted(request: PlacementRequest, where: Sequence[int], deadline_s: float, *, rounds: int = _ROUNDS) -> bool:
    """Whether a placement, by rank its node, surely is not done by a deadline. The request has costs and load."""
    assert request.costs is not None
    assert request.load is not None
    items = _items_of(request, ())
    load = ItemBytes.of(request.load, request, items)
    node_of = [where[item.ranks[0]] for item in items]
    on = [[item for item, at in enumerate(node_of) if at == node] for node in range(len(request.costs.read))]
    check = _Check(request.costs, load, on, node_of, deadline_s * (1 + _ROUNDING))
    return not check.is_open() or check.weighing().refutes(deadline_s * (1 + _ROUNDING), None, rounds) is not None


def _items_of(request: PlacementRequest, groups: Sequence[Group]) -> list[Group]:
    """The largest groups on one node, and the ranks outside of them; most bytes first, ones that are alike in a row."""
    found: list[Group] = []
    left = set(request.parallel.ranks)
    for group in sorted(groups, key=lambda group: -len(group.ranks)):
        if group.num_nodes == 1 and left.issuperset(group.ranks):
            found.append(group)
            left.difference_update(group.ranks)
    found += [Group((rank,), Level.NODE, 1) for rank in sorted(left)]
    return found


class _Search:
    def __init__(
        self,
        request: PlacementRequest,
        costs: TransferCosts,
        load: ItemBytes,
        items: Sequence[Group],
        groups: Sequence[Group],
        deadline_s: float,
        max_steps: int,
    ) -> None:
        self._request, self._costs, self._load, self._items = request, costs, load, items
        self._late, self._max_steps = deadline_s * (1 + _ROUNDING), max_steps
        self._num_nodes = len(costs.read)
        self._wide = [
            [group for group in groups if group.num_nodes > 1 and item.ranks[0] in group.ranks] for item in items
        ]
        by_rack = bool(costs.uplink.any()) or any(group.level is Level.RACK for group in groups)
        self._rooms = Rooms(request, costs, load.rank_bytes, items, self._late, by_rack=by_rack)
        # Items that could change places.
        self._alike = [
            (
                load.needs[index].tobytes(),
                [request.rank_bytes[rank] for rank in item.ranks],
                float(load.copied[index]),
                float(load.rank_bytes[index]),
                item.level,
                self._wide[index],
            )
            for index, item in enumerate(items)
        ]
        self._on: list[list[int]] = [[] for _ in range(self._num_nodes)]
        self._node_of: list[int] = []
        # The last that refuted something: neighbours are often refuted by the same.
        self._weights: Float64Array | None = None
        self._rounds_left = _ALL_ROUNDS
        self.num_steps = 0

    def is_possible(self) -> bool:
        """What holds whatever is where: storage gives all bytes in time."""
        slowest = float(self._costs.storage.max(initial=0.0))
        local = bool((self._costs.storage == 0).any())
        return local or float(self._load.share_bytes.sum()) * slowest <= self._late

    def descend(self, item: int) -> tuple[int, ...] | None:
        """Tries all nodes for an item, and after each all for those behind it; the first candidate."""
        if item == len(self._items):
            where = [0] * self._request.parallel.world
            for index, node in enumerate(self._node_of):
                for rank in self._items[index].ranks:
                    where[rank] = node
            return tuple(where)
        seen: set[object] = set()
        first = self._node_of[-1] if item and self._alike[item - 1] == self._alike[item] else 0
        for node in range(first, self._num_nodes):
            if self.num_steps >= self._max_steps:
                return None
            if not self._on[node]:
                if self._rooms.kind[node] in seen:
                    continue
                seen.add(self._rooms.kind[node])
            self.num_steps += 1
            self._on[node].append(item)
            self._node_of.append(node)
            found = self.descend(item + 1) if self._may(item, node) and self._is_open() else None
            self._node_of.pop()
            self._on[node].pop()
            if found is not None:
                return found
        return None

    def _may(self, item: int, node: int) -> bool:
        """Whether GPUs are left, and wide groups can still be kept."""
        if not self._rooms.holds(node, self._on[node]):
            return False
        racks = self._request.topology.nodes
        for group in self._wide[item]:
            here = {at for index, at in enumerate(self._node_of) if self._items[index].ranks[0] in group.ranks}
            if len(here) > group.num_nodes:
                return False
            if group.level is Level.RACK and len({racks[at].rack for at in here}) > 1:
                return False
        return True

    def _is_open(self) -> bool:
        check = _Check(self._costs, self._load, self._on, self._node_of, self._late)
        if not check.is_open():
            return False
        rounds = min(_ROUNDS, self._rounds_left) if len(self._node_of) == len(self._items) else 0
        if not rounds and self._weights is None:
            return True
        self._rounds_left -= rounds
        found = check.weighing().refutes(self._late, self._weights, rounds)
        self._weights = self._weights if found is None else found
        return found is None


class _Check:
    """Whether some of the items, each on its node, leave a way to be done in time."""

    def __init__(
        self, costs: TransferCosts, load: ItemBytes, on: Sequence[list[int]], node_of: Sequence[int], late_s: float
    ) -> None:
        self._costs, self._load, self._late, self._on = costs, load, late_s, on
        self._used = [node for node, items in enumerate(on) if items]
        self._num_placed = num_placed = len(node_of)
        self._is_complete = num_placed == load.wants.shape[1]
        # By share, the nodes that are known to need it, and whether others may come.
        self._at = np.zeros((len(load.share_bytes), len(on)), np.bool_)
        for item, node in enumerate(node_of):
            self._at[:, node] |= load.wants[:, item]
        self._known = np.asarray(~load.wants[:, num_placed:].any(axis=1), np.bool_)
        self._alone = self._known & (self._at.sum(axis=1) == 1)
        here = {node: load.needs[items].any(axis=0) for node, items in enumerate(on) if items}
        self._need = {
            node: sums(load.part_share[parts], load.part_bytes[parts], len(load.share_bytes))
            for node, parts in here.items()
        }
        self._parts = here

    def is_open(self) -> bool:
        most = self._most_read()
        return (
            most is not None
            and self._is_read(most)
            and self._is_handed_on()
            and self._is_done()
            and self._is_across(most)
        )

    def weighing(self) -> Weighing:
        """All resources together, for the shares of which it is known who needs them."""
        costs, load = self._costs, self._load
        needs = np.zeros((len(load.part_bytes), len(self._on)), np.bool_)
        busy, crossing = np.zeros_like(costs.read), np.zeros(len(self._on))
        for node in self._used:
            needs[:, node] = self._parts[node]
            busy[node] = self._busy(node)
            crossing[node] = float(load.share_bytes[self._alone & self._at[:, node]].sum())
        return Weighing(costs, load, self._known & ~self._alone, needs, busy, crossing)

    def _busy(self, node: int) -> Float64Array:
        """Seconds of what is done there in any case: reading what nobody else needs, and copying."""
        costs, load = self._costs, self._load
        mine = self._alone & self._at[:, node]
        copied = float(load.copied[self._on[node]].sum())
        read, packed = float(load.share_bytes[mine].sum()), float(load.pooled_bytes[mine].sum())
        busy = read * costs.read[node] + packed * costs.pack[node] + copied * self._copy[node]
        if costs.cut is not None:
            busy += float(load.strided_bytes[mine].sum()) * costs.cut[node]
        return np.asarray(busy)

    @cached_property
    def _copy(self) -> Float64Array:
        return cheapest_copies(self._costs)

    def _most_read(self) -> Float64Array | None:
        """By node, what it reads at most beside its own; None where one cannot get what it needs."""
        costs, late = self._costs, self._late
        # Before all are placed, some of what is still to be read may not pass the pool.
        pack = costs.pack if self._is_complete else np.zeros_like(costs.pack)
        with np.errstate(divide="ignore"):
            most = np.where(
                costs.read + pack > 0, late / np.where(costs.read + pack > 0, costs.read + pack, 1.0), _LARGE
            )
        limit = np.asarray(most.min(axis=1))
        for node in self._used:
            left = late - self._busy(node)
            if (left < 0).any():
                return None
            limit[node] = at_most(left, costs.read[node] + pack[node])
            shared = self._at[:, node] & ~self._alone
            wanted = float(self._need[node][shared].sum()) * (1 - _ROUNDING)
            if wanted > 0 and most_of(left, costs.read[node], costs.take[node], wanted) < 0:
                return None
        return limit

    def _is_read(self, most: Float64Array) -> bool:
        """Whether every share, and shares that the same nodes need together, are read in time by those nodes."""
        load = self._load
        rest = ~self._alone
        able = most[self._used] if self._is_complete else most
        if float(load.share_bytes[rest].sum()) * (1 - _ROUNDING) > float(able.sum()):
            return False
        closed = np.flatnonzero(self._known & rest)
        for nodes in np.unique(self._at[closed], axis=0):
            inside = closed[~(self._at[closed] & ~nodes).any(axis=1)]
            if float(load.share_bytes[inside].sum()) * (1 - _ROUNDING) > float(most[nodes].sum()):
                return False
        return True

    def _is_handed_on(self) -> bool:
        """Whether all but two of the nodes, and of the racks, that need all of a share can hand it on as well.

        And whether they read all of it nevertheless, where it is known who they are.
        """
        load = self._load
        for share in np.flatnonzero((self._at.sum(axis=1) > 1) & (load.pooled_bytes > 0)).tolist():
            nbytes = float(load.share_bytes[share]) * (1 - _ROUNDING)
            nodes = np.flatnonzero(self._at[share]).tolist()
            whole = [node for node in nodes if self._need[node][share] >= nbytes]
            # By node, what it reads of the share at most, between two others and at an end.
            between = [self._reads(node, nbytes, passes_on=True) for node in whole]
            at_end = [self._reads(node, nbytes, passes_on=False) for node in whole]
            is_known = bool(self._known[share]) and len(whole) == len(nodes)
            if not is_enough(between, at_end, nbytes if is_known else 0.0):
                return False
            if not self._is_between_racks(whole, at_end, nbytes, is_known=is_known):
                return False
        return True

    def _is_between_racks(self, whole: list[int], at_end: list[float], nbytes: float, *, is_known: bool) -> bool:
        """The same for racks, which take in over their uplinks what they do not read, and send what they read."""
        costs = self._costs
        read: dict[int, float] = {}
        for node, most in zip(whole, at_end, strict=True):
            read[int(costs.rack[node])] = read.get(int(costs.rack[node]), 0.0) + max(most, 0.0)
        if len(read) < 2:
            return True
        carried = {rack: self._late / costs.uplink[rack] if costs.uplink[rack] > 0 else _LARGE for rack in read}
        inside = [min(most, carried[rack]) for rack, most in read.items()]
        between = [min(most, carried[rack] - nbytes) for rack, most in read.items()]
        # What comes from storage crosses the uplink as well as what comes from nodes.
        least = [nbytes - carried[rack] for rack in read]
        crossing = {int(costs.rack[node]) for node in whole if costs.crosses[node]}
        if is_known and any(low > high for low, high in zip(least, inside, strict=True)):
            return False
        if any(low > 0 and rack in crossing for low, rack in zip(least, read, strict=True)):
            return False
        return is_enough(between if len(read) > 2 else inside, inside, nbytes if is_known else 0.0)

    def _reads(self, node: int, nbytes: float, *, passes_on: bool) -> float:
        """How much of a share that it needs all of a node reads at most; negative where it cannot be done in time."""
        costs = self._costs
        left = self._late - self._busy(node)
        if passes_on:  # what it reads it sends twice, and all the rest once
            left = left - nbytes * costs.send[node]
        return most_of(left, costs.read[node] + costs.pack[node] + costs.send[node], costs.take[node], nbytes)

    def _is_done(self) -> bool:
        """Whether all nodes together do all reading, packing, copying, sending and taking, by kind of resource.

        A node that takes at least ``u`` times as long for each of them as the fastest gives ``1 / u`` of its time.
        """
        load, costs = self._load, self._costs
        shared = ~self._alone
        read, packed = float(load.share_bytes[shared].sum()), float(load.pooled_bytes[shared].sum())
        needed = np.sum([self._need[node] for node in self._used], axis=0)
        taken = float(np.maximum(needed - load.share_bytes, 0.0)[shared].sum())
        copied = float(load.copied[self._num_placed :].sum())
        busy = np.zeros_like(costs.read)
        for node in self._used:
            busy[node] = self._busy(node)
        nodes = self._used if self._is_complete else list(range(len(costs.read)))
        cut = np.zeros_like(costs.read) if costs.cut is None else costs.cut
        steps = (
            (float(load.strided_bytes[shared].sum()), cut),
            (read, costs.read),
            (packed, costs.pack),
            (taken, costs.take),
            (taken, costs.send),
            (copied, self._copy),
        )
        for kind in range(costs.read.shape[1]):
            columns = [(amount, cost[nodes, kind]) for amount, cost in steps if amount > 0]
            columns = [(amount, column) for amount, column in columns if column.min() > 0]
            if columns:
                slower = np.min([column / column.min() for _, column in columns], axis=0)
                given_s = float(((self._late - busy[nodes, kind]) / slower).sum())
                if given_s < sum(amount * float(column.min()) for amount, column in columns) * (1 - _ROUNDING):
                    return False
        return True

    def _is_across(self, most: Float64Array) -> bool:
        """Whether what a rack needs and does not read comes over its uplink in time."""
        costs, load = self._costs, self._load
        for rack in {int(costs.rack[node]) for node in self._used}:
            if costs.uplink[rack] <= 0:
                continue
            members = [node for node in self._used if costs.rack[node] == rack]
            parts = np.any([self._parts[node] for node in members], axis=0)
            needed = float(load.part_bytes[parts].sum()) * (1 - _ROUNDING)
            own = sum(
                float(most[node]) + float(load.share_bytes[self._alone & self._at[:, node]].sum())
                for node in members
                if not costs.crosses[node]
            )
            if (needed - own) * costs.uplink[rack] > self._late:
                return False
        return True
