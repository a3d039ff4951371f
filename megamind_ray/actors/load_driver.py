"""Executes the load machine for one load: instructions become actor calls, what comes back becomes events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

from megamind_ray.actors.boundary import settle
from megamind_ray.actors.fleet import Fleet
from megamind_ray.actors.journal import is_journaled
from megamind_ray.actors.load_agents import LoadAgents
from megamind_ray.actors.load_ranks import LoadRanks
from megamind_ray.actors.messages import AgentStatus
from megamind_ray.actors.read_orders import ReadOrders
from megamind_ray.actors.recording import LoadRecorder
from megamind_ray.actors.standing import Standing
from megamind_ray.actors.transfer import Transfer, TransferResult
from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import LogEntry
from megamind_ray.core.ids import Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadState
from megamind_ray.core.progress import RankProgress
from megamind_ray.core.recorder import RecordSettings
from megamind_ray.errors import MegamindError

__all__ = ["LoadDriver"]


class LoadDriver:
    """Runs one transfer to its end. ``run`` or ``resume`` is called once, on one thread; the others from any.

    Attributes:
        machine: Decides.
        was_given_up: An earlier planner was about to end the load.
        record: What the machine was told and said, and what agents and workers recorded.

    Args:
        transfer: What to move.
        fleet: Who does it.
        config: Of the load.
        record: How agents and workers record it; None: not at all.
        began_s: When the load began, on the clock; None: now.
        entries: What an earlier planner's machine was told.
        journal: Given the log whenever something is in it that a successor must know, before anything is done about it.
        clock: Monotonic.
    """

    def __init__(
        self,
        transfer: Transfer,
        fleet: Fleet,
        config: Config,
        *,
        record: RecordSettings | None = None,
        began_s: float | None = None,
        entries: Sequence[LogEntry] = (),
        journal: Callable[[Sequence[LogEntry]], None] = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._journal = journal
        max_restarts = config.load.max_worker_restarts
        self._standing = Standing(transfer, max_worker_restarts=max_restarts, entries=entries)
        self.machine = self._standing.machine
        self.was_given_up = self.machine.state is LoadState.FAILED
        self._gpu_of = self._standing.gpu_of
        self._events: deque[ev.Event] = deque()
        self._faults = self._standing.faults
        self._error = self._standing.error
        self._cancel = threading.Event()
        self._cancel_reason = ""
        self.record = LoadRecorder(
            self._transfer,
            self.machine.facts,
            settings=record,
            began_s=began_s,
            clock=clock,
            entries=self._standing.entries,
        )
        settings = self.record.settings
        self._agents = LoadAgents(transfer.load, fleet, config, record=settings, clock=clock)
        self._ranks = LoadRanks(self._standing, fleet, config, self._agents, record=settings, clock=clock)
        self._reads = ReadOrders(self._agents, config.straggler, clock=clock)
        self._moved: tuple[int, ...] = ()
        self._moved_at_s = clock()

    @property
    def _transfer(self) -> Transfer:
        return self._standing.transfer

    def cancel(self, reason: str) -> None:
        """Asks the load to stop; ``run`` then raises a ``ClusterError``."""
        self._cancel_reason = reason
        self._cancel.set()

    def progress(self) -> tuple[RankProgress, ...]:
        """How far each rank is, as of the last poll."""
        return self._ranks.progress()

    def run(self) -> TransferResult:
        """Moves everything.

        Raises:
            MegamindError: The load failed or was cancelled; blocks and arenas are given back.
        """
        return self._carry_out(self._open)

    def resume(self, reason: str) -> TransferResult:
        """Takes up what an earlier planner began: with what has arrived by now, and without what was lost meanwhile.

        Args:
            reason: How that planner was lost.

        Raises:
            MegamindError: As ``run``.
        """
        return self._carry_out(partial(self._take_up, reason))

    def _open(self) -> None:
        self._agents.open(self._transfer, self.machine.nodes)
        self._events += [ev.LoadStarted(), *self._reads.look()]

    def _take_up(self, reason: str) -> None:
        # Nodes that were given up may live, and so may ranks that moved away from there.
        for node in self._standing.given_up & self._fleet.agents.keys():
            self._fleet.end_agent(node, self._fleet.agents[node])
        for key in self._fleet.workers.keys() & set(self._standing.left):
            self._fleet.workers[key].abort.remote(self._transfer.load)
        lost = self._agents.join(self._transfer, self.machine.nodes)
        self._events += [ev.PlannerRestarted(reason=reason, lacking=self._ranks.lacking()), *lost, *self._reads.look()]

    def _carry_out(self, begin: Callable[[], None]) -> TransferResult:
        try:
            begin()
            self._loop()
        except BaseException:
            self._close(keep=False)
            raise
        if self._error is not None:
            self._close(keep=False)
            raise self._error
        agents = self._close(keep=True)
        return TransferResult(
            plan=self._transfer.plan,
            ranks=tuple(result for _, result in sorted(self._ranks.results.items())),
            agents=agents,
            faults=tuple(self._faults),
            generations=dict(self.machine.generations),
            workers=dict(self._ranks.workers),
        )

    def _loop(self) -> None:
        while self.machine.state in (LoadState.PLANNED, LoadState.RUNNING):
            if not self._events:
                self._collect()
            while self._events:
                event = self._events.popleft()
                if self._standing.was_heard(event):
                    continue
                said = tuple(self.machine.handle(event))
                at_s = self.record.took(event, said)
                if is_journaled(event):
                    self._journal(self.record.entries)
                for instruction in said:
                    self._execute(instruction, at_s)

    def _execute(self, instruction: ins.Instruction, at_s: float) -> None:
        match instruction:
            case ins.StartRank(rank=rank, generation=generation):
                self._events += self._ranks.start(rank, generation)
            case ins.StartReads(node=node):
                load = self._transfer.load
                self._events += self._agents.tell(
                    {node: lambda agent: agent.start_reads.remote(load)}, "starting reads"
                )
            case ins.ReplaceWorker(rank=rank, generation=generation):
                self._replace_worker(rank, generation)
            case ins.ReadAgain(ranks=ranks):
                homes = {self._gpu_of[rank][0] for rank in ranks}
                self._events += self._reads.again(instruction, self._transfer, homes)
            case ins.TakeBack():
                self._events += self._reads.take_back(instruction)
            case ins.ReadInstead():
                sources = self._standing.give(instruction)
                self.record.transfer = self._transfer
                self._events += self._reads.instead(instruction, self._transfer, sources)
            case ins.DropNode():
                self._drop_node(instruction)
            case ins.RecordFault(fault=fault):
                self._faults.append(replace(fault, at_s=at_s))
            case ins.AbortLoad(error=error):
                self._error = error
            case ins.CompleteLoad():
                pass  # the loop ends with the machine's state

    def _replace_worker(self, rank: Rank, generation: Generation) -> None:
        node, gpu = self._gpu_of[rank]
        # Until it is there, what comes for it holds no credit: nodes further on would wait for the worker's start.
        load, before = self._transfer.load, Generation(generation - 1)
        retire = {node: lambda agent: agent.retire_rank.remote(load, rank, before)}
        if self._is_lost(self._agents.tell(retire, "dropping a mailbox")):
            return
        try:
            self._ranks.workers[rank] = self._fleet.replace_worker(
                (node, gpu), self._ranks.workers.get(rank), unless=lambda: self._agents.is_silent(node)
            )
        except MegamindError as error:
            # The node may have gone meanwhile; a worker that cannot be started elsewhere ends the load.
            self._events += self._agents.probe(node)
            self._events.append(ev.RankFailed(rank=rank, generation=generation, error=error))
            return
        if not self._is_lost(self._agents.reset_rank(node, rank, generation)):
            self._events.append(ev.WorkerReady(rank=rank, generation=generation))

    def _drop_node(self, drop: ins.DropNode) -> None:
        """Tells all others, puts ranks in their new places, and asks all ranks what they lack by then."""
        routes = self._standing.drop(drop)
        self.record.transfer = self._transfer
        self._ranks.move([move.rank for move in drop.moves])
        self._events += self._agents.join(self._transfer, drop.joins)
        self._events += self._agents.drop(drop.node, routes, drop.joins)
        ready = [
            ev.WorkerReady(rank=move.rank, generation=move.generation)
            for move in drop.moves
            if not self._is_lost(self._agents.reset_rank(move.node, move.rank, move.generation))
        ]
        self._events.append(ev.NodeDropped(node=drop.node, lacking=self._ranks.lacking()))
        self._events += ready

    def _is_lost(self, lost: Sequence[ev.Event]) -> bool:
        """Notes who is lost; whether anybody is."""
        self._events += lost
        return bool(lost)

    def _collect(self) -> None:
        """Waits a moment for ranks to end, then asks everybody how they are."""
        if self._cancel.is_set():
            self._events.append(ev.CancelRequested(reason=self._cancel_reason))
            return
        ended = self._ranks.wait()
        if ended is None:
            self._events += self._agents.ask()
            self._events += self._reads.look()
            self._events += self._ranks.ask()
            self._check_stall()
        else:
            self._events += ended

    def _check_stall(self) -> None:
        moved = (*self._ranks.moved, self._agents.bytes_read)
        now = self._clock()
        if moved != self._moved:
            self._moved, self._moved_at_s = moved, now
        elif now - self._moved_at_s > self._config.deadlines.stall_s:
            waiting = ", ".join(map(str, self._ranks.waiting))
            self._events.append(
                ev.DeadlinePassed(
                    what=f"no byte moved for {self._config.deadlines.stall_s:g} s (deadlines.stall_s) while ranks "
                    f"{waiting} still waited"
                )
            )

    def _close(self, *, keep: bool) -> dict[NodeId, AgentStatus]:
        """Ends the load on all agents, and on failure on all workers, within ``deadlines.close_s``.

        The arenas of all workers that answer in time are free when it returns.
        """
        until_s = self._clock() + self._config.deadlines.close_s
        load = self._transfer.load
        aborts = [] if keep else [worker.abort.remote(load) for worker in self._ranks.workers.values()]
        closes = self._agents.close(keep=keep)
        # The other half of the time is for what must come back.
        half_s = until_s - self._config.deadlines.close_s / 2
        self.record.collect({node: self._agents.handle(node) for node in closes}, self._ranks.workers, half_s)
        answers = settle(
            [*closes.values(), *aborts],
            timeout_s=max(0.0, until_s - self._clock()),
            what="closing the load on a node or worker",
        )
        if not keep:
            rest_s = max(0.0, until_s - self._clock())
            settle(self._ranks.calls, timeout_s=rest_s, what="waiting for a worker to stop")
        return self._agents.results(dict(zip(closes, answers, strict=False)))
