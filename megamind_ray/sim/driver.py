"""Executes the load machine in virtual time: instructions become steps, what comes of them becomes events.

The order of questions and answers is that of ``actors.load_driver``: the planner hears of a rank that ended at once,
looks for failures every ``PLANNER_LOOK_S``, and does one thing at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import LogEntry
from megamind_ray.core.exchange import PLANNER_LOOK_S
from megamind_ray.core.ids import Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadFacts, LoadMachine, LoadState, RankState
from megamind_ray.core.node_loss import Lacking
from megamind_ray.core.report import Fault
from megamind_ray.core.stragglers import StragglerWatch
from megamind_ray.core.timeline import Mark
from megamind_ray.errors import MegamindError, SourceError
from megamind_ray.sim.agent import Agent
from megamind_ray.sim.clock import Action, Signal, Steps, Wait
from megamind_ray.sim.faults import Ended, ExtentFault, Failure, LoadFault, NodeLoss, WorkerLoss
from megamind_ray.sim.history import StepSeries
from megamind_ray.sim.rank import RankRun
from megamind_ray.sim.world import World

__all__ = ["Driver"]

_DIED: Final = "its process died (simulated)"


class Driver:
    """Runs one load.

    Args:
        world: What it works in.
        facts: What the machine knows of the plan.
        config: Deadlines and bounds.
        new_agent: Makes the agent of a node.
        faults: What is to go wrong.

    Attributes:
        machine: Decides.
        log: Every event, when it was handled, and what the machine said.
        agents: By node, those that have a part in the load.
        lost: Agents of nodes that were given up.
        ranks: The last run of each rank.
        series: By rank, bytes in its arena over time.
        recorded: Faults, for the report.
        error: Why the load was given up; None while it was not.
        ended_s: When all was over.
    """

    def __init__(
        self,
        world: World,
        facts: LoadFacts,
        config: Config,
        new_agent: Callable[[NodeId, dict[NodeId, Agent], dict[int, ExtentFault]], Agent],
        faults: Sequence[LoadFault],
    ) -> None:
        self.machine = LoadMachine(facts)
        self.log: list[LogEntry] = []
        self.ranks: dict[Rank, RankRun] = {}
        self.series = {Rank(rank): StepSeries(world.max_samples) for rank in range(len(world.work.node_of_rank))}
        self.recorded: list[Fault] = []
        self.error: MegamindError | None = None
        self.ended_s = 0.0
        self._world = world
        self._config = config
        self._new_agent = new_agent
        self.agents: dict[NodeId, Agent] = {}
        self.lost: list[Agent] = []
        self._gone = [fault for fault in faults if isinstance(fault, NodeLoss)]
        self._noticed_s: dict[NodeId, float] = {}
        self._silent: deque[NodeId] = deque()
        self._losses = [fault for fault in faults if isinstance(fault, WorkerLoss)]
        self._extent_faults = [fault for fault in faults if isinstance(fault, ExtentFault)]
        self._watch = StragglerWatch(config.straggler)
        self._events: deque[ev.Event] = deque()
        self._ended: deque[Ended] = deque()
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
        for node in self.machine.nodes:
            self._add(node)
        for loss in self._losses:
            self._world.clock.at(loss.at_s, self._killer(loss))
        for gone in self._gone:
            self._world.clock.at(gone.at_s, partial(self._go, gone))
        yield self._world.clock.sleep(self._call_s)  # programs are handed to all agents at once
        self._look()
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
                clock.at(clock.now_s + self._call_s / 2, partial(self._start_reads, node))
                yield from self._call(node)
            case ins.ReplaceWorker(rank=rank, generation=generation):
                yield from self._replace(rank, generation)
            case ins.ReadAgain():
                yield from self._read_again(instruction)
            case ins.TakeBack(node=node, keep_bytes=keep_bytes):
                if (yield from self._call(node)):
                    extents = self.agents[node].take_back(keep_bytes)
                    self._events.append(ev.ReadsTakenBack(node=node, extents=extents))
            case ins.ReadInstead():
                yield from self._read_instead(instruction)
            case ins.DropNode():
                yield from self._drop(instruction)
            case ins.RecordFault(fault=fault):
                self.recorded.append(replace(fault, at_s=clock.now_s))
                self._world.recorder.marks.append(Mark(at_s=clock.now_s, kind=fault.kind, text=fault.where))
            case ins.AbortLoad(error=error):
                self.error = error
            case ins.CompleteLoad():
                pass

    def _read_again(self, instruction: ins.ReadAgain) -> Steps:
        work, node = self._world.work, instruction.node
        for home in sorted({self._world.routes.homes[rank] for rank in instruction.ranks} - {node}):
            if (yield from self._call(home)):
                self.agents[home].relay_from(node)
        if (yield from self._call(node)):
            self.agents[node].read_again([work.unit(extent) for extent in instruction.extents], instruction.ranks)

    def _read_instead(self, order: ins.ReadInstead) -> Steps:
        units = [self._world.work.unit(extent) for extent in order.extents]
        sources = self._world.routes.give(order.node, units)
        answering = yield from self._call_all(sources)
        for node in answering:
            for source in sources[node]:
                self.agents[node].relay_from(source, passes_on=True)
        if (yield from self._call(order.node)):
            self.agents[order.node].read_instead(units)

    def _drop(self, drop: ins.DropNode) -> Steps:
        """Tells all others, puts ranks in their new places, and asks all ranks what they lack by then."""
        lost = self.agents.pop(drop.node)
        self.lost.append(lost)
        sources = self._world.routes.drop(drop)
        for node in drop.joins:
            self._add(node)
        for move in drop.moves:
            self._results.discard(move.rank)
            self._world.move(move.rank, move.node, move.gpu)
        yield from self._call_all(drop.joins)
        # What is under way to ranks that moved may come from anywhere.
        anywhere = {*drop.joins, *(move.node for move in drop.moves)}
        moved = {move.rank for move in drop.moves}
        for node in (yield from self._call_all(self.agents)):
            whence = [one for one in self.agents if one != node] if node in anywhere else sources.get(node, ())
            self.agents[node].reroute(drop.node, moved, whence)
        ready = []
        for move in drop.moves:
            if (yield from self._call(move.node)):
                self.agents[move.node].pool.reset(move.rank, move.generation)
                ready.append(ev.WorkerReady(rank=move.rank, generation=move.generation))
        yield self._world.clock.sleep(self._call_s)
        self._events.append(ev.NodeDropped(node=drop.node, lacking=self._lacking()))
        self._events += ready

    def _lacking(self) -> tuple[Lacking, ...]:
        """What each rank that loads has not got yet; those on a node that is gone do not answer."""
        return tuple(
            Lacking(rank=rank, generation=run.generation, extents=run.missing)
            for rank, run in sorted(self.ranks.items())
            if self.machine.ranks[rank] is RankState.LOADING and not run.is_dead
        )

    def _replace(self, rank: Rank, generation: Generation) -> Steps:
        home = self._world.routes.homes[rank]
        self.agents[home].pool.retire(rank, Generation(generation - 1))
        yield self._world.clock.sleep(self._restart_s.get(rank, 0.0))
        if (yield from self._call(home)):
            self.agents[home].pool.reset(rank, generation)
            self._events.append(ev.WorkerReady(rank=rank, generation=generation))

    def _call(self, node: NodeId) -> Generator[Wait, None, bool]:
        """Steps of a call to a node's agent; gives whether it answers."""
        return bool((yield from self._call_all([node])))

    def _call_all(self, nodes: Iterable[NodeId]) -> Generator[Wait, None, list[NodeId]]:
        """Steps of calls to several agents at a time; gives those that answer. The others are waited for until lost."""
        clock = self._world.clock
        yield clock.sleep(self._call_s)
        answering = []
        for node in tuple(nodes):
            if node in self._noticed_s:
                yield clock.sleep(max(0.0, self._noticed_s[node] - clock.now_s))
                self._events.append(self._loss(node))
            else:
                answering.append(node)
        return answering

    def _add(self, node: NodeId) -> None:
        self.agents[node] = self._new_agent(node, self.agents, self.faults_on(node))

    def _start_reads(self, node: NodeId) -> None:
        if node not in self._noticed_s:
            self.agents[node].start()

    def _go(self, gone: NodeLoss) -> None:
        """A node goes; the planner hears of it later."""
        clock, node = self._world.clock, gone.node
        self._noticed_s[node] = clock.now_s + gone.noticed_after_s
        for agent in self.agents.values():
            agent.silenced(node)
        if node in self.agents:
            self.agents[node].end()
        for rank, run in self.ranks.items():
            if self._world.routes.homes[rank] == node:
                run.end()
        clock.at(self._noticed_s[node], partial(self._notice, node))

    def _notice(self, node: NodeId) -> None:
        self._silent.append(node)
        self._news.notify()

    def _loss(self, node: NodeId) -> ev.AgentLost:
        return ev.AgentLost(node=node, reason="no sign of life (simulated)")

    def _collect(self) -> Steps:
        """Waits a moment for ranks to end, then asks everybody how they are."""
        clock = self._world.clock
        if not self._ended and not self._silent:
            woken = Signal()
            clock.at(clock.now_s + PLANNER_LOOK_S, woken.notify)
            self._news = woken
            yield woken.wait
        if self._silent:
            self._events.append(self._loss(self._silent.popleft()))
            return
        if self._ended:
            yield from self._rank_ended(self._ended.popleft())
            return
        yield clock.sleep(self._call_s)
        self._ask()
        self._check_stall()

    def _rank_ended(self, ended: Ended) -> Steps:
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
        for rank, run in list(self.ranks.items()):
            if not run.is_dead:
                continue
            home = self._world.routes.homes[rank]
            if home in self._noticed_s:
                self._results.discard(rank)
                yield from self._call(home)
            else:
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
        self._look()

    def _look(self) -> None:
        """Whether a reader is slow."""
        heard = [node for node in self.agents if node not in self._noticed_s]
        progress = {node: agent.reads for node, agent in self.agents.items()}
        slow = self._watch.look(self._world.clock.now_s, progress, heard=heard)
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
            sum(agent.bytes_read for agent in (*self.agents.values(), *self.lost)),
        )
        now_s, stall_s = self._world.clock.now_s, self._config.deadlines.stall_s
        if moved != self._moved:
            self._moved, self._moved_at_s = moved, now_s
        elif now_s - self._moved_at_s > stall_s:
            self._events.append(ev.DeadlinePassed(what=f"no byte moved for {stall_s:g} s (deadlines.stall_s)"))

    def _starter(self, rank: Rank, generation: Generation) -> Action:
        agent = self._agent_of(rank)

        def start() -> None:
            if agent.node in self._noticed_s:
                return
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
            ended = Ended(loss.rank, run.generation, _DIED)
            self._world.clock.at(self._world.clock.now_s + loss.noticed_after_s, lambda: self._tell(ended))

        return kill

    def _rank_done(self, run: RankRun) -> None:
        clock = self._world.clock
        clock.at(clock.now_s + self._call_s / 2, lambda: self._tell(Ended(run.rank, run.generation)))

    def _tell(self, ended: Ended) -> None:
        self._ended.append(ended)
        self._news.notify()

    def _agent_of(self, rank: Rank) -> Agent:
        return self.agents[self._world.routes.homes[rank]]
