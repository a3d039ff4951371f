"""What agents and ranks do in a simulation, in the sizes that time depends on: no checksums, no places in tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import ExtentId, NodeId, Rank
from megamind_ray.core.line import Line
from megamind_ray.core.load_machine import LoadFacts

__all__ = ["Block", "Unit", "Work", "block_class", "rounded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block, or some that go the same way.

    Attributes:
        block: Row in ``Work.blocks``.
        unit: Unit that it is cut from.
        nbytes: Size.
        parts: How many blocks of the plan it is.
        bytes_of: By rank, how much of it the rank takes.
        cuts: (mean length of a run, rounded down to four bits; bytes that are cut in such runs). 0 is for bytes
            that lie in their extent as they are.
    """

    block: int
    unit: int
    nbytes: int
    parts: int
    bytes_of: Mapping[Rank, int]
    cuts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A read: an extent, or consecutive ones of one reader.

    Attributes:
        unit: Row in ``Work.units``.
        node: Node that reads it, or on which its rank reads it.
        rank: Reader of a direct extent, else None.
        nbytes: Bytes of storage.
        parts: How many extents of the plan it is.
        pieces: Chunks.
        extent: Plan id of the first one.
        blocks: Cut from it.
    """

    unit: int
    node: NodeId
    rank: Rank | None
    nbytes: int
    parts: int
    pieces: int
    extent: ExtentId
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All units and blocks of a load.

    Attributes:
        units: In plan order.
        blocks: In plan order.
        unit_of_extent: By extent of the plan.
        nodes: Nodes with an agent in this load.
        node_of_rank: By rank.
        parts: Most extents in a unit; 1 where nothing was merged.
        line: Along which blocks go from node to node.
        relays: By node, the nodes that it takes blocks from, in order.
        units_of: By node what its agent reads, and by rank what the rank reads by itself, in order.
        blocks_of: By rank the blocks that it consumes, in plan order.
    """

    units: tuple[Unit, ...]
    blocks: tuple[Block, ...]
    unit_of_extent: Int64Array
    nodes: tuple[NodeId, ...]
    node_of_rank: tuple[NodeId, ...]
    parts: int
    line: Line
    relays: Mapping[NodeId, tuple[NodeId, ...]]
    units_of: Mapping[NodeId | Rank, Sequence[Unit]]
    blocks_of: Mapping[Rank, Sequence[Block]]

    def unit(self, extent: ExtentId) -> Unit:
        """The unit that an extent of the plan is in."""
        return self.units[int(self.unit_of_extent[extent])]

    def facts(self, *, max_worker_restarts: int) -> LoadFacts:
        """As ``planning.load_facts``; of merged extents, the first one stands for all."""
        by_extent = {unit.extent: unit for unit in self.units}
        return LoadFacts(
            nodes=self.nodes,
            num_ranks=len(self.node_of_rank),
            reader={extent: unit.node for extent, unit in by_extent.items() if unit.rank is None},
            consumers={
                extent: tuple(sorted({rank for block in unit.blocks for rank in block.bytes_of}))
                for extent, unit in by_extent.items()
            },
            extent_bytes={extent: unit.nbytes for extent, unit in by_extent.items()},
            max_worker_restarts=max_worker_restarts,
        )


def block_class(block: Block) -> int:
    """Size of a block, or the mean of those that it stands for, rounded: a put's cost depends on it."""
    return rounded(block.nbytes // block.parts)


def rounded(nbytes: int) -> int:
    """Down to four leading bits: what is nearly of one length takes nearly as long, and shares a lane."""
    shift = max(0, nbytes.bit_length() - 4)
    return max(1, nbytes >> shift << shift)
