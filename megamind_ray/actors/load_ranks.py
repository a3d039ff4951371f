"""The ranks of one load, and the workers that hold them: who runs, how far each is, what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import ray

from megamind_ray.actors.boundary import ActorLostError, Watch, settle
from megamind_ray.actors.fleet import Fleet
from megamind_ray.actors.load_agents import LoadAgents
from megamind_ray.actors.messages import RankResult, WorkerStatus
from megamind_ray.actors.rerouting import extents_of
from megamind_ray.actors.standing import Standing
from megamind_ray.actors.transfer import bytes_by_rank
from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core.exchange import PLANNER_LOOK_S
from megamind_ray.core.ids import Generation, Rank
from megamind_ray.core.load_machine import RankState
from megamind_ray.core.node_loss import Lacking
from megamind_ray.core.progress import RankProgress
from megamind_ray.core.recorder import RecordSettings
from megamind_ray.errors import ClusterError, MegamindError
from megamind_ray.planning import compile_rank

__all__ = ["LoadRanks"]

_LACKING_S: Final = 2.0  # a rank that does not say within it what it lacks gets all that may be lost


@dataclass(slots=True)
class _Running:
    """A rank's call in flight."""

    rank: Rank
    generation: Generation
    status: WorkerStatus = field(default_factory=WorkerStatus)
    num_failures: int = 0


class LoadRanks:
    """Used by one thread; ``progress`` by any.

    Attributes:
        workers: By rank the very actor of this load: the fleet may have given its GPU to another before we notice a
            loss. One that was gone when a new planner looked is not in here.
        results: By rank, of those that are done.

    Args:
        standing: Where the load stands.
        fleet: Who does it.
        config: Of the load.
        agents: Of the load.
        record: How workers record it.
        clock: Monotonic.
    """

    def __init__(
        self,
        standing: Standing,
        fleet: Fleet,
        config: Config,
        agents: LoadAgents,
        *,
        record: RecordSettings | None,
        clock: Callable[[], float],
    ) -> None:
        self._standing, self._fleet, self._config = standing, fleet, config
        self._agents, self._record = agents, record
        self.workers = {rank: fleet.workers[key] for rank, key in standing.gpu_of.items() if key in fleet.workers}
        self.results: dict[Rank, RankResult] = {}
        self._running: dict[Any, _Running] = {}
        self._bytes_of = bytes_by_rank(standing.transfer.plan)
        self._watch = Watch[tuple[Rank, Generation]](
            patience_s=config.deadlines.call_s, what="asking a worker for its progress", clock=clock
        )

    @property
    def moved(self) -> tuple[int, int]:
        """Ranks that are done, bytes that the others have: it changes as long as anything arrives."""
        return len(self.results), sum(one.status.bytes_done for one in self._running.values())

    @property
    def waiting(self) -> list[Rank]:
        """Those that load."""
        return [one.rank for one in self._running.values()]

    @property
    def calls(self) -> list[Any]:
        """The refs of their calls."""
        return list(self._running)

    def progress(self) -> tuple[RankProgress, ...]:
        """How far each rank is, as of the last poll."""
        done = {running.rank: running.status.bytes_done for running in list(self._running.values())}
        return tuple(
            RankProgress(
                rank=rank,
                bytes_done=total if rank in self.results else min(total, done.get(rank, 0)),
                bytes_total=total,
            )
            for rank, total in self._bytes_of.items()
        )

    def start(self, rank: Rank, generation: Generation) -> list[ev.Event]:
        """Has a rank loaded, or waits for it where an earlier planner did; what is wrong with that at once."""
        if rank not in self.workers:
            return self.lost(
                rank, ClusterError(f"{self.describe(rank)}: its worker was gone when a new planner looked")
            )
        transfer = self._standing.transfer
        program = compile_rank(transfer.plan, transfer.manifest, rank, transfer.load)
        agent = self._agents.handle(self._standing.gpu_of[rank][0])
        ref = self.workers[rank].load.remote(program, agent, generation, self._config, self._record)
        self._running[ref] = _Running(rank, generation)
        return []

    def wait(self) -> list[ev.Event] | None:
        """Waits a moment for ranks to end; what came of those that did, None where none did."""
        if not self._running:
            return None
        ended, _ = ray.wait(list(self._running), num_returns=1, timeout=PLANNER_LOOK_S)
        events: list[ev.Event] = []
        for ref in ended:
            events += self._ended(ref, self._running.pop(ref))
        return events if ended else None

    def ask(self) -> list[ev.Event]:
        """What ranks that load could not read; of those that are done, whether they still live."""
        running = {one.rank: one for one in self._running.values()}
        answers = self._watch.look(
            {
                (rank, self._generation(rank)): partial(self._ask_progress, rank)
                for rank in self.workers
                if rank in running or rank in self.results
            },
            timeout_s=PLANNER_LOOK_S,
        )
        events: list[ev.Event] = []
        for (rank, _), answer in answers.items():
            if isinstance(answer, ActorLostError):
                events += self.lost(rank, answer)
            elif isinstance(answer, WorkerStatus) and rank in running:
                one = running[rank]
                one.status = answer
                events += [
                    ev.ExtentFailed(extent=bad.extent, node=bad.node, error=bad.error, retryable=bad.retryable)
                    for bad in answer.failures[one.num_failures :]
                ]
                one.num_failures = len(answer.failures)
        return events

    def lacking(self) -> tuple[Lacking, ...]:
        """What each rank that loads has not got yet; those that do not answer are left out."""
        states = self._standing.machine.ranks
        loading = {
            rank: self._generation(rank)
            for rank, state in states.items()
            if state is RankState.LOADING and rank in self.workers
        }
        load = self._standing.transfer.load
        answers = self._agents.settle(
            {
                rank: (self._standing.gpu_of[rank][0], self.workers[rank].missing.remote(load, generation))
                for rank, generation in loading.items()
            },
            "asking a worker what it lacks",
            timeout_s=_LACKING_S,
        )
        plan = self._standing.transfer.plan
        return tuple(
            Lacking(rank=rank, generation=loading[rank], extents=extents_of(plan, answer))
            for rank, answer in sorted(answers.items())
            if isinstance(answer, np.ndarray)
        )

    def move(self, ranks: Sequence[Rank]) -> None:
        """Ranks that ``Standing.drop`` has just given other places."""
        for rank in ranks:
            self._forget(rank)
            before = self.workers.pop(rank, None)
            now = self._fleet.workers.get(self._standing.gpu_of[rank])
            if before is not None and before is not now:
                # Where it is nobody waits for the answer; if it ever hears this, its memory there is free.
                before.abort.remote(self._standing.transfer.load)
            if now is not None:
                self.workers[rank] = now

    def lost(self, rank: Rank, error: MegamindError) -> list[ev.Event]:
        """The worker of a rank died or is silent; its call, if one is open, no longer counts."""
        self._forget(rank)
        generation = self._generation(rank)
        # Not its own loss where its whole node is gone.
        return [
            *self._agents.probe(self._standing.gpu_of[rank][0]),
            ev.WorkerLost(rank=rank, generation=generation, reason=str(error)),
        ]

    def describe(self, rank: Rank) -> str:
        """For messages."""
        node, gpu = self._standing.gpu_of[rank]
        return f"rank {rank} on GPU {node}:{gpu}"

    def _ended(self, ref: Any, running: _Running) -> list[ev.Event]:
        rank, generation = running.rank, running.generation
        (answer,) = settle([ref], timeout_s=self._config.deadlines.call_s, what=self.describe(rank))
        if isinstance(answer, RankResult):
            self.results[rank] = answer
            events = self._make_sure_of_all() if len(self.results) == len(self._standing.gpu_of) else []
            return [*events, ev.RankDone(rank=rank, generation=generation)] if rank in self.results else events
        if isinstance(answer, ActorLostError):
            return self.lost(rank, answer)
        # First whether its node is lost: a rank that fails with its agent only has to go elsewhere.
        return [
            *self._agents.probe(self._standing.gpu_of[rank][0]),
            ev.RankFailed(rank=rank, generation=generation, error=answer),
        ]

    def _make_sure_of_all(self) -> list[ev.Event]:
        """Before the last rank counts as done: whether the others, some done for long, still live."""
        answers = self._agents.settle(
            {rank: (self._standing.gpu_of[rank][0], self._ask_progress(rank)) for rank in self.results},
            "asking a worker whether it still has its rank",
        )
        events: list[ev.Event] = []
        for rank, answer in answers.items():
            if isinstance(answer, MegamindError):
                events += self.lost(rank, answer)
        return events

    def _forget(self, rank: Rank) -> None:
        """Nothing that its worker said or will say counts."""
        self.results.pop(rank, None)
        self._running = {ref: one for ref, one in self._running.items() if one.rank != rank}

    def _ask_progress(self, rank: Rank) -> Any:
        return self.workers[rank].progress.remote(self._standing.transfer.load, self._generation(rank))

    def _generation(self, rank: Rank) -> Generation:
        return self._standing.machine.generations[rank]
