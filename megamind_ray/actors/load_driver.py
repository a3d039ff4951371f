"""Executes the load machine for one load: instructions become actor calls, what comes back becomes events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any

import pyarrow.compute as pc
import ray

from megamind_ray.actors.boundary import ActorLostError, Watch, settle, wait_for, wait_for_all
from megamind_ray.actors.fleet import Fleet, GpuKey
from megamind_ray.actors.messages import AgentStatus, ExtentFailure, RankResult, WorkerStatus
from megamind_ray.actors.recording import LoadRecorder
from megamind_ray.actors.transfer import Transfer, TransferResult
from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.exchange import PLANNER_LOOK_S
from megamind_ray.core.ids import Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadMachine, LoadState
from megamind_ray.core.plan import Plan
from megamind_ray.core.progress import RankProgress
from megamind_ray.core.recorder import RecordSettings
from megamind_ray.core.report import Fault, Kept
from megamind_ray.errors import ClusterError, MegamindError
from megamind_ray.planning import compile_agent, compile_rank, load_facts

__all__ = ["LoadDriver"]


@dataclass(slots=True)
class _Seen:
    """What the driver knows of a node from its last answer."""

    status: AgentStatus
    num_failures: int = 0


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
        self.machine = LoadMachine(load_facts(plan, max_worker_restarts=config.load.max_worker_restarts))
        ranks = plan.tables["ranks"].to_pylist()
        self._gpu_of: dict[Rank, GpuKey] = {Rank(row["rank"]): (NodeId(row["node"]), row["gpu"]) for row in ranks}
        # The very actors of this load: the fleet may have given a GPU to another one before we notice a loss.
        self._workers: dict[Rank, Any] = {rank: fleet.workers[key] for rank, key in self._gpu_of.items()}
        self._bytes_of = _bytes_by_rank(plan)
        self._events: deque[ev.Event] = deque()
        self._running: dict[Any, _Running] = {}
        self._results: dict[Rank, RankResult] = {}
        self._agents = {node: _Seen(AgentStatus()) for node in self.machine.facts.nodes}
        self._faults: list[Fault] = []
        call_s = config.deadlines.call_s
        self._agent_watch = Watch[NodeId](patience_s=call_s, what="asking a node agent for its status", clock=clock)
        self._worker_watch = Watch[tuple[Rank, Generation]](
            patience_s=call_s, what="asking a worker for its progress", clock=clock
        )
        self._error: MegamindError | None = None
        self._cancel = threading.Event()
        self._cancel_reason = ""
        self.record = LoadRecorder(transfer, self.machine.facts, settings=record, began_s=began_s, clock=clock)
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
            self._open()
            self._events.append(ev.LoadStarted())
            self._loop()
        except BaseException:
            self._close(keep=False)
            raise
        if self._error is not None:
            self._close(keep=False)
            raise self._error
        agents = self._close(keep=True)
        return TransferResult(
            ranks=tuple(self._results[rank] for rank in sorted(self._results)),
            agents=agents,
            faults=tuple(self._faults),
            generations=dict(self.machine.generations),
            workers=dict(self._workers),
        )

    def _open(self) -> None:
        """Gives every agent its program, so that mailboxes are there before anybody asks."""
        transfer = self._transfer
        wait_for_all(
            [
                self._fleet.agents[node].open_load.remote(
                    compile_agent(
                        transfer.plan,
                        transfer.manifest,
                        node,
                        transfer.load,
                        credit_bytes=transfer.credit_bytes[node],
                        keep_blocks=transfer.keep_blocks[node],
                    ),
                    {peer: self._fleet.agents[peer] for peer in self._agents if peer != node},
                    self._config,
                    self.record.settings,
                )
                for node in self._agents
            ],
            timeout_s=self._config.deadlines.call_s,
            what=f"load {transfer.load}: handing programs to {len(self._agents)} node agents",
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
                self._tell(node, self._fleet.agents[node].start_reads.remote(self._transfer.load), "starting reads")
            case ins.ReplaceWorker(rank=rank, generation=generation):
                self._replace_worker(rank, generation)
            case ins.ReadAgain():
                self._read_again(instruction)
            case ins.RecordFault(fault=fault):
                self._faults.append(replace(fault, at_s=at_s))
            case ins.AbortLoad(error=error):
                self._error = error
            case ins.CompleteLoad():
                pass  # the loop ends with the machine's state

    def _start_rank(self, rank: Rank, generation: Generation) -> None:
        key = self._gpu_of[rank]
        program = compile_rank(self._transfer.plan, self._transfer.manifest, rank, self._transfer.load)
        agent = self._fleet.agents[key[0]]
        ref = self._workers[rank].load.remote(program, agent, generation, self._config, self.record.settings)
        self._running[ref] = _Running(rank, generation)

    def _replace_worker(self, rank: Rank, generation: Generation) -> None:
        node, gpu = self._gpu_of[rank]
        load, agent = self._transfer.load, self._fleet.agents[node]
        # Until it is there, what comes for it holds no credit: nodes further on would wait for the worker's start.
        if not self._tell(node, agent.retire_rank.remote(load, rank, Generation(generation - 1)), "dropping a mailbox"):
            return
        try:
            self._workers[rank] = self._fleet.replace_worker((node, gpu), self._workers[rank])
        except MegamindError as error:
            self._events.append(ev.RankFailed(rank=rank, generation=generation, error=error))
            return
        if self._tell(node, agent.reset_rank.remote(load, rank, generation), f"giving rank {rank} a new mailbox"):
            self._events.append(ev.WorkerReady(rank=rank, generation=generation))

    def _read_again(self, instruction: ins.ReadAgain) -> None:
        transfer, node = self._transfer, instruction.node
        fragment = compile_agent(
            transfer.plan,
            transfer.manifest,
            node,
            transfer.load,
            credit_bytes=transfer.credit_bytes[node],
            keep_blocks=transfer.keep_blocks[node],
            extents=instruction.extents,
            ranks=instruction.ranks,
        )
        for consumer in sorted({self._gpu_of[rank][0] for rank in instruction.ranks} - {node}):
            self._tell(consumer, self._fleet.agents[consumer].relay_from.remote(transfer.load, node), "relaying")
        self._tell(node, self._fleet.agents[node].read_again.remote(fragment, instruction.ranks), "reading again")

    def _tell(self, node: NodeId, ref: Any, what: str) -> bool:
        """Waits for a short call to an agent; its failure is the loss of the agent."""
        try:
            wait_for(ref, timeout_s=self._config.deadlines.call_s, what=f"node {node}: {what}")
        except ClusterError as error:
            self._events.append(ev.AgentLost(node=node, reason=str(error)))
            return False
        return True

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
            self._ask_agents()
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
            self._events.append(ev.RankFailed(rank=rank, generation=generation, error=answer))

    def _make_sure_of_all(self) -> None:
        """Before the last rank counts as done: whether the others, some done for long, still live."""
        ranks = list(self._results)
        answers = settle(
            [self._ask_progress(rank) for rank in ranks],
            timeout_s=self._config.deadlines.call_s,
            what="asking a worker whether it still has its rank",
        )
        for rank, answer in zip(ranks, answers, strict=True):
            if isinstance(answer, MegamindError):
                self._lost(rank, answer)

    def _lost(self, rank: Rank, error: MegamindError) -> None:
        """The worker of a rank died or is silent; its call, if one is open, no longer counts."""
        self._results.pop(rank, None)
        self._running = {ref: one for ref, one in self._running.items() if one.rank != rank}
        generation = self.machine.generations[rank]
        self._events.append(ev.WorkerLost(rank=rank, generation=generation, reason=str(error)))

    def _describe(self, rank: Rank) -> str:
        node, gpu = self._gpu_of[rank]
        return f"rank {rank} on GPU {node}:{gpu}"

    def _ask_agents(self) -> None:
        answers = self._agent_watch.look(
            {node: partial(self._fleet.agents[node].status.remote, self._transfer.load) for node in self._agents},
            timeout_s=PLANNER_LOOK_S,
        )
        for node, answer in answers.items():
            if isinstance(answer, MegamindError):
                self._events.append(ev.AgentLost(node=node, reason=str(answer)))
                continue
            seen = self._agents[node]
            seen.status = answer
            self._report_failures(answer.failures[seen.num_failures :])
            seen.num_failures = len(answer.failures)
            if answer.error is not None:
                self._events.append(ev.AgentFailed(node=node, error=answer.error))

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
            sum(seen.status.bytes_read for seen in self._agents.values()),
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
        nodes = [node for node in self._agents if node in self._fleet.agents]
        closes = [self._fleet.agents[node].close_load.remote(load, keep) for node in nodes]
        # The other half of the time is for what must come back.
        half_s = until_s - self._config.deadlines.close_s / 2
        self.record.collect({node: self._fleet.agents[node] for node in nodes}, self._workers, half_s)
        answers = settle(
            [*closes, *aborts],
            timeout_s=max(0.0, until_s - self._clock()),
            what="closing the load on a node or worker",
        )
        if not keep:
            rest_s = max(0.0, until_s - self._clock())
            settle(list(self._running), timeout_s=rest_s, what="waiting for a worker to stop")
        # An agent that does not answer has kept nothing that anybody could find again.
        lost = {node: replace(self._agents[node].status, kept=Kept()) for node in self._agents}
        return lost | {
            node: answer for node, answer in zip(nodes, answers, strict=False) if isinstance(answer, AgentStatus)
        }


def _bytes_by_rank(plan: Plan) -> dict[Rank, int]:
    views = plan.tables["views"]
    own = views.filter(pc.invert(views["alias"]))
    total = dict.fromkeys((Rank(rank) for rank in plan.parallel.ranks), 0)
    for row in own.group_by("rank").aggregate([("nbytes", "sum")]).to_pylist():
        total[Rank(row["rank"])] = row["nbytes_sum"]
    return total
