"""Executes the load machine in virtual time: instructions become steps, what comes of them becomes events.

The order of questions and answers is that of ``actors.load_driver``: the planner hears of a rank that ended at once,
looks for failures every ``PLANNER_LOOK_S``, and does one thing at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import LogEntry
from megamind_ray.core.exchange import PLANNER_LOOK_S
from megamind_ray.core.ids import Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadMachine, LoadState
from megamind_ray.core.report import Fault
from megamind_ray.core.stragglers import StragglerWatch
from megamind_ray.core.timeline import Mark
from megamind_ray.errors import MegamindError, SourceError
from megamind_ray.sim.agent import Agent
from megamind_ray.sim.clock import Action, Signal, Steps, Task
from megamind_ray.sim.faults import ExtentFault, Failure, WorkerLoss
from megamind_ray.sim.history import StepSeries
from megamind_ray.sim.rank import RankRun
from megamind_ray.sim.world import World

__all__ = ["Driver"]

_DIED: Final = "its process died (simulated)"


@dataclass(slots=True)
class _Ended:
    """A rank's call that came to its end, well or not."""

    rank: Rank
    generation: Generation
    reason: str | None = None


class Driver:
    """Runs one load.

    Args:
        world: What it works in.
        config: Deadlines and bounds.
        agents: By node.
        faults: What is to go wrong.

    Attributes:
        machine: Decides.
        log: Every event, when it was handled, and what the machine said.
        agents: By node.
        ranks: The last run of each rank.
        series: By rank, bytes in its arena over time.
        recorded: Faults, for the report.
        error: Why the load was given up; None while it was not.
        ended_s: When all was over.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        agents: dict[NodeId, Agent],
        faults: Sequence[WorkerLoss | ExtentFault],
    ) -> None:
        self.machine = LoadMachine(world.work.facts(max_worker_restarts=config.load.max_worker_restarts))
        self.log: list[LogEntry] = []
        self.ranks: dict[Rank, RankRun] = {}
        self.series = {Rank(rank): StepSeries(world.max_samples) for rank in range(len(world.work.node_of_rank))}
        self.recorded: list[Fault] = []
        self.error: MegamindError | None = None
        self.ended_s = 0.0
        self._world = world
        self._config = config
        self.agents = agents
        self._losses = [fault for fault in faults if isinstance(fault, WorkerLoss)]
        self._extent_faults = [fault for fault in faults if isinstance(fault, ExtentFault)]
        self._watch = StragglerWatch(config.straggler)
        self._events: deque[ev.Event] = deque()
        self._ended: deque[_Ended] = deque()
        self._results: set[Rank] = set()
        self._heard: dict[object, int] = {}
        self._news = Signal()
        self._restart_s: dict[Rank, float] = {}
        self._moved: tuple[int, ...] = ()
        self._moved_at_s = 0.0
        # A call between two actors costs the same on all nodes, or else what it costs on the slowest.
        self._call_s = max((world.host(node).call_s for node in world.work.nodes), default=0.0)

    def steps(self) -> Steps:
        """The whole load, as steps of a task."""
        for loss in self._losses:
            self._world.clock.at(loss.at_s, self._killer(loss))
        yield self._world.clock.sleep(self._call_s)  # programs are handed to all agents at once
        self._events.append(ev.LoadStarted())
        while self.machine.state in (LoadState.PLANNED, LoadState.RUNNING):
            if not self._events:
                yield from self._collect()
            while self._events:
                event = self._events.popleft()
                instructions = tuple(self.machine.handle(event))
                self.log.append(LogEntry(at_s=self._world.clock.now_s, event=event, instructions=instructions))
                for instruction in instructions:
                    yield from self._execute(instruction)
        yield self._world.clock.sleep(self._call_s)  # and taken back
        self.ended_s = self._world.clock.now_s

    def _execute(self, instruction: ins.Instruction) -> Steps:
        clock = self._world.clock
        match instruction:
            case ins.StartRank(rank=rank, generation=generation):
                clock.at(clock.now_s + self._call_s / 2, self._starter(rank, generation))
            case ins.StartReads(node=node):
                clock.at(clock.now_s + self._call_s / 2, self.agents[node].start)
                yield clock.sleep(self._call_s)
            case ins.ReplaceWorker(rank=rank, generation=generation):
                self._agent_of(rank).pool.retire(rank, Generation(generation - 1))
                yield clock.sleep(self._restart_s.get(rank, 0.0) + self._call_s)
                self._agent_of(rank).pool.reset(rank, generation)
                self._events.append(ev.WorkerReady(rank=rank, generation=generation))
            case ins.ReadAgain():
                yield from self._read_again(instruction)
            case ins.TakeBack(node=node, keep_bytes=keep_bytes):
                yield clock.sleep(self._call_s)
                extents = self.agents[node].take_back(keep_bytes)
                self._events.append(ev.ReadsTakenBack(node=node, extents=extents))
            case ins.ReadInstead():
                yield from self._read_instead(instruction)
            case ins.RecordFault(fault=fault):
                self.recorded.append(replace(fault, at_s=clock.now_s))
                self._world.recorder.marks.append(Mark(at_s=clock.now_s, kind=fault.kind, text=fault.where))
            case ins.AbortLoad(error=error):
                self.error = error
            case ins.CompleteLoad():
                pass

    def _read_again(self, instruction: ins.ReadAgain) -> Steps:
        clock, work = self._world.clock, self._world.work
        for home in sorted({self._world.routes.homes[rank] for rank in instruction.ranks} - {instruction.node}):
            yield clock.sleep(self._call_s)
            self.agents[home].relay_from(instruction.node)
        yield clock.sleep(self._call_s)
        units = [work.unit(extent) for extent in instruction.extents]
        self.agents[instruction.node].read_again(units, instruction.ranks)

    def _read_instead(self, order: ins.ReadInstead) -> Steps:
        clock, work = self._world.clock, self._world.work
        units = [work.unit(extent) for extent in order.extents]
        yield clock.sleep(self._call_s)  # all are told at once whom to take blocks from
        for source, target in self._world.routes.hops(order.node, units):
            self.agents[target].relay_from(source, passes_on=True)
        yield clock.sleep(self._call_s)
        self.agents[order.node].read_instead(units)

    def _collect(self) -> Steps:
        """Waits a moment for ranks to end, then asks everybody how they are."""
        clock = self._world.clock
        if not self._ended:
            woken = Signal()
            clock.at(clock.now_s + PLANNER_LOOK_S, woken.notify)
            self._news = woken
            yield woken.wait
        if self._ended:
            yield from self._rank_ended(self._ended.popleft())
            return
        yield clock.sleep(self._call_s)
        self._ask()
        self._check_stall()

    def _rank_ended(self, ended: _Ended) -> Steps:
        rank, generation = ended.rank, ended.generation
        if generation != self.machine.generations[rank]:
            return
        if ended.reason is not None:
            self._results.discard(rank)
            self._events.append(ev.WorkerLost(rank=rank, generation=generation, reason=ended.reason))
            return
        self._results.add(rank)
        if len(self._results) == len(self.series):
            yield from self._make_sure_of_all()
        if rank in self._results:
            self._mark_done(rank)
            self._events.append(ev.RankDone(rank=rank, generation=generation))

    def _make_sure_of_all(self) -> Steps:
        """Before the last rank counts as done: whether the others, some done for long, still live."""
        yield self._world.clock.sleep(self._call_s)
        for rank, run in self.ranks.items():
            if run.is_dead:
                self._lost(rank, _DIED)

    def _lost(self, rank: Rank, reason: str) -> None:
        self._results.discard(rank)
        generation = self.machine.generations[rank]
        self._events.append(ev.WorkerLost(rank=rank, generation=generation, reason=reason))

    def _mark_done(self, rank: Rank) -> None:
        mark = Mark(at_s=self._world.clock.now_s, kind="rank_done", text=f"rank {rank}")
        self._world.recorder.marks.append(mark)

    def _ask(self) -> None:
        for agent in self.agents.values():
            self._report(agent.node, agent.failures)
        for run in self.ranks.values():
            self._report((run.rank, run.generation), run.failures)
        slow = self._watch.look(self._world.clock.now_s, {agent.node: agent.reads for agent in self.agents.values()})
        if slow is not None:
            self._events.append(ev.ReaderSlow(node=slow.node, paces=slow.paces))

    def _report(self, who: object, failures: list[Failure]) -> None:
        for failure in failures[self._heard.get(who, 0) :]:
            what = f"extent {failure.fault.extent} cannot be read on node {failure.node} (simulated)"
            error = SourceError(what, file=f"extent {failure.fault.extent}")
            self._events.append(
                ev.ExtentFailed(
                    extent=self._world.work.units[failure.unit].extent,
                    node=failure.node,
                    error=error,
                    retryable=failure.fault.retryable,
                )
            )
        self._heard[who] = len(failures)

    def _check_stall(self) -> None:
        moved = (
            len(self._results),
            sum(run.bytes_done for run in self.ranks.values()),
            sum(agent.bytes_read for agent in self.agents.values()),
        )
        now_s, stall_s = self._world.clock.now_s, self._config.deadlines.stall_s
        if moved != self._moved:
            self._moved, self._moved_at_s = moved, now_s
        elif now_s - self._moved_at_s > stall_s:
            self._events.append(ev.DeadlinePassed(what=f"no byte moved for {stall_s:g} s (deadlines.stall_s)"))

    def _starter(self, rank: Rank, generation: Generation) -> Action:
        agent = self._agent_of(rank)

        def start() -> None:
            self.ranks[rank] = RankRun(
                rank,
                generation,
                self._world,
                agent,
                faults={} if generation else self.faults_on(agent.node),
                on_done=self._rank_done,
                series=self.series[rank],
            )

        return start

    def faults_on(self, node: NodeId) -> dict[int, ExtentFault]:
        """By unit, what fails on a node."""
        unit = self._world.work.unit_of_extent
        return {int(unit[fault.extent]): fault for fault in self._extent_faults if fault.node == node}

    def _killer(self, loss: WorkerLoss) -> Action:
        def kill() -> None:
            run = self.ranks.get(loss.rank)
            if run is None:  # it dies as it is started
                self._world.clock.at(self._world.clock.now_s + self._call_s, kill)
                return
            run.end()
            self._restart_s[loss.rank] = loss.restart_s
            ended = _Ended(loss.rank, run.generation, _DIED)
            self._world.clock.at(self._world.clock.now_s + loss.noticed_after_s, lambda: self._tell(ended))

        return kill

    def _rank_done(self, run: RankRun) -> None:
        clock = self._world.clock
        clock.at(clock.now_s + self._call_s / 2, lambda: self._tell(_Ended(run.rank, run.generation)))

    def _tell(self, ended: _Ended) -> None:
        self._ended.append(ended)
        self._news.notify()

    def _agent_of(self, rank: Rank) -> Agent:
        return self.agents[self._world.routes.homes[rank]]


def run_driver(world: World, driver: Driver) -> float:
    """Runs a load to its end; gives the seconds that it took."""
    task = Task(driver.steps())
    while not task.is_done and world.fluid.advance():
        pass
    assert task.is_done, "the planner looks around for ever"
    return driver.ended_s
