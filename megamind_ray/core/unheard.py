"""What a load machine has said that may have been lost with the planner that was to carry it out (0027). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.node_loss import Lacking
from megamind_ray.core.report import Fault

__all__ = ["Unheard"]


class Unheard:
    """Remembers instructions that a planner's successor has to say again, since nobody answers for them by itself.

    Attributes:
        drops: By node that was given up, the ``DropNode`` of which nobody has said yet that all know of it.

    Args:
        consumers: Ranks that need each extent.
        extent_bytes: Sizes.
        reader: Who reads each extent, as it is by then.
    """

    def __init__(
        self,
        consumers: Mapping[ExtentId, Sequence[Rank]],
        extent_bytes: Mapping[ExtentId, int],
        reader: Mapping[ExtentId, NodeId],
    ) -> None:
        self.drops: dict[NodeId, ins.DropNode] = {}
        self._consumers, self._extent_bytes, self._reader = consumers, extent_bytes, reader
        # Extents that were to be read beside the plan, by the rank that they were for: no program has them.
        self._again: dict[Rank, set[ExtentId]] = {}

    def note(self, event: ev.Event, said: list[ins.Instruction]) -> list[ins.Instruction]:
        """The machine took an event, and said this to it, which is given back."""
        if isinstance(event, ev.NodeDropped):
            self.drops.pop(event.node, None)
        for one in said:
            if isinstance(one, ins.DropNode):
                self.drops[one.node] = one
            elif isinstance(one, ins.ReadAgain):
                for rank in one.ranks:
                    self._again.setdefault(rank, set()).update(one.extents)
            elif isinstance(one, ins.ReadInstead):
                self.note_given(one.extents)
        return said

    def note_given(self, extents: Iterable[ExtentId]) -> None:
        """A reader gives extents away, or may have: whoever reads them does so for all that need them."""
        for extent in extents:
            for rank in self._consumers[extent]:
                self._again.setdefault(rank, set()).add(extent)

    def say_again(
        self,
        reason: str,
        lacking: Iterable[Lacking],
        *,
        loading: Sequence[Rank],
        replacing: Sequence[Rank],
        generations: Mapping[Rank, Generation],
        nodes: Sequence[NodeId],
    ) -> list[ins.Instruction]:
        """What may not have been heard; whoever has heard it already goes on as before.

        Args:
            reason: How the planner was lost.
            lacking: What ranks that load lack; one that did not say lacks all.
            loading: Those ranks.
            replacing: Ranks whose workers are being replaced, or that are given new places by the ``drops``.
            generations: Of all ranks.
            nodes: Those with a program, as far as they are still there.
        """
        moving = {move.rank for drop in self.drops.values() for move in drop.moves}
        again = self._read_again(loading, lacking)
        fault = Fault(
            kind="planner_lost",
            where=reason,
            action="started again, the load went on with what had arrived",
            bytes_retried=sum(self._extent_bytes[extent] for one in again for extent in one.extents),
        )
        return [
            ins.RecordFault(fault=fault),
            *self.drops.values(),
            *(ins.StartRank(rank=rank, generation=generations[rank]) for rank in loading),
            *(ins.ReplaceWorker(rank=rank, generation=generations[rank]) for rank in replacing if rank not in moving),
            *(ins.StartReads(node=node) for node in nodes),
            *again,
        ]

    def _read_again(self, ranks: Iterable[Rank], lacking: Iterable[Lacking]) -> list[ins.ReadAgain]:
        told = {one.rank: set(one.extents) for one in lacking}
        wanted: dict[ExtentId, list[Rank]] = {}
        for rank in ranks:
            for extent in self._again.get(rank, set()) & told.get(rank, self._again.get(rank, set())):
                wanted.setdefault(extent, []).append(rank)
        grouped: dict[tuple[NodeId, tuple[Rank, ...]], list[ExtentId]] = {}
        for extent in sorted(wanted):
            grouped.setdefault((self._reader[extent], tuple(wanted[extent])), []).append(extent)
        return [
            ins.ReadAgain(node=node, extents=tuple(extents), ranks=ranks)
            for (node, ranks), extents in sorted(grouped.items())
        ]
