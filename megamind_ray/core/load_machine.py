"""The state machine of a load: events in, instructions out, no I/O, no clock (docs/design/0001)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.report import Fault
from megamind_ray.errors import ClusterError, MegamindError

__all__ = ["LoadFacts", "LoadMachine", "LoadState", "RankState"]


class LoadState(Enum):
    """Where a load stands. DONE and FAILED absorb every later event."""

    PLANNED = "planned"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class RankState(Enum):
    """Where a rank of a running load stands."""

    LOADING = "loading"
    REPLACING = "replacing"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """What the machine needs to know of a plan.

    Attributes:
        nodes: Nodes with an agent in this load; each can reach the checkpoint.
        num_ranks: Ranks of the mesh.
        reader: Node that reads each extent that goes through a pool.
        consumers: Ranks that need each extent, direct ones included.
        extent_bytes: Size of each extent, for the fault's line in the report.
        max_worker_restarts: Replacements of one rank.
    """

    nodes: tuple[NodeId, ...]
    num_ranks: int
    reader: Mapping[ExtentId, NodeId]
    consumers: Mapping[ExtentId, tuple[Rank, ...]]
    extent_bytes: Mapping[ExtentId, int]
    max_worker_restarts: int = 2


class LoadMachine:
    """Decides what a load does about everything that happens to it.

    Attributes:
        state: Where the load stands.
        ranks: Where each rank stands.
        generations: The generation whose messages count, per rank.
        stale_events: Messages of older generations that were dropped.
    """

    def __init__(self, facts: LoadFacts) -> None:
        self.facts = facts
        self.state = LoadState.PLANNED
        self.ranks = dict.fromkeys((Rank(rank) for rank in range(facts.num_ranks)), RankState.LOADING)
        self.generations = dict.fromkeys(self.ranks, Generation(0))
        self.stale_events = 0
        # Nodes that gave up on an extent: none of them is asked for it again.
        self._failed_on: dict[ExtentId, list[NodeId]] = {}
        self._pool_extents_of: dict[Rank, list[ExtentId]] = {rank: [] for rank in self.ranks}
        for extent in facts.reader:
            for rank in facts.consumers[extent]:
                self._pool_extents_of[rank].append(extent)
        # Where an extent is read now; it moves when a node gives up.
        self._reader = dict(facts.reader)

    def handle(self, event: ev.Event) -> list[ins.Instruction]:
        """Takes one event, returns what to do about it, in order."""
        if self.state in (LoadState.DONE, LoadState.FAILED):
            return []
        return list(_HANDLERS[type(event)](self, event))

    def _started(self, _event: ev.LoadStarted) -> Iterable[ins.Instruction]:
        if self.state is not LoadState.PLANNED:
            return
        self.state = LoadState.RUNNING
        # Ranks first: their mailboxes are there before the first block is cut.
        for rank in self.ranks:
            yield ins.StartRank(rank=rank, generation=self.generations[rank])
        for node in self.facts.nodes:
            yield ins.StartReads(node=node)

    def _worker_lost(self, event: ev.WorkerLost) -> Iterable[ins.Instruction]:
        if self._is_stale(event.rank, event.generation):
            return
        where = f"rank {event.rank} (generation {event.generation})"
        if event.generation >= self.facts.max_worker_restarts:
            yield from self._abort(
                ClusterError(
                    f"{where}: its worker was lost {event.generation + 1} times ({event.reason}); "
                    f"the load gives up after load.max_worker_restarts = {self.facts.max_worker_restarts} replacements"
                )
            )
            return
        generation = Generation(event.generation + 1)
        self.generations[event.rank] = generation
        self.ranks[event.rank] = RankState.REPLACING
        again = sum(self.facts.extent_bytes[extent] for extent in self._extents_of(event.rank))
        yield ins.RecordFault(
            fault=Fault(
                kind="worker_lost",
                where=f"{where}: {event.reason}",
                action=f"replaced by generation {generation}, its share is read again",
                bytes_retried=again,
            )
        )
        yield ins.ReplaceWorker(rank=event.rank, generation=generation)

    def _worker_ready(self, event: ev.WorkerReady) -> Iterable[ins.Instruction]:
        if self._is_stale(event.rank, event.generation) or self.ranks[event.rank] is not RankState.REPLACING:
            return
        self.ranks[event.rank] = RankState.LOADING
        yield ins.StartRank(rank=event.rank, generation=event.generation)
        by_node: dict[NodeId, list[ExtentId]] = {}
        for extent in self._pool_extents_of[event.rank]:
            by_node.setdefault(self._reader[extent], []).append(extent)
        for node in sorted(by_node):
            yield ins.ReadAgain(node=node, extents=tuple(by_node[node]), ranks=(event.rank,))

    def _rank_done(self, event: ev.RankDone) -> Iterable[ins.Instruction]:
        if self._is_stale(event.rank, event.generation):
            return
        self.ranks[event.rank] = RankState.DONE
        if all(state is RankState.DONE for state in self.ranks.values()):
            self.state = LoadState.DONE
            yield ins.CompleteLoad()

    def _rank_failed(self, event: ev.RankFailed) -> Iterable[ins.Instruction]:
        if not self._is_stale(event.rank, event.generation):
            yield from self._abort(event.error)

    def _extent_failed(self, event: ev.ExtentFailed) -> Iterable[ins.Instruction]:
        failed_on = self._failed_on.setdefault(event.extent, [])
        if event.node not in failed_on:
            failed_on.append(event.node)
        other = next((node for node in self.facts.nodes if node not in failed_on), None)
        if not event.retryable or other is None:
            yield from self._abort(event.error)
            return
        waiting = tuple(rank for rank in self.facts.consumers[event.extent] if self.ranks[rank] is not RankState.DONE)
        if event.extent not in self._reader:
            # A direct extent becomes a pool extent from here on, also for a later replacement of its rank.
            for rank in self.facts.consumers[event.extent]:
                self._pool_extents_of[rank].append(event.extent)
        self._reader[event.extent] = other
        yield ins.RecordFault(
            fault=Fault(
                kind="extent_failed",
                where=f"extent {event.extent} on node {event.node}: {event.error}",
                action=f"read on node {other}",
                bytes_retried=self.facts.extent_bytes[event.extent],
            )
        )
        yield ins.ReadAgain(node=other, extents=(event.extent,), ranks=waiting)

    def _agent_lost(self, event: ev.AgentLost) -> Iterable[ins.Instruction]:
        yield from self._abort(
            ClusterError(
                f"node {event.node}: its node agent was lost ({event.reason}), and with it blocks on their way; "
                "load again, the fleet starts a new agent"
            )
        )

    def _agent_failed(self, event: ev.AgentFailed) -> Iterable[ins.Instruction]:
        yield from self._abort(event.error)

    def _cancelled(self, event: ev.CancelRequested) -> Iterable[ins.Instruction]:
        yield from self._abort(ClusterError(f"the load was cancelled: {event.reason}"))

    def _deadline(self, event: ev.DeadlinePassed) -> Iterable[ins.Instruction]:
        yield from self._abort(ClusterError(f"deadline passed: {event.what}"))

    def _abort(self, error: MegamindError) -> Iterable[ins.Instruction]:
        self.state = LoadState.FAILED
        yield ins.AbortLoad(error=error)

    def _is_stale(self, rank: Rank, generation: Generation) -> bool:
        stale = generation != self.generations[rank]
        self.stale_events += stale
        return stale

    def _extents_of(self, rank: Rank) -> list[ExtentId]:
        return [extent for extent, ranks in self.facts.consumers.items() if rank in ranks]


_HANDLERS: Mapping[type, Callable[[LoadMachine, Any], Iterable[ins.Instruction]]] = {
    ev.LoadStarted: LoadMachine._started,
    ev.WorkerLost: LoadMachine._worker_lost,
    ev.WorkerReady: LoadMachine._worker_ready,
    ev.RankDone: LoadMachine._rank_done,
    ev.RankFailed: LoadMachine._rank_failed,
    ev.ExtentFailed: LoadMachine._extent_failed,
    ev.AgentLost: LoadMachine._agent_lost,
    ev.AgentFailed: LoadMachine._agent_failed,
    ev.CancelRequested: LoadMachine._cancelled,
    ev.DeadlinePassed: LoadMachine._deadline,
}
