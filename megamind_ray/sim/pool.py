"""The pool of one node: credits, mailboxes, and when a block may go. The rules are those of ``actors.block_pool``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from megamind_ray.core.ids import Generation, NodeId, Rank
from megamind_ray.core.line import Budget, credit_limits
from megamind_ray.errors import CapacityError
from megamind_ray.sim.clock import Clock, Limit, Signal, Wait
from megamind_ray.sim.history import StepSeries
from megamind_ray.sim.work import Block
from megamind_ray.units import format_bytes

__all__ = ["Consumer", "Letter", "Pool", "PooledBlock"]

Consumer: TypeAlias = Rank | NodeId


@dataclass(slots=True, eq=False)
class PooledBlock:
    """A block in the pool; at 0 ``waiting`` consumers its credit goes back."""

    block: Block
    nbytes: int
    budget: Budget
    waiting: int = 0


@dataclass(slots=True, eq=False)
class Letter:
    """A block for a consumer, and the ranks that it takes it for."""

    entry: PooledBlock
    ranks: tuple[Rank, ...]


@dataclass(slots=True, eq=False)
class _Mailbox:
    queue: deque[Letter] = field(default_factory=deque)
    handed: set[Letter] = field(default_factory=set)
    generation: int = 0
    retired: bool = False
    changed: Signal = field(default_factory=Signal)

    def emptied(self) -> list[Letter]:
        """What was in it, or handed and not acked; nothing is left."""
        letters = [*self.queue, *sorted(self.handed, key=lambda letter: letter.entry.block.block)]
        self.queue.clear()
        self.handed.clear()
        return letters


class Pool:
    """Blocks of the load on one node.

    Args:
        node: For messages.
        credit_bytes: Most that may be reserved at a time.
        sides: Where blocks of other nodes come from; each has a part of the credit for itself.
        clock: Virtual time.
        max_samples: Most samples of ``series``.

    Attributes:
        series: Bytes reserved over time.
        bytes_sent: Handed to other nodes.
    """

    def __init__(
        self, node: NodeId, credit_bytes: int, *, sides: Collection[Budget], clock: Clock, max_samples: int = 512
    ) -> None:
        self.credit_bytes = credit_bytes
        self.series = StepSeries(max_samples)
        self.bytes_sent = 0
        self._node = node
        self._clock = clock
        self._limits = {budget: Limit(limit) for budget, limit in credit_limits(credit_bytes, sides).items()}
        self._mailboxes: dict[Consumer, _Mailbox] = {}
        self._published: set[int] = set()

    def reserve(self, nbytes: int, budget: Budget = "read") -> Iterable[Wait]:
        """Steps of a task that takes credit.

        Raises:
            CapacityError: It is more than the budget as a whole.
        """
        limit = self._limits[budget]
        if nbytes > limit.limit:
            raise CapacityError(
                f"node {self._node}: {format_bytes(nbytes)} of blocks do not fit its pool, where this load may "
                f"hold {format_bytes(int(limit.limit))} of such at a time; give the node a larger object "
                "store or lower io.extent_bytes (and io.pool_extent_bytes, where it is set)",
                where=f"pool of node {self._node}",
                needed_bytes=nbytes,
                free_bytes=int(limit.limit),
            )
        yield from limit.take(nbytes)
        self._record()

    def divide(self, sides: Collection[Budget]) -> None:
        """Divides the credit anew, where blocks of other nodes come from other sides than before."""
        for budget, limit in credit_limits(self.credit_bytes, sides).items():
            self._limits[budget].limit = limit
            self._limits[budget].give(0)  # to whom now has room

    def give_back(self, nbytes: int, budget: Budget = "read") -> None:
        """Returns credit."""
        self._limits[budget].give(nbytes)
        self._record()

    def publish(self, entry: PooledBlock, consumers: Sequence[tuple[Consumer, tuple[Rank, ...]]]) -> None:
        """Puts a block, whose bytes are reserved, into the mailboxes of its consumers."""
        self._published.add(entry.block.block)
        entry.waiting = len(consumers)
        if not consumers:
            self.give_back(entry.nbytes, entry.budget)
        self._post(entry, consumers)

    def _post(self, entry: PooledBlock, consumers: Sequence[tuple[Consumer, tuple[Rank, ...]]]) -> None:
        for consumer, ranks in consumers:
            mailbox = self._mailbox(consumer)
            if mailbox.retired:
                self._count_down(entry)
                continue
            mailbox.queue.append(Letter(entry, ranks))
            mailbox.changed.notify()

    def acknowledge(self, consumer: Consumer, generation: Generation, letters: Iterable[Letter]) -> None:
        """What a consumer was handed has arrived; nothing happens where its generation is over."""
        mailbox = self._mailbox(consumer)
        if mailbox.generation != generation:
            return
        for letter in letters:
            if letter in mailbox.handed:
                mailbox.handed.remove(letter)
                self._count_down(letter.entry)

    def collect(self, consumer: Consumer, generation: Generation, max_parts: int, into: list[Letter]) -> Iterable[Wait]:
        """Steps of a task that waits until something is there for it, and takes what has up to so many parts.

        At least one block is taken; none where the consumer's generation is over.
        """
        mailbox = self._mailbox(consumer)
        while not mailbox.queue and mailbox.generation == generation:
            yield mailbox.changed.wait
        if mailbox.generation != generation:
            return
        parts = 0
        while mailbox.queue and (not into or parts + mailbox.queue[0].entry.block.parts <= max_parts):
            letter = mailbox.queue.popleft()
            parts += letter.entry.block.parts
            mailbox.handed.add(letter)
            into.append(letter)
        if isinstance(consumer, str):
            self.bytes_sent += sum(letter.entry.nbytes for letter in into)

    def reset(self, consumer: Consumer, generation: Generation) -> None:
        """Gives a consumer a new generation and an empty mailbox; all it had counts as acked."""
        before = self._mailbox(consumer)
        self._mailboxes[consumer] = _Mailbox(generation=generation)
        before.generation = generation
        self._empty(before)
        before.changed.notify()

    def retire(self, consumer: Consumer, generation: Generation) -> None:
        """Closes the mailbox of a consumer that has all it needs."""
        mailbox = self._mailbox(consumer)
        if mailbox.generation == generation:
            mailbox.retired = True
            self._empty(mailbox)

    def lose(
        self, node: NodeId, instead: Callable[[tuple[Rank, ...]], Sequence[tuple[Consumer, tuple[Rank, ...]]]]
    ) -> None:
        """Gives a node up: what it had yet to take or to ack goes to others, and it gets nothing more.

        Args:
            node: Which.
            instead: By the ranks that it was to take a block for, who takes it for which of them now.
        """
        mailbox = self._mailbox(node)
        letters = mailbox.emptied()
        mailbox.retired = True
        for letter in letters:
            others = instead(letter.ranks)
            letter.entry.waiting += len(others)
            self._post(letter.entry, others)
            self._count_down(letter.entry)

    def was_published(self, block: int) -> bool:
        """Whether the block was announced at least once."""
        return block in self._published

    def _mailbox(self, consumer: Consumer) -> _Mailbox:
        mailbox = self._mailboxes.get(consumer)
        if mailbox is None:
            mailbox = self._mailboxes[consumer] = _Mailbox()
        return mailbox

    def _empty(self, mailbox: _Mailbox) -> None:
        for letter in mailbox.emptied():
            self._count_down(letter.entry)

    def _count_down(self, entry: PooledBlock) -> None:
        entry.waiting -= 1
        if entry.waiting == 0:
            self.give_back(entry.nbytes, entry.budget)

    def _record(self) -> None:
        self.series.set(self._clock.now_s, sum(limit.used for limit in self._limits.values()))
