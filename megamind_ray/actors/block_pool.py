"""The pool of one load on one node: credits, mailboxes, and when a block may go. Threads, no Ray (docs/design/0007)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from megamind_ray.actors.messages import BlockHandle, Consumer, Crc32Array, Delivery
from megamind_ray.core.ids import BlockId, ExtentId, Generation, Rank
from megamind_ray.core.line import Budget, credit_limits
from megamind_ray.errors import CapacityError
from megamind_ray.units import format_bytes

__all__ = ["BlockPool", "PoolClosedError", "PooledBlock"]


class PoolClosedError(Exception):
    """The load on this node has ended; whoever waits for credits or blocks stops. It never leaves the agent."""


@dataclass(slots=True, eq=False)
class PooledBlock:
    """A block in the pool.

    Attributes:
        block: Plan id.
        extent: Plan id of the extent that it was cut from.
        nbytes: Size.
        crc32s: Checksum of each segment, in plan order.
        handle: What keeps the bytes in the pool.
        budget: Which credit its bytes were taken from.
        ranks: That take it from here, also by way of nodes further on.
        waiting: Consumers that have not acked; at 0 the credit goes back and the handle is dropped or kept.
        is_spoiled: A consumer found it damaged: it is not kept.
    """

    block: BlockId
    extent: ExtentId
    nbytes: int
    crc32s: Crc32Array
    handle: BlockHandle
    budget: Budget = "read"
    ranks: tuple[Rank, ...] = ()
    waiting: int = 0
    is_spoiled: bool = False


@dataclass(frozen=True, slots=True)
class _Letter:
    serial: int
    entry: PooledBlock
    ranks: tuple[Rank, ...]

    def delivery(self) -> Delivery:
        entry = self.entry
        return Delivery(
            serial=self.serial,
            block=entry.block,
            extent=entry.extent,
            ranks=self.ranks,
            nbytes=entry.nbytes,
            crc32s=entry.crc32s,
            handle=entry.handle,
        )


@dataclass(slots=True)
class _Mailbox:
    """What one consumer has yet to take, and what it was handed but has not acked.

    ``retired``: it takes no more. ``lost``: whoever asks for it is told that the load has ended.
    """

    queue: deque[_Letter] = field(default_factory=deque)
    handed: dict[int, _Letter] = field(default_factory=dict)
    generation: int = 0
    retired: bool = False
    lost: bool = False


class BlockPool:
    """Blocks of one load on one node.

    All methods may be called from any thread. A block's bytes are reserved before it is put (``reserve``), it is
    announced to its consumers (``publish``), taken and acked by each (``exchange``), and let go with the last ack.

    Attributes:
        peak_bytes: Most that was reserved at a time.
        stale_exchanges: Calls of consumers whose generation is over.
    """

    def __init__(
        self,
        *,
        credit_bytes: int,
        sides: Collection[Budget] = (),
        keep: Iterable[int] = (),
        node: str = "",
        on_used: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Makes an empty pool.

        Args:
            credit_bytes: Most that may be reserved at a time.
            sides: Where blocks of other nodes come from; each has a part of the credit for itself.
            keep: Blocks that stay after the last ack; their bytes are budgeted by the planner, outside the credit.
            node: For messages.
            on_used: Told how many bytes are reserved, whenever that changes; must return at once.
        """
        self._credit_bytes = credit_bytes
        self._limit = credit_limits(credit_bytes, sides)
        self._used: dict[Budget, int] = dict.fromkeys(self._limit, 0)
        self._keep = frozenset(keep)
        self._kept: dict[int, PooledBlock] = {}
        self._mailboxes: dict[Consumer, _Mailbox] = {}
        self._published: set[int] = set()
        self._serial = 0
        self._closed = False
        self._on_used = on_used
        self._node = node
        self._changed = threading.Condition()
        self.peak_bytes = 0
        self.stale_exchanges = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing changes meanwhile but by this thread: consumers are chosen and told in one step, or all change."""
        with self._changed:
            yield

    def divide(self, sides: Collection[Budget]) -> None:
        """Divides the credit anew, where blocks of other nodes come from other sides than before.

        What is in use stays in use, also where that is more than its part by now; then it is waited for.
        """
        with self._changed:
            self._limit = credit_limits(self._credit_bytes, sides)
            self._changed.notify_all()

    def reserve(self, nbytes: int, budget: Budget = "read") -> None:
        """Waits until that many bytes are free and takes them.

        The wait ends with the load (``close``), and a load that makes no progress is ended by its planner.

        Raises:
            CapacityError: More than the budget as a whole.
            PoolClosedError: The load ended meanwhile.
        """
        with self._changed:
            if nbytes > self._limit[budget]:
                raise CapacityError(
                    f"node {self._node}: {format_bytes(nbytes)} of blocks do not fit its pool, where this load may "
                    f"hold {format_bytes(self._limit[budget])} of such at a time; give the node a larger object "
                    "store or lower io.extent_bytes (and io.pool_extent_bytes, where it is set)",
                    where=f"pool of node {self._node}",
                    needed_bytes=nbytes,
                    free_bytes=self._limit[budget],
                )
            self._changed.wait_for(lambda: self._closed or self._used[budget] + nbytes <= self._limit[budget])
            self._raise_if_closed()
            self._use(budget, nbytes)

    def give_back(self, nbytes: int, budget: Budget = "read") -> None:
        """Returns a reservation that led to no block."""
        with self._changed:
            self._use(budget, -nbytes)
            self._changed.notify_all()

    def publish(self, entry: PooledBlock, consumers: Sequence[tuple[Consumer, tuple[Rank, ...]]]) -> None:
        """Announces a block, whose bytes are reserved, to its consumers, with the ranks that each takes it for.

        Raises:
            PoolClosedError: The load ended meanwhile; the caller drops the block.
        """
        with self._changed:
            self._raise_if_closed()
            self._published.add(entry.block)
            entry.ranks = tuple(sorted({rank for _, ranks in consumers for rank in ranks}))
            entry.waiting = len(consumers)
            for consumer, ranks in consumers:
                self._post(entry, consumer, ranks)
            if not consumers:
                self._let_go(entry)
            self._changed.notify_all()

    def exchange(
        self, consumer: Consumer, generation: Generation, *, acked: Sequence[int], limit: int, timeout_s: float
    ) -> tuple[Delivery, ...]:
        """Acks earlier deliveries and takes up to ``limit`` new ones, waiting ``timeout_s`` for the first.

        A call of an older generation is counted and answered with nothing: its acks must not touch what was handed
        to its successor.

        Raises:
            PoolClosedError: The load ended, or the consumer was given up.
        """
        with self._changed:
            mailbox = self._mailbox(consumer)
            self._raise_if_closed(mailbox)
            if generation != mailbox.generation:
                self.stale_exchanges += 1
                return ()
            for serial in acked:
                self._ack(mailbox, serial)
            self._changed.wait_for(
                lambda: self._closed or mailbox.queue or mailbox.lost or mailbox.generation != generation,
                timeout=timeout_s,
            )
            self._raise_if_closed(mailbox)
            if mailbox.generation != generation:
                self.stale_exchanges += 1
                return ()
            letters = [mailbox.queue.popleft() for _ in range(min(limit, len(mailbox.queue)))]
            mailbox.handed.update((letter.serial, letter) for letter in letters)
            return tuple(letter.delivery() for letter in letters)

    def spoil(self, consumer: Consumer, serial: int) -> None:
        """Never keeps a block that a consumer found damaged: others, whose part is whole, may hold it for longer."""
        with self._changed:
            letter = self._mailbox(consumer).handed.get(serial)
            if letter is not None:
                letter.entry.is_spoiled = True

    def reset(self, consumer: Consumer, generation: Generation) -> None:
        """Gives a consumer a new generation and an empty mailbox; all it had counts as acked."""
        with self._changed:
            mailbox = self._mailbox(consumer)
            self._empty(mailbox)
            self._mailboxes[consumer] = _Mailbox(generation=generation)
            # Waiters of the old generation hold the old mailbox: tell them through it.
            mailbox.generation = generation
            self._changed.notify_all()

    def retire(self, consumer: Consumer, generation: Generation) -> None:
        """Closes the mailbox of a consumer that has all it needs.

        Blocks that were read a second time for it may still be on their way; they must not hold credit for ever.
        """
        with self._changed:
            mailbox = self._mailbox(consumer)
            if mailbox.generation == generation:
                self._empty(mailbox)
                mailbox.retired = True
                self._changed.notify_all()

    def lose(
        self, consumer: Consumer, instead: Callable[[tuple[Rank, ...]], Sequence[tuple[Consumer, tuple[Rank, ...]]]]
    ) -> None:
        """Gives a consumer up: what it had yet to take or to ack goes to others, and it gets nothing more.

        Args:
            consumer: A node.
            instead: By the ranks that it was to take a block for, who takes it for which of them now.
        """
        with self._changed:
            mailbox = self._mailbox(consumer)
            letters = (*mailbox.queue, *mailbox.handed.values())
            mailbox.queue.clear()
            mailbox.handed.clear()
            mailbox.retired = mailbox.lost = True
            for letter in letters:
                others = instead(letter.ranks)
                letter.entry.waiting += len(others)
                for other, ranks in others:
                    self._post(letter.entry, other, ranks)
                self._count_down(letter.entry)
            self._changed.notify_all()

    def was_published(self, block: int) -> bool:
        """Whether the block was announced at least once."""
        with self._changed:
            return block in self._published

    @property
    def kept(self) -> dict[int, PooledBlock]:
        """Kept blocks so far, by plan id."""
        with self._changed:
            return dict(self._kept)

    @property
    def used_bytes(self) -> int:
        """Reserved now."""
        with self._changed:
            return sum(self._used.values())

    def close(self) -> dict[int, PooledBlock]:
        """Ends all waits, drops all blocks but the kept ones, and returns those."""
        with self._changed:
            self._closed = True
            self._mailboxes.clear()
            kept, self._kept = self._kept, {}
            self._changed.notify_all()
            return kept

    def _mailbox(self, consumer: Consumer) -> _Mailbox:
        return self._mailboxes.setdefault(consumer, _Mailbox())

    def _post(self, entry: PooledBlock, consumer: Consumer, ranks: tuple[Rank, ...]) -> None:
        mailbox = self._mailbox(consumer)
        if mailbox.retired:
            self._count_down(entry)
            return
        self._serial += 1
        mailbox.queue.append(_Letter(self._serial, entry, ranks))

    def _empty(self, mailbox: _Mailbox) -> None:
        for letter in (*mailbox.queue, *mailbox.handed.values()):
            self._count_down(letter.entry)
        mailbox.queue.clear()
        mailbox.handed.clear()

    def _ack(self, mailbox: _Mailbox, serial: int) -> None:
        letter = mailbox.handed.pop(serial, None)
        if letter is not None:
            self._count_down(letter.entry)
            self._changed.notify_all()

    def _count_down(self, entry: PooledBlock) -> None:
        entry.waiting -= 1
        if entry.waiting == 0:
            self._let_go(entry)

    def _let_go(self, entry: PooledBlock) -> None:
        self._use(entry.budget, -entry.nbytes)
        if entry.block in self._keep and not entry.is_spoiled:
            self._kept[entry.block] = entry
        else:
            entry.handle = None

    def _use(self, budget: Budget, nbytes: int) -> None:
        self._used[budget] += nbytes
        used_bytes = sum(self._used.values())
        self.peak_bytes = max(self.peak_bytes, used_bytes)
        self._on_used(used_bytes)

    def _raise_if_closed(self, mailbox: _Mailbox | None = None) -> None:
        if self._closed or (mailbox is not None and mailbox.lost):
            raise PoolClosedError
