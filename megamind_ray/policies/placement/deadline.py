"""Whether a node is done with a gang's share of a load by a deadline, while gangs are placed one after the other.

What a gang alone needs is read on its node. What gangs share, each reads an equal part of and takes the rest from the
others; who reads how much is decided later, and better, when all are placed (``policies.sharing``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.parallel import Parallel
from megamind_ray.policies.costs import Float64Array, TransferCosts, TransferLoad
from megamind_ray.policies.placement.domains import Slot

__all__ = ["Deadline", "Traffic", "Trial"]

# Chunks at the border of two gangs' bytes are shared by both; they are too few to tell gangs apart by.
_SMALL = 0.02


@dataclass(slots=True)
class _Group:
    """Bytes that the same tp gangs need: those of single ranks that read for themselves, and all others."""

    gangs: tuple[int, ...]
    direct: float = 0.0
    pooled: float = 0.0


class Traffic:
    """The bytes of a load by tp gang.

    Attributes:
        costs: Seconds per byte.
        rank_bytes: ``[rank]``, bytes that go to its device.
    """

    def __init__(self, costs: TransferCosts, load: TransferLoad, parallel: Parallel, rank_bytes: Float64Array) -> None:
        self.costs, self.rank_bytes = costs, rank_bytes
        self._tp = parallel.tp
        self._of_gang: dict[int, list[_Group]] = defaultdict(list)
        for group in _groups(load, parallel.tp):
            for gang in group.gangs:
                self._of_gang[gang].append(group)
        self._shares: dict[tuple[int, ...], list[tuple[_Group, float]]] = {}

    def kind(self, gang: tuple[int, ...]) -> object:
        """Equal for gangs that cost nearly the same wherever they are placed."""
        shares = [(group.gangs if share < 1 else (), group.direct, group.pooled) for group, share in self.shares(gang)]
        sizes = (*self.rank_bytes[list(gang)].tolist(), *(size for share in shares for size in share[1:]))
        return tuple(f"{size:.2e}" for size in sizes), tuple(share[0] for share in shares)

    def shares(self, gang: tuple[int, ...]) -> list[tuple[_Group, float]]:
        """What the gang needs, and which part of it is its to read. Small groups count as if they were its own."""
        if gang not in self._shares:
            mine = {rank // self._tp for rank in gang}
            found = {group.gangs: group for at in mine for group in self._of_gang[at]}
            small = _SMALL * sum(group.direct + group.pooled for group in found.values())
            own = _Group(())
            shares = []
            for key, group in sorted(found.items()):
                share = len(mine.intersection(key)) / len(key)
                if share < 1 and group.direct + group.pooled > small:
                    shares.append((group, share))
                else:
                    own.direct += share * group.direct
                    own.pooled += share * group.pooled
            self._shares[gang] = [(own, 1.0), *shares]
        return self._shares[gang]


def _groups(load: TransferLoad, tp: int) -> Iterable[_Group]:
    part, rank = load.members()
    direct = load.is_direct(part, rank).tolist()
    pairs: Int64Array = np.unique(np.stack([load.part_class[part], rank // tp]), axis=1)
    owners, gangs = pairs.tolist()
    by_class: dict[int, list[int]] = defaultdict(list)
    for owner, gang in zip(owners, gangs, strict=True):
        by_class[owner].append(gang)
    groups: dict[tuple[int, ...], _Group] = {}
    sizes = load.class_bytes.tolist()
    for owner, members in by_class.items():
        key = tuple(members)
        group = groups.setdefault(key, _Group(key))
        if direct[owner]:
            group.direct += sizes[owner]
        else:
            group.pooled += sizes[owner]
    return groups.values()


class Deadline:
    """What each node has left by a deadline.

    Attributes:
        seconds: The deadline.
        traffic: The load.
    """

    def __init__(self, seconds: float, traffic: Traffic) -> None:
        self.seconds, self.traffic = seconds, traffic
        self.busy: dict[int, Float64Array] = {}
        self.switches: dict[int, float] = defaultdict(float)
        self._here: dict[int, set[int]] = defaultdict(set)

    def trial(self, gang: tuple[int, ...]) -> Trial:
        """A gang that may be placed; nothing counts before ``take``."""
        return Trial(self, gang)

    def per_rank(self, gang: tuple[int, ...], node: int) -> Float64Array:
        """``[kind]``, seconds of a node's resources for each rank of the gang that is placed there, copies apart."""
        costs = self.traffic.costs
        busy = np.zeros(costs.read.shape[1])
        for group, share in self.traffic.shares(gang):
            busy += share * (group.direct + group.pooled) * costs.read[node] + share * group.pooled * costs.pack[node]
            # What another gang here takes in anyway comes once, and the more is read here, the less comes.
            taken = (1 - share) if id(group) not in self._here[node] else -share
            busy += taken * (group.direct + group.pooled) * costs.take[node]
        return np.asarray(busy / len(gang))

    def take(self, gang: tuple[int, ...], chosen: Iterable[tuple[int, Slot]]) -> None:
        """Counts a gang that was placed."""
        trial = self.trial(gang)
        for rank, slot in chosen:
            trial.add(rank, slot)
        self.busy.update(trial.busy)
        self.switches.update(trial.switches)
        for node in trial.busy:
            self._here[node].update(id(group) for group, share in self.traffic.shares(gang) if share < 1)


@dataclass(slots=True)
class Trial:
    """A gang on some slots, on top of what is placed."""

    deadline: Deadline
    gang: tuple[int, ...]
    busy: dict[int, Float64Array] = field(default_factory=dict)
    switches: dict[int, float] = field(default_factory=dict)
    per_rank: dict[int, Float64Array] = field(default_factory=dict)

    def allows(self, rank: int, slot: Slot) -> bool:
        """Whether all that the slot uses is done in time with the rank, too."""
        return self.allows_link(rank, slot) and bool((self._node(rank, slot) <= self.deadline.seconds).all())

    def allows_all(self, slot: Slot) -> bool:
        """Whether the slot's node is done in time with the whole gang, links apart."""
        traffic = self.deadline.traffic
        copied = traffic.rank_bytes[list(self.gang)].sum() * traffic.costs.copy[slot.order]
        busy = self._before(slot.node_index) + self.deadline.per_rank(self.gang, slot.node_index) * len(self.gang)
        return bool((busy + copied <= self.deadline.seconds).all())

    def allows_link(self, rank: int, slot: Slot) -> bool:
        """Whether the slot's own link, and its switch, are done in time with the rank, too."""
        costs, limit_s = self.deadline.traffic.costs, self.deadline.seconds
        nbytes = self.deadline.traffic.rank_bytes[rank]
        if nbytes * costs.device[slot.order] > limit_s:
            return False
        switch = int(costs.gpu_switch[slot.order])
        return switch < 0 or bool(self._switch(switch) + nbytes * costs.switch[switch] <= limit_s)

    def add(self, rank: int, slot: Slot) -> None:
        """Counts the rank."""
        costs = self.deadline.traffic.costs
        self.busy[slot.node_index] = self._node(rank, slot)
        switch = int(costs.gpu_switch[slot.order])
        if switch >= 0:
            busy = self.deadline.traffic.rank_bytes[rank] * costs.switch[switch]
            self.switches[switch] = self._switch(switch) + float(busy)

    def _switch(self, switch: int) -> float:
        return self.switches.get(switch, self.deadline.switches[switch])

    def _node(self, rank: int, slot: Slot) -> Float64Array:
        node, traffic = slot.node_index, self.deadline.traffic
        if node not in self.per_rank:
            self.per_rank[node] = self.deadline.per_rank(self.gang, node)
        copied = traffic.rank_bytes[rank] * traffic.costs.copy[slot.order]
        return np.asarray(self._before(node) + self.per_rank[node] + copied)

    def _before(self, node: int) -> Float64Array:
        before = self.busy.get(node)
        if before is None:
            before = self.deadline.busy.get(node)
        return np.zeros(self.deadline.traffic.costs.read.shape[1]) if before is None else before
