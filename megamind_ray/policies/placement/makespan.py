"""How long a load takes with a placement, if every resource works without pause: the busiest one's seconds.

The bytes are those of ``TransferLoad``; readers share out what several nodes need as well as they can
(``policies.sharing``). Extents are whole in a plan and a fraction here, which is the only difference to the bound of
the plan that the placement leads to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megamind_ray.core.demands import Int64Array
from megamind_ray.policies.costs import Float64Array, TransferCosts, TransferLoad, sums
from megamind_ray.policies.sharing import Busy, NodeClass, can_share, share_out

__all__ = ["Makespan", "Strain"]

_POWER = 8
# Nearly as busy as the busiest.
_HOT = 0.995


@dataclass(frozen=True, slots=True, eq=False)
class Strain:
    """How busy a placement keeps everything.

    Attributes:
        seconds: Of the busiest resource.
        mean: Over nodes, links, uplinks and storage, one in which the busiest count most.
        hot: Nodes that are busiest, or nearly so; none where it is no node's own resource.
        nodes: ``[node]``, seconds of its busiest resource.
    """

    seconds: float
    mean: float
    hot: frozenset[int]
    nodes: Float64Array


class Makespan:
    """Seconds by placement. Made once per request; asked for many placements.

    Attributes:
        rank_bytes: ``[rank]``, bytes that go to its device.
    """

    def __init__(self, costs: TransferCosts, load: TransferLoad, num_ranks: int) -> None:
        self._costs, self._load = costs, load
        self._part, self._rank = load.members()
        self.rank_bytes = sums(self._rank, load.part_bytes[self._part], num_ranks)
        self._direct = load.is_direct(self._part, self._rank)

    def seconds(self, gpus: Int64Array) -> float:
        """Of the busiest resource.

        Args:
            gpus: By rank its GPU, counted through all nodes.
        """
        busy, links = self.busy(gpus)
        return max(busy.seconds, float(links.max(initial=0.0)))

    def strain(self, gpus: Int64Array, limit_s: float = np.inf) -> Strain | None:
        """How busy everything is; None where something surely is for longer than a limit, which is seen sooner.

        Args:
            gpus: By rank its GPU, counted through all nodes.
            limit_s: The limit.
        """
        costs = self._costs
        busy, links = self.copies(gpus)
        if float(links.max(initial=0.0)) > limit_s:
            return None
        shared = self._read_at_home(busy, costs.gpu_node[gpus])
        if busy.seconds > limit_s or not can_share(costs, busy, shared, limit_s):
            return None
        share_out(costs, busy, _fewest_first(shared))
        nodes = busy.nodes.max(axis=1)
        each = np.concatenate([nodes, busy.rack_in, busy.rack_out, [busy.storage], links])
        most = float(each.max())
        mean = most * float(((each / most) ** _POWER).sum() ** (1 / _POWER)) if most > 0 else 0.0
        if most > limit_s:
            return None
        hot = set(np.flatnonzero(nodes >= most * _HOT).tolist())
        hot.update(self._node_of_link(link) for link in np.flatnonzero(links >= most * _HOT).tolist())
        return Strain(seconds=most, mean=mean, hot=frozenset(hot), nodes=nodes)

    def busy(self, gpus: Int64Array) -> tuple[Busy, Float64Array]:
        """Seconds of nodes, racks and storage; and of each device link and then each switch."""
        costs = self._costs
        busy, links = self.copies(gpus)
        shared = self._read_at_home(busy, costs.gpu_node[gpus])
        share_out(costs, busy, _fewest_first(shared))
        return busy, links

    def _node_of_link(self, index: int) -> int:
        """The node of a device link or switch, by its place in what ``busy`` returns."""
        costs = self._costs
        if index < len(costs.gpu_node):
            return int(costs.gpu_node[index])
        return int(costs.gpu_node[np.argmax(costs.gpu_switch == index - len(costs.gpu_node))])

    def copies(self, gpus: Int64Array) -> tuple[Busy, Float64Array]:
        """As ``busy``, of copies to devices alone."""
        costs, busy = self._costs, Busy.idle(self._costs)
        np.add.at(busy.nodes, costs.gpu_node[gpus], self.rank_bytes[:, None] * costs.copy[gpus])
        device = sums(gpus, self.rank_bytes * costs.device[gpus], len(costs.device))
        switched = costs.gpu_switch[gpus] >= 0
        weights = self.rank_bytes[switched]
        switch = sums(costs.gpu_switch[gpus[switched]], weights, len(costs.switch))
        return busy, np.concatenate([device, switch * costs.switch])

    def _read_at_home(self, busy: Busy, node_of_rank: Int64Array) -> list[NodeClass]:
        """Counts the classes that one node needs; the others are returned, joined by their nodes."""
        costs, load = self._costs, self._load
        num_nodes = len(costs.read)
        # A part is needed once on a node, however many of its ranks want it.
        part, node = np.divmod(np.unique(self._part * num_nodes + node_of_rank[self._rank]), num_nodes)
        keys, index = np.unique(load.part_class[part] * num_nodes + node, return_inverse=True)
        owner, node = np.divmod(keys, num_nodes)
        needed = np.bincount(index, weights=load.part_bytes[part])
        num_on = np.bincount(owner, minlength=len(load.class_bytes))
        alone = num_on[owner] == 1
        here, home, pool = owner[alone], node[alone], ~self._direct[owner[alone]]
        read = sums(home, load.class_bytes[here], num_nodes)
        pack = sums(home[pool], load.class_bytes[here[pool]], num_nodes)
        busy.add_alone(costs, read, pack)
        return _joined(owner[~alone], node[~alone], needed[~alone], load.class_bytes)


def _fewest_first(shared: list[NodeClass]) -> list[NodeClass]:
    return sorted(shared, key=lambda item: (len(item.members), item.members.tolist()))


def _joined(owner: Int64Array, node: Int64Array, needed: Float64Array, class_bytes: Float64Array) -> list[NodeClass]:
    """Classes with the same nodes as one; the columns are (class, node, bytes needed there), ascending."""
    if not len(owner):
        return []
    first = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1, [len(owner)]]).tolist()
    sums: dict[bytes, tuple[float, Float64Array]] = {}
    for begin, end in pairwise(first):
        nbytes, need = float(class_bytes[owner[begin]]), needed[begin:end]
        if nbytes <= 0:
            continue
        key = node[begin:end].tobytes()
        if key in sums:
            nbytes, need = nbytes + sums[key][0], need + sums[key][1]
        sums[key] = (nbytes, need)
    return [
        NodeClass(np.frombuffer(key, np.int64), nbytes, np.minimum(need / nbytes, 1.0))
        for key, (nbytes, need) in sums.items()
    ]
