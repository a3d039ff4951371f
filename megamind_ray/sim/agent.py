"""A node agent in virtual time: reads its units, cuts and puts their blocks, takes in those of other nodes.

The steps, and what waits for what, are those of ``actors.agent_load``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import ceil

from megamind_ray.core.exchange import RELAY_BATCH, RELAY_FETCHES
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.line import Line
from megamind_ray.core.read_queue import ReadQueue
from megamind_ray.core.stragglers import ReadProgress
from megamind_ray.sim.clock import Steps, Task
from megamind_ray.sim.faults import ExtentFault, Failure
from megamind_ray.sim.pool import Consumer, Letter, Pool, PooledBlock
from megamind_ray.sim.work import Block, Unit, block_class
from megamind_ray.sim.world import World

__all__ = ["Agent"]

_ONLY = Generation(0)  # of agents; ranks have others


class Agent:
    """The agent of one node.

    Args:
        node: Its node.
        world: What it works in.
        credit_bytes: Bytes of blocks that may be in its pool at a time.
        peers: Agents of all nodes of the load, itself included; filled by the caller.
        faults: By unit, what fails on this node.

    Attributes:
        pool: Its pool.
        failures: What it could not read, in order; the planner asks for it.
        bytes_read: As planned, for the first time.
        bytes_again: Read once more.
        waited_s: Seconds that its reading threads waited for credit.
        reading_s: Seconds that its reading threads were busy.
        relaying_s: Seconds of taking in blocks of other nodes, summed over those nodes.
        num_relays: Nodes whose blocks it takes in.
    """

    def __init__(
        self,
        node: NodeId,
        world: World,
        *,
        credit_bytes: int,
        peers: Mapping[NodeId, Agent],
        faults: Mapping[int, ExtentFault],
    ) -> None:
        self.node = node
        self._sides = world.routes.line.sides(node, world.work.relays.get(node, ()))
        sides = self._sides if len(world.work.nodes) > 1 else ()
        self.pool = Pool(node, credit_bytes, sides=sides, clock=world.clock, max_samples=world.max_samples)
        self.failures: list[Failure] = []
        self.bytes_read = self.bytes_again = self.num_relays = 0
        self.waited_s = self.reading_s = self.relaying_s = 0.0
        self._world = world
        self._peers = peers
        self._faults = dict(faults)
        self._planned: ReadQueue[Unit] = ReadQueue()
        self._queues = [self._planned]
        self._reading: list[Task] = []
        self._relaying: dict[NodeId, list[Task]] = {}
        self._requests = world.request_limit()

    def start(self) -> None:
        """Begins to read, and to relay from each node that has blocks for this one."""
        for peer in self._world.work.relays.get(self.node, ()):
            self.relay_from(peer)
        self.read_instead(self._world.work.units_of.get(self.node, ()))

    def read_instead(self, units: Iterable[Unit]) -> None:
        """Reads units as planned, for all that need them, behind what it has before it."""
        self._read_all(self._planned, units, None)

    def take_back(self, keep_bytes: int) -> tuple[ExtentId, ...]:
        """What it will not read any more: all that it has not begun, but for the first ``keep_bytes`` of it."""
        return self._planned.take_back(keep_bytes)

    @property
    def reads(self) -> ReadProgress:
        """How far it is with all that it reads."""
        parts = [queue.progress for queue in self._queues]
        return ReadProgress(
            done_bytes=sum(part.done_bytes for part in parts),
            begun_bytes=sum(part.begun_bytes for part in parts),
            waiting_bytes=sum(part.waiting_bytes for part in parts),
        )

    def read_again(self, units: Iterable[Unit], ranks: Collection[Rank]) -> None:
        """Reads units for these ranks; what the node has still before it is left to that."""
        fragment = [
            unit
            for unit in units
            if any(not block.bytes_of.keys().isdisjoint(ranks) for block in unit.blocks)
            and not self._is_pending(unit, ranks)
        ]
        self._queues.append(ReadQueue())
        self._read_all(self._queues[-1], fragment, frozenset(ranks))

    def relay_from(self, peer: NodeId, *, passes_on: bool = False) -> None:
        """Takes in blocks that another node has for ranks of this one, until the load ends.

        Args:
            peer: The other node.
            passes_on: Some of them go on along the line.
        """
        if passes_on:
            self._sides = tuple(sorted({*self._sides, *self._world.routes.line.sides(self.node, [peer])}))
            self.pool.divide(self._sides)
        if peer not in self._relaying and peer in self._peers:
            self.num_relays += RELAY_FETCHES
            self._relaying[peer] = [Task(self._relay(peer)) for _ in range(RELAY_FETCHES)]

    def silenced(self, peer: NodeId) -> None:
        """Another node is gone: nothing comes from it any more. What was on its way holds no credit from now on."""
        for task in self._relaying.get(peer, ()):
            task.end()

    def end(self) -> None:
        """Its node is gone."""
        for tasks in (self._reading, *self._relaying.values()):
            for task in tasks:
                task.end()

    def reroute(self, lost: NodeId, moved: Collection[Rank], sources: Iterable[NodeId]) -> None:
        """A node was given up: what was for it, or through it, goes past it (``actors.agent_load``).

        Args:
            lost: The node.
            moved: Ranks that lived there.
            sources: Nodes that this one is to take blocks from.
        """
        sources = tuple(sources)
        self._sides = tuple(sorted({*self._sides, *self._world.routes.line.sides(self.node, sources)}))
        self.pool.divide(self._sides)
        line = self._world.routes.line
        self.pool.lose(lost, lambda ranks: self._consumers([rank for rank in ranks if rank not in moved], line))
        self.silenced(lost)
        for peer in sources:
            self.relay_from(peer)

    def _is_pending(self, unit: Unit, ranks: Collection[Rank]) -> bool:
        """Whether its own program is still to publish all blocks of the unit that these ranks need."""
        wanted = [block.block for block in unit.blocks if not block.bytes_of.keys().isdisjoint(ranks)]
        return self._planned.holds(unit.extent) and not any(self.pool.was_published(block) for block in wanted)

    def _read_all(self, queue: ReadQueue[Unit], units: Iterable[Unit], ranks: frozenset[Rank] | None) -> None:
        units = tuple(units)
        if queue.add((unit.extent, unit.nbytes, unit) for unit in units):
            for _ in range(min(self._world.num_threads(self.node), len(units))):
                self._reading.append(Task(self._read_units(queue, ranks)))

    def _read_units(self, queue: ReadQueue[Unit], ranks: frozenset[Rank] | None) -> Steps:
        """One thread."""
        for unit in queue:
            yield from self._read_and_publish(queue, unit, ranks)

    def _read_and_publish(self, queue: ReadQueue[Unit], unit: Unit, ranks: frozenset[Rank] | None) -> Steps:
        blocks = [block for block in unit.blocks if self._takers(block, ranks)]
        reserved = sum(block.nbytes for block in blocks)
        clock = self._world.clock
        begin_s = clock.now_s
        yield from self.pool.reserve(reserved)
        self.waited_s += clock.now_s - begin_s
        if not queue.begin(unit.extent):
            self.pool.give_back(reserved)
            return
        begin_s = clock.now_s
        fault = self._faults.pop(unit.unit, None)
        if fault is not None:
            yield clock.sleep(fault.after_s)
            self.pool.give_back(reserved)
            queue.end(unit.extent)
            self.failures.append(Failure(unit.unit, self.node, fault))
            return
        yield from self._world.read(unit, self.node, self._requests, self._world.tracks[self.node].pool)
        if ranks is not None:
            self.bytes_again += unit.nbytes
        else:
            self.bytes_read += unit.nbytes
        yield from self._publish_all(unit, blocks, ranks)
        queue.end(unit.extent)
        self.reading_s += clock.now_s - begin_s

    def _publish_all(self, unit: Unit, blocks: Sequence[Block], ranks: frozenset[Rank] | None) -> Steps:
        world = self._world
        begin_s, cut_s, nbytes = world.clock.now_s, 0.0, 0
        width = world.width(unit)
        for block in blocks:
            block_bytes = block_class(block)
            for run_bytes, size in block.cuts:
                flow_s = world.clock.now_s
                yield world.fluid.flow(world.lane("cut", self.node, run_bytes, block_bytes, width=width)[0], size)
                cut_s += (world.clock.now_s - flow_s) * world.cut_share(self.node, run_bytes, block_bytes)
            nbytes += block.nbytes
            # A node may have been given up since the read began.
            self.pool.publish(PooledBlock(block, block.nbytes, "read"), self._takers(block, ranks))
        # Blocks are cut and put in turns; one span of each is what a reader of the timeline wants to see.
        middle_s, track = begin_s + cut_s, world.tracks[self.node].pool
        world.recorder.span(track, "cut", begin_s, middle_s, nbytes, unit.extent)
        world.recorder.span(track, "put", middle_s, world.clock.now_s, nbytes, unit.extent)

    def _takers(self, block: Block, ranks: frozenset[Rank] | None) -> list[tuple[Consumer, tuple[Rank, ...]]]:
        """Who takes a block; what is read again goes to each node by itself."""
        wanted = [rank for rank in block.bytes_of if ranks is None or rank in ranks]
        return self._consumers(wanted, self._world.routes.line if ranks is None else Line())

    def _consumers(self, ranks: Sequence[Rank], line: Line) -> list[tuple[Consumer, tuple[Rank, ...]]]:
        """Local ranks one by one, others by the node that takes it for them."""
        found: list[tuple[Consumer, tuple[Rank, ...]]] = []
        for node, taken in line.takers(self.node, ranks, self._world.routes.homes).items():
            found += [(rank, (rank,)) for rank in taken] if node == self.node else [(node, taken)]
        return found

    def _relay(self, peer: NodeId) -> Steps:
        world, pool = self._world, self._peers[peer].pool
        call_s, batch = world.host(peer).call_s, RELAY_BATCH * world.work.parts
        acked: list[Letter] = []
        while True:
            yield world.clock.sleep(call_s / 2)
            pool.acknowledge(self.node, _ONLY, acked)
            acked = []
            yield from pool.collect(self.node, _ONLY, batch, acked)
            num_blocks = sum(letter.entry.block.parts for letter in acked)
            num_calls = ceil(num_blocks / RELAY_BATCH)
            take_s = world.host(peer).take_s * (num_blocks - num_calls)
            yield world.fluid.flow(world.lane("call", peer)[0], call_s * (num_calls - 0.5) + take_s)
            for letter in acked:
                yield from self._take_in(peer, letter)

    def _take_in(self, peer: NodeId, letter: Letter) -> Steps:
        """Puts a replica of another node's block into this node's pool, for its ranks and those of nodes further on."""
        world, block, nbytes = self._world, letter.entry.block, letter.entry.nbytes
        budget = world.routes.line.budget(self.node, peer, self._sides)
        yield from self.pool.reserve(nbytes, budget)
        try:
            yield from self._fetch(peer, letter)
        except GeneratorExit:
            self.pool.give_back(nbytes, budget)
            raise
        consumers = self._consumers(letter.ranks, world.routes.line)
        self.pool.publish(PooledBlock(block, nbytes, budget), [one for one in consumers if self._is_on(one[0], peer)])

    def _fetch(self, peer: NodeId, letter: Letter) -> Steps:
        world, block, nbytes = self._world, letter.entry.block, letter.entry.nbytes
        clock = world.clock
        begin_s = clock.now_s
        lane, latency_s = world.lane("wire", peer, self.node)
        yield clock.sleep(latency_s * block.parts)
        yield world.fluid.flow(lane, nbytes)
        there_s = clock.now_s
        world.recorder.span(world.tracks[self.node].wire, "wire", begin_s, there_s, nbytes)
        yield world.fluid.flow(world.lane("put", self.node, block_class(block))[0], nbytes)
        world.recorder.span(world.tracks[self.node].pool, "put", there_s, clock.now_s, nbytes)
        self.relaying_s += clock.now_s - begin_s

    def _is_on(self, consumer: Consumer, source: NodeId) -> bool:
        """Whether a block that came from a node goes on to this consumer: never back the way it came."""
        return not isinstance(consumer, str) or self._world.routes.line.is_beyond(self.node, source, NodeId(consumer))
