"""Executes the load machine for one load: instructions become actor calls, what comes back becomes events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, Final

import numpy as np
import ray

from megamind_ray.actors.boundary import ActorLostError, Watch, settle
from megamind_ray.actors.fleet import Fleet, GpuKey
from megamind_ray.actors.load_agents import LoadAgents
from megamind_ray.actors.messages import AgentStatus, ExtentFailure, RankResult, WorkerStatus
from megamind_ray.actors.read_orders import ReadOrders
from megamind_ray.actors.recording import LoadRecorder
from megamind_ray.actors.rerouting import Routes, extents_of
from megamind_ray.actors.transfer import Transfer, TransferResult, bytes_by_rank
from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.exchange import PLANNER_LOOK_S
from megamind_ray.core.ids import Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadMachine, LoadState, RankState
from megamind_ray.core.node_loss import Lacking
from megamind_ray.core.progress import RankProgress
from megamind_ray.core.recorder import RecordSettings
from megamind_ray.core.report import Fault
from megamind_ray.errors import MegamindError
from megamind_ray.planning import compile_rank

__all__ = ["LoadDriver"]

_LACKING_S: Final = 2.0  # a rank that does not say within it what it lacks gets all that may be lost


@dataclass(slots=True)
class _Running:
    """A rank's call in flight."""

    rank: Rank
    generation: Generation
    status: WorkerStatus = field(default_factory=WorkerStatus)
    num_failures: int = 0


class LoadDriver:
    """Runs one transfer to its end. ``run`` is called once, on one thread; ``progress`` and ``cancel`` from any.

    Attributes:
        machine: Decides.
        record: What the machine was told and said, and what agents and workers recorded.

    Args:
        transfer: What to move.
        fleet: Who does it.
        config: Of the load.
        record: How agents and workers record it; None: not at all.
        began_s: When the load began, on the clock; None: now.
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
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._transfer = transfer
        self._fleet = fleet
        self._config = config
        self._clock = clock
        plan = transfer.plan
        self.machine = LoadMachine(transfer.facts(max_worker_restarts=config.load.max_worker_restarts))
        self._routes = Routes(plan)
        ranks = plan.tables["ranks"].to_pylist()
        self._gpu_of: dict[Rank, GpuKey] = {Rank(row["rank"]): (NodeId(row["node"]), row["gpu"]) for row in ranks}
        # The very actors of this load: the fleet may have given a GPU to another one before we notice a loss.
        self._workers: dict[Rank, Any] = {rank: fleet.workers[key] for rank, key in self._gpu_of.items()}
        self._bytes_of = bytes_by_rank(plan)
        self._events: deque[ev.Event] = deque()
        self._running: dict[Any, _Running] = {}
        self._results: dict[Rank, RankResult] = {}
        self._faults: list[Fault] = []
        self._worker_watch = Watch[tuple[Rank, Generation]](
            patience_s=config.deadlines.call_s, what="asking a worker for its progress", clock=clock
        )
        self._error: MegamindError | None = None
        self._cancel = threading.Event()
        self._cancel_reason = ""
        self.record = LoadRecorder(transfer, self.machine.facts, settings=record, began_s=began_s, clock=clock)
        self._agents = LoadAgents(transfer.load, fleet, config, record=self.record.settings, clock=clock)
        self._reads = ReadOrders(self._agents, self._routes, config.straggler, clock=clock)
        self._moved: tuple[int, ...] = ()
        self._moved_at_s = clock()

    def cancel(self, reason: str) -> None:
        """Asks the load to stop; ``run`` then raises a ``ClusterError``."""
        self._cancel_reason = reason
        self._cancel.set()

    def progress(self) -> tuple[RankProgress, ...]:
        """How far each rank is, as of the last poll."""
        done = {running.rank: running.status.bytes_done for running in list(self._running.values())}
        return tuple(
            RankProgress(
                rank=rank,
                bytes_done=total if rank in self._results else min(total, done.get(rank, 0)),
                bytes_total=total,
            )
            for rank, total in self._bytes_of.items()
        )

    def run(self) -> TransferResult:
        """Moves everything.

        Raises:
            MegamindError: The load failed or was cancelled; blocks and arenas are given back.
        """
        try:
            self._agents.open(self._transfer, self.machine.nodes)
            self._events += [ev.LoadStarted(), *self._reads.look()]
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
            ranks=tuple(self._results[rank] for rank in sorted(self._results)),
            agents=agents,
            faults=tuple(self._faults),
            generations=dict(self.machine.generations),
            workers=dict(self._workers),
        )

    def _loop(self) -> None:
        while self.machine.state in (LoadState.PLANNED, LoadState.RUNNING):
            if not self._events:
                self._collect()
            while self._events:
                event = self._events.popleft()
                said = tuple(self.machine.handle(event))
                at_s = self.record.took(event, said)
                for instruction in said:
                    self._execute(instruction, at_s)

    def _execute(self, instruction: ins.Instruction, at_s: float) -> None:
        match instruction:
            case ins.StartRank(rank=rank, generation=generation):
                self._start_rank(rank, generation)
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
                self._transfer, lost = self._reads.instead(instruction, self._transfer, self.machine.nodes)
                self._events += lost
            case ins.DropNode():
                self._drop_node(instruction)
            case ins.RecordFault(fault=fault):
                self._faults.append(replace(fault, at_s=at_s))
            case ins.AbortLoad(error=error):
                self._error = error
            case ins.CompleteLoad():
                pass  # the loop ends with the machine's state

    def _start_rank(self, rank: Rank, generation: Generation) -> None:
        program = compile_rank(self._transfer.plan, self._transfer.manifest, rank, self._transfer.load)
        agent = self._agents.handle(self._gpu_of[rank][0])
        ref = self._workers[rank].load.remote(program, agent, generation, self._config, self.record.settings)
        self._running[ref] = _Running(rank, generation)

    def _replace_worker(self, rank: Rank, generation: Generation) -> None:
        node, gpu = self._gpu_of[rank]
        # Until it is there, what comes for it holds no credit: nodes further on would wait for the worker's start.
        load, before = self._transfer.load, Generation(generation - 1)
        retire = {node: lambda agent: agent.retire_rank.remote(load, rank, before)}
        if self._is_lost(self._agents.tell(retire, "dropping a mailbox")):
            return
        try:
            self._workers[rank] = self._fleet.replace_worker(
                (node, gpu), self._workers[rank], unless=lambda: self._agents.is_silent(node)
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
        routes = self._routes.drop(drop, self.machine.nodes)
        self._transfer = self.record.transfer = replace(self._transfer, plan=self._routes.plan)
        for move in drop.moves:
            self._forget(move.rank)
            # Where it is now nobody waits for the answer; if it ever hears this, its memory there is free.
            self._workers[move.rank].abort.remote(self._transfer.load)
            self._gpu_of[move.rank] = key = (move.node, move.gpu)
            self._workers[move.rank] = self._fleet.workers[key]
        self._events += self._agents.join(self._transfer, drop.joins)
        self._events += self._agents.drop(drop.node, routes, drop.joins)
        ready = [
            ev.WorkerReady(rank=move.rank, generation=move.generation)
            for move in drop.moves
            if not self._is_lost(self._agents.reset_rank(move.node, move.rank, move.generation))
        ]
        self._events.append(ev.NodeDropped(node=drop.node, lacking=self._lacking()))
        self._events += ready

    def _lacking(self) -> tuple[Lacking, ...]:
        """What each rank that loads has not got yet; those that do not answer are left out."""
        generations = {
            rank: self.machine.generations[rank]
            for rank, state in self.machine.ranks.items()
            if state is RankState.LOADING
        }
        load = self._transfer.load
        answers = self._agents.settle(
            {
                rank: (self._gpu_of[rank][0], self._workers[rank].missing.remote(load, generation))
                for rank, generation in generations.items()
            },
            "asking a worker what it lacks",
            timeout_s=_LACKING_S,
        )
        return tuple(
            Lacking(rank=rank, generation=generations[rank], extents=extents_of(self._transfer.plan, answer))
            for rank, answer in sorted(answers.items())
            if isinstance(answer, np.ndarray)
        )

    def _is_lost(self, lost: Sequence[ev.Event]) -> bool:
        """Notes who is lost; whether anybody is."""
        self._events += lost
        return bool(lost)

    def _collect(self) -> None:
        """Waits a moment for ranks to end, then asks everybody how they are."""
        if self._cancel.is_set():
            self._events.append(ev.CancelRequested(reason=self._cancel_reason))
            return
        ended: list[Any] = []
        if self._running:
            ended, _ = ray.wait(list(self._running), num_returns=1, timeout=PLANNER_LOOK_S)
        for ref in ended:
            self._rank_ended(ref, self._running.pop(ref))
        if not ended:
            self._events += self._agents.ask()
            self._events += self._reads.look()
            self._ask_workers()
            self._check_stall()

    def _rank_ended(self, ref: Any, running: _Running) -> None:
        rank, generation = running.rank, running.generation
        (answer,) = settle([ref], timeout_s=self._config.deadlines.call_s, what=self._describe(rank))
        if isinstance(answer, RankResult):
            self._results[rank] = answer
            if len(self._results) == len(self._gpu_of):
                self._make_sure_of_all()
            if rank in self._results:
                self._events.append(ev.RankDone(rank=rank, generation=generation))
        elif isinstance(answer, ActorLostError):
            self._lost(rank, answer)
        else:
            # First whether its node is lost: a rank that fails with its agent only has to go elsewhere.
            self._events += self._agents.probe(self._gpu_of[rank][0])
            self._events.append(ev.RankFailed(rank=rank, generation=generation, error=answer))

    def _make_sure_of_all(self) -> None:
        """Before the last rank counts as done: whether the others, some done for long, still live."""
        answers = self._agents.settle(
            {rank: (self._gpu_of[rank][0], self._ask_progress(rank)) for rank in self._results},
            "asking a worker whether it still has its rank",
        )
        for rank, answer in answers.items():
            if isinstance(answer, MegamindError):
                self._lost(rank, answer)

    def _lost(self, rank: Rank, error: MegamindError) -> None:
        """The worker of a rank died or is silent; its call, if one is open, no longer counts."""
        self._forget(rank)
        generation = self.machine.generations[rank]
        # Not its own loss where its whole node is gone.
        self._events += self._agents.probe(self._gpu_of[rank][0])
        self._events.append(ev.WorkerLost(rank=rank, generation=generation, reason=str(error)))

    def _forget(self, rank: Rank) -> None:
        """Nothing that its worker said or will say counts."""
        self._results.pop(rank, None)
        self._running = {ref: one for ref, one in self._running.items() if one.rank != rank}

    def _describe(self, rank: Rank) -> str:
        node, gpu = self._gpu_of[rank]
        return f"rank {rank} on GPU {node}:{gpu}"

    def _ask_workers(self) -> None:
        """Progress of the ranks that load; of those that are done, whether they still live."""
        running = {one.rank: one for one in self._running.values()}
        answers = self._worker_watch.look(
            {
                (rank, self.machine.generations[rank]): partial(self._ask_progress, rank)
                for rank in self._gpu_of
                if rank in running or rank in self._results
            },
            timeout_s=PLANNER_LOOK_S,
        )
        for (rank, _), answer in answers.items():
            if isinstance(answer, ActorLostError):
                self._lost(rank, answer)
            elif isinstance(answer, WorkerStatus) and rank in running:
                one = running[rank]
                one.status = answer
                self._report_failures(answer.failures[one.num_failures :])
                one.num_failures = len(answer.failures)

    def _ask_progress(self, rank: Rank) -> Any:
        return self._workers[rank].progress.remote(self._transfer.load, self.machine.generations[rank])

    def _report_failures(self, failures: tuple[ExtentFailure, ...]) -> None:
        for failure in failures:
            self._events.append(
                ev.ExtentFailed(
                    extent=failure.extent, node=failure.node, error=failure.error, retryable=failure.retryable
                )
            )

    def _check_stall(self) -> None:
        moved = (
            len(self._results),
            sum(one.status.bytes_done for one in self._running.values()),
            self._agents.bytes_read,
        )
        now = self._clock()
        if moved != self._moved:
            self._moved, self._moved_at_s = moved, now
        elif now - self._moved_at_s > self._config.deadlines.stall_s:
            waiting = ", ".join(str(one.rank) for one in self._running.values())
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
        aborts = [] if keep else [worker.abort.remote(load) for worker in self._workers.values()]
        closes = self._agents.close(keep=keep)
        # The other half of the time is for what must come back.
        half_s = until_s - self._config.deadlines.close_s / 2
        self.record.collect({node: self._agents.handle(node) for node in closes}, self._workers, half_s)
        answers = settle(
            [*closes.values(), *aborts],
            timeout_s=max(0.0, until_s - self._clock()),
            what="closing the load on a node or worker",
        )
        if not keep:
            rest_s = max(0.0, until_s - self._clock())
            settle(list(self._running), timeout_s=rest_s, what="waiting for a worker to stop")
        return self._agents.results(dict(zip(closes, answers, strict=False)))
