"""What moving a load's bytes costs, in seconds of each resource: the figures that policies decide by.

They are made in ``planning.transfers`` from the one cost model (docs/design/0015); a policy never looks at rates
itself. A node has resources of its own (disks, its network each way, memory, processors, ...), one column or *kind*
each; GPUs, PCIe switches, rack uplinks and shared storage stand apart, because several users share them or none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megamind_ray.core.demands import Int64Array

__all__ = ["Float64Array", "TransferCosts", "TransferLoad", "sums"]

Float64Array = npt.NDArray[np.float64]


def sums(index: Int64Array, values: npt.ArrayLike, size: int) -> Float64Array:
    """By index from 0 to ``size``, the sum of its values."""
    return np.bincount(index, weights=values, minlength=size).astype(np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferCosts:
    """Seconds per byte. Nodes are positions in ``topology.nodes``; GPUs are counted through all nodes, in their order.

    Attributes:
        read: ``[node, kind]``, a byte of storage into host memory, checked where there is a reference.
        pack: ``[node, kind]``, a byte cut into a block and put into the node's object store.
        send: ``[node, kind]``, a byte of a block handed to one other node.
        take: ``[node, kind]``, a byte of a block taken from another node and put.
        storage: ``[node]``, of the storage that all nodes share; 0 where a node reads its own disks.
        rack: ``[node]``, index of its rack.
        uplink: ``[rack]``, a byte that enters the rack, or leaves it; 0 without a limit.
        crosses: ``[node]``, 1 where what the node reads comes from outside of its rack, over the uplink; else 0.
        storage_rack: Index of the rack that it leaves then; -1: storage stands in none.
        line: ``[node]``, its place on the line along which blocks are handed on, as far as it is known beforehand.
        cut: ``[node, kind]``, what a byte takes beyond ``pack`` that is cut out of strides; None where ``pack`` has it.
        gpu_node: ``[gpu]``, its node.
        copy: ``[gpu, kind]``, a byte copied into the GPU, of its node's resources.
        device: ``[gpu]``, the same of the GPU's own link.
        gpu_switch: ``[gpu]``, index of its PCIe switch, -1 without one.
        switch: ``[switch]``, a byte through the switch.
    """

    read: Float64Array
    pack: Float64Array
    send: Float64Array
    take: Float64Array
    storage: Float64Array
    rack: Int64Array
    uplink: Float64Array
    crosses: Float64Array
    storage_rack: int
    line: Int64Array
    gpu_node: Int64Array
    copy: Float64Array
    device: Float64Array
    gpu_switch: Int64Array
    switch: Float64Array
    cut: Float64Array | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferLoad:
    """What is to be moved: bytes by who needs them.

    A chunk is read as a whole and cut for each set of ranks that needs some of it. Chunks with the same sets make a
    *class*; class ``c`` has the parts ``first_part[c]`` to ``first_part[c + 1]``.

    Attributes:
        first_rank: One entry more than there are sets; set ``i`` is ``ranks[first_rank[i] : first_rank[i + 1]]``.
        ranks: See ``first_rank``; ascending within a set.
        first_part: See above.
        part_set: ``[part]``, the set that needs it.
        part_bytes: ``[part]``, bytes that the set needs of the class.
        class_bytes: ``[class]``, distinct bytes.
        direct: Whether a rank reads classes that it alone needs by itself, past the pool.
        strided_bytes: ``[class]``, those of the class that are cut out of strides wherever they are read, as rows of a
            matrix that is split by columns; None where that is not asked.
    """

    first_rank: Int64Array
    ranks: Int64Array
    first_part: Int64Array
    part_set: Int64Array
    part_bytes: Float64Array
    class_bytes: Float64Array
    direct: bool = True
    strided_bytes: Float64Array | None = None

    @property
    def part_class(self) -> Int64Array:
        """``[part]``, its class."""
        return np.repeat(np.arange(len(self.class_bytes), dtype=np.int64), np.diff(self.first_part))

    def members(self) -> tuple[Int64Array, Int64Array]:
        """All (part, rank) pairs."""
        counts = np.diff(self.first_rank)[self.part_set]
        part = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        within = np.arange(len(part), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        return part, self.ranks[np.repeat(self.first_rank[self.part_set], counts) + within]

    def is_direct(self, part: Int64Array, rank: Int64Array) -> npt.NDArray[np.bool_]:
        """``[class]``, whether one rank alone needs it and reads it itself; the pairs are those of ``members``."""
        num = len(self.class_bytes)
        lowest, highest = np.full(num, np.iinfo(np.int64).max), np.full(num, -1)
        owner = self.part_class[part]
        np.minimum.at(lowest, owner, rank)
        np.maximum.at(highest, owner, rank)
        result: npt.NDArray[np.bool_] = (lowest == highest) & self.direct
        return result
