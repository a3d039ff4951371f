"""A rank in virtual time: reads its own units on threads, takes blocks from its node's agent meanwhile.

The steps, and what waits for what, are those of ``actors.rank_load``. Blocks of one exchange are put in place one after
the other and acknowledged with the next, so they are one flow.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from math import ceil

from megamind_ray.core.exchange import RANK_BATCH
from megamind_ray.core.ids import ExtentId, Generation, Rank
from megamind_ray.core.tracks import rank_track
from megamind_ray.sim.agent import Agent
from megamind_ray.sim.clock import Signal, Steps, Task, Wait
from megamind_ray.sim.faults import ExtentFault, Failure
from megamind_ray.sim.history import StepSeries
from megamind_ray.sim.pool import Letter
from megamind_ray.sim.work import Unit
from megamind_ray.sim.world import World

__all__ = ["RankRun"]


class RankRun:
    """One generation of a rank.

    Args:
        rank: Which.
        generation: Of it.
        world: What it works in.
        agent: Of its node.
        faults: By unit, what fails when the rank reads it.
        on_done: Called when nothing is missing and the agent was told.
        series: Where its bytes over time are kept.

    Attributes:
        failures: Units it could not read, in order; the planner asks for it.
        bytes_direct: Arrived by its own reads.
        bytes_pool: Arrived from the pool.
        bytes_read: Read from storage.
        is_dead: Its worker died.
        seconds: By step.
    """

    def __init__(
        self,
        rank: Rank,
        generation: Generation,
        world: World,
        agent: Agent,
        *,
        faults: Mapping[int, ExtentFault],
        on_done: Callable[[RankRun], None],
        series: StepSeries,
    ) -> None:
        self.rank = rank
        self.generation = generation
        self.failures: list[Failure] = []
        self.bytes_direct = self.bytes_pool = self.bytes_read = 0
        self.is_dead = False
        self.seconds = {"read": 0.0, "wait": 0.0, "copy": 0.0, "total": 0.0}
        self._world = world
        self._agent = agent
        self._faults = dict(faults)
        self._on_done = on_done
        self._series = series
        self._units = world.work.units_of.get(rank, ())
        own = {block.block for unit in self._units for block in unit.blocks}
        self._missing = {block.block for block in world.work.blocks_of.get(rank, ())}
        self._missing_direct = own & self._missing
        self._requests = world.request_limit()
        self._num_readers = min(world.num_threads(rank), len(self._units))
        self._changed = Signal()
        self._began_s = world.clock.now_s
        series.set(self._began_s, 0.0)
        queue = iter(self._units)
        self._tasks = [Task(self._read_units(queue)) for _ in range(self._num_readers)]
        self._tasks.append(Task(self._receive()))

    @property
    def bytes_done(self) -> int:
        """Bytes in its arena."""
        return self.bytes_direct + self.bytes_pool

    @property
    def missing(self) -> tuple[ExtentId, ...]:
        """Extents of which some block has not arrived, ascending."""
        work = self._world.work
        return tuple(sorted({work.units[work.blocks[block].unit].extent for block in self._missing}))

    def end(self) -> None:
        """Its worker dies."""
        self.is_dead = True
        for task in self._tasks:
            task.end()

    def _receive(self) -> Steps:
        world, clock = self._world, self._world.clock
        call_s = world.host(self._agent.node).call_s
        acked: list[Letter] = []
        while self._missing:
            if self.failures or not self._num_readers or len(self._missing) > len(self._missing_direct):
                acked = yield from self._exchange(call_s, acked)
            else:
                yield self._changed.wait
        yield clock.sleep(call_s / 2)
        self._agent.pool.retire(self.rank, self.generation)
        yield clock.sleep(call_s / 2)
        self.seconds["total"] = clock.now_s - self._began_s
        self._on_done(self)

    def _exchange(self, call_s: float, acked: list[Letter]) -> Generator[Wait, None, list[Letter]]:
        """Acks one batch and takes the next, puts it in place; gives what to ack with the next call."""
        world, clock, pool, track = self._world, self._world.clock, self._agent.pool, rank_track(self.rank)
        begin_s = clock.now_s
        yield clock.sleep(call_s / 2)
        pool.acknowledge(self.rank, self.generation, acked)
        batch: list[Letter] = []
        yield from pool.collect(self.rank, self.generation, RANK_BATCH * world.work.parts, batch)
        num_blocks = sum(letter.entry.block.parts for letter in batch)
        num_calls = ceil(num_blocks / RANK_BATCH)
        take_s = world.host(self._agent.node).take_s * (num_blocks - num_calls)
        yield world.fluid.flow(world.lane("call", self._agent.node)[0], call_s * (num_calls - 0.5) + take_s)
        there_s = clock.now_s
        self.seconds["wait"] += there_s - begin_s
        world.recorder.span(track, "wait", begin_s, there_s, 0)
        fresh = [letter.entry.block for letter in batch if letter.entry.block.block in self._missing]
        nbytes = sum(block.bytes_of[self.rank] for block in fresh)
        if fresh:
            lane, _ = world.lane("copy", self.rank)
            yield world.fluid.flow(lane, nbytes)
            self._arrived([block.block for block in fresh])
            self.bytes_pool += nbytes
            self.seconds["copy"] += clock.now_s - there_s
            world.recorder.span(track, "copy", there_s, clock.now_s, nbytes)
            self._series.set(clock.now_s, self.bytes_done)
        return batch

    def _read_units(self, queue: Iterator[Unit]) -> Steps:
        """One thread."""
        for unit in queue:
            yield from self._read(unit)
        self._num_readers -= 1
        self._changed.notify()

    def _read(self, unit: Unit) -> Steps:
        world, clock, node = self._world, self._world.clock, self._agent.node
        begin_s = clock.now_s
        fault = self._faults.pop(unit.unit, None)
        if fault is not None:
            yield clock.sleep(fault.after_s)
            self.failures.append(Failure(unit.unit, node, fault))
            self._changed.notify()
            return
        yield from world.read(unit, node, self._requests, rank_track(self.rank))
        self.bytes_read += unit.nbytes
        read_s = clock.now_s
        nbytes = sum(block.nbytes for block in unit.blocks if block.block in self._missing)
        lane, _ = world.lane("place", self.rank, width=world.width(unit))
        yield world.fluid.flow(lane, nbytes)
        self._arrived([block.block for block in unit.blocks])
        self.bytes_direct += nbytes
        self.seconds["read"] += clock.now_s - begin_s
        track = rank_track(self.rank)
        world.recorder.span(track, "read", begin_s, read_s, unit.nbytes, unit.extent)
        world.recorder.span(track, "copy", read_s, clock.now_s, nbytes, unit.extent)
        self._series.set(clock.now_s, self.bytes_done)

    def _arrived(self, blocks: list[int]) -> None:
        self._missing.difference_update(blocks)
        self._missing_direct.difference_update(blocks)
        self._changed.notify()
