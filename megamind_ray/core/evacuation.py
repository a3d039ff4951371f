"""The last copies of a node that leaves, brought to other nodes: which goes where, and what then (0028). Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megamind_ray.core.ids import BlockId, LoadId, NodeId, Rank

__all__ = ["Evacuation", "HeldBlock", "LastCopy", "last_copies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlock:
    """A block that a node keeps.

    Attributes:
        block: Plan id.
        nbytes: Size.
        ranks: That took it from there, on that node and further on.
    """

    block: BlockId
    nbytes: int
    ranks: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCopy:
    """A kept block that no node keeps but the one that leaves.

    Attributes:
        load: Whose.
        block: Plan id.
        nbytes: Size.
        near: Nodes with ranks that need it.
    """

    load: LoadId
    block: BlockId
    nbytes: int
    near: frozenset[NodeId] = frozenset()


def last_copies(
    load: LoadId,
    held: Mapping[NodeId, Collection[HeldBlock]],
    homes: Mapping[Rank, NodeId],
    *,
    leaving: NodeId,
    staying: Collection[NodeId],
) -> list[LastCopy]:
    """The blocks of a load that a node keeps and none of those that stay.

    Args:
        load: Whose.
        held: By node, what it keeps of it.
        homes: By rank its node.
        leaving: The node.
        staying: Nodes whose copies count.
    """
    elsewhere = {one.block for node in staying if node != leaving for one in held.get(node, ())}
    return [
        LastCopy(
            load=load,
            block=one.block,
            nbytes=one.nbytes,
            near=frozenset(homes[rank] for rank in one.ranks if rank in homes) & frozenset(staying) - {leaving},
        )
        for one in held.get(leaving, ())
        if one.block not in elsewhere
    ]


class Evacuation:
    """Says what each of the nodes that stay is to copy next, and hears what came of it.

    A block goes to a node whose ranks need it, where one has room, else to any; of several to the one with most room.
    The largest are placed first: a smaller one finds room where they do not. A copy is safe once its new node said so
    and as long as that node lives: of one that is lost in the middle, all is placed again.

    Attributes:
        total_bytes: Of all last copies.
        safe: By node, what it has taken over.
        homeless: What no pool has room for.
        lost: What can be copied no more: its node is gone.

    Args:
        copies: What is to be brought elsewhere.
        room_bytes: By node that stays, what its pool takes.
    """

    def __init__(self, copies: Sequence[LastCopy], room_bytes: Mapping[NodeId, int]) -> None:
        self.total_bytes = sum(copy.nbytes for copy in copies)
        self.safe: dict[NodeId, list[LastCopy]] = {}
        self.homeless: list[LastCopy] = []
        self.lost: list[LastCopy] = []
        self._room = dict(room_bytes)
        self._queues: dict[NodeId, deque[LastCopy]] = {}
        self._moving: dict[NodeId, tuple[LastCopy, ...]] = {}
        self._is_source_lost = False
        self._place(copies)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to copy."""
        return not self._moving and not self._queues

    @property
    def safe_bytes(self) -> int:
        return sum(copy.nbytes for copies in self.safe.values() for copy in copies)

    @property
    def waiting(self) -> tuple[NodeId, ...]:
        """Nodes that have something to copy and are not at it."""
        return tuple(sorted(node for node in self._queues if node not in self._moving))

    def begin(self, node: NodeId, *, max_bytes: int) -> tuple[LastCopy, ...]:
        """What a node of ``waiting`` is to copy next: one block, or several of so many bytes together."""
        queue = self._queues[node]
        batch = [queue.popleft()]
        size = batch[0].nbytes
        while queue and size + queue[0].nbytes <= max_bytes:
            size += queue[0].nbytes
            batch.append(queue.popleft())
        if not queue:
            del self._queues[node]
        self._moving[node] = tuple(batch)
        return self._moving[node]

    def arrived(self, node: NodeId) -> None:
        """A node has taken over what it began."""
        self.safe.setdefault(node, []).extend(self._moving.pop(node))

    def failed(self, node: NodeId) -> None:
        """What a node began came to nothing, though it lives: it tries again, if the one that leaves lives too."""
        batch = self._moving.pop(node)
        if self._is_source_lost:
            self._lose(batch)
            return
        self._queues.setdefault(node, deque()).extendleft(reversed(batch))

    def close(self, node: NodeId) -> None:
        """A node takes no more: others take what was to come there. What it has taken it keeps."""
        left = [*self._moving.pop(node, ()), *self._queues.pop(node, ())]
        self._room.pop(node, None)
        self._place(left)

    def lose(self, node: NodeId) -> None:
        """A node that was to take blocks is gone: others take them, also those that it had taken."""
        taken = self.safe.pop(node, [])
        self.close(node)
        self._place(taken)

    def lose_source(self) -> None:
        """The node that leaves is gone before its time: what is not safe is lost, unless it arrives all the same."""
        self._is_source_lost = True
        for queue in self._queues.values():
            self._lose(queue)
        self._queues.clear()

    def _place(self, copies: Iterable[LastCopy]) -> None:
        if self._is_source_lost:
            self._lose(copies)
            return
        for copy in sorted(copies, key=lambda one: (-one.nbytes, one.load, one.block)):
            home = self._roomiest(copy.near & self._room.keys(), copy.nbytes)
            home = self._roomiest(self._room.keys(), copy.nbytes) if home is None else home
            if home is None:
                self.homeless.append(copy)
                continue
            self._room[home] -= copy.nbytes
            self._queues.setdefault(home, deque()).append(copy)

    def _roomiest(self, nodes: Collection[NodeId], nbytes: int) -> NodeId | None:
        """Of these nodes the one with most room, if that is enough."""
        node = max(nodes, key=lambda one: (self._room[one], one), default=None)
        return node if node is not None and self._room[node] >= nbytes else None

    def _lose(self, copies: Iterable[LastCopy]) -> None:
        self.lost += copies
