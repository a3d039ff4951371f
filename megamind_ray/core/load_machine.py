"""The state machine of a load: events in, instructions out, no I/O, no clock (docs/design/0001)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.node_loss import Move, Spare, choose_reader, is_between, place_again
from megamind_ray.core.report import Fault
from megamind_ray.core.stragglers import bytes_to_keep, describe_straggler, share_reads
from megamind_ray.core.unheard import Unheard
from megamind_ray.errors import ClusterError, MegamindError, listed
from megamind_ray.units import format_bytes

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
        nodes: Nodes with an agent in this load.
        num_ranks: Ranks of the mesh.
        reader: Node that reads each extent that goes through a pool.
        consumers: Ranks that need each extent, direct ones included.
        extent_bytes: Size of each extent, for the fault's line in the report.
        max_worker_restarts: Replacements of one rank.
        home: By rank its node; empty: a lost node ends the load.
        arena_bytes: By rank the arena that it needs.
        line: Nodes in the order in which they hand blocks on; empty: each hands to all by itself.
        readers: Nodes that can reach the checkpoint, of the whole fleet; empty: all that have a part in the load.
        spares: GPUs without a rank of this load, for the ranks of a lost node.
    """

    nodes: tuple[NodeId, ...]
    num_ranks: int
    reader: Mapping[ExtentId, NodeId]
    consumers: Mapping[ExtentId, tuple[Rank, ...]]
    extent_bytes: Mapping[ExtentId, int]
    max_worker_restarts: int = 2
    home: tuple[NodeId, ...] = ()
    arena_bytes: tuple[int, ...] = ()
    line: tuple[NodeId, ...] = ()
    readers: tuple[NodeId, ...] = ()
    spares: tuple[Spare, ...] = ()


class LoadMachine:
    """Decides what a load does about everything that happens to it.

    Attributes:
        state: Where the load stands.
        ranks: Where each rank stands.
        generations: The generation whose messages count, per rank.
        nodes: Nodes that have a part in the load now.
        stale_events: Messages of older generations, and of nodes that were given up, that were dropped.
    """

    def __init__(self, facts: LoadFacts) -> None:
        self.facts = facts
        self.state = LoadState.PLANNED
        self.ranks = dict.fromkeys((Rank(rank) for rank in range(facts.num_ranks)), RankState.LOADING)
        self.generations = dict.fromkeys(self.ranks, Generation(0))
        self.nodes = list(facts.nodes)
        self.stale_events = 0
        self._restarts: Counter[Rank] = Counter()
        self._home = dict(zip(self.ranks, facts.home, strict=False))
        # A place in the line is never given up: those that are lost tell which blocks may have gone with them.
        self._order = list(facts.line)
        # Nodes that were given up, with what each was to read then.
        self._lost: dict[NodeId, frozenset[ExtentId]] = {}
        self._taken: set[Spare] = set()
        # Nodes that gave up on an extent: none of them is asked for it again.
        self._failed_on: dict[ExtentId, list[NodeId]] = {}
        self._pool_extents_of: dict[Rank, list[ExtentId]] = {rank: [] for rank in self.ranks}
        for extent in facts.reader:
            for rank in facts.consumers[extent]:
                self._pool_extents_of[rank].append(extent)
        # Where an extent is read now; it moves when a node gives up, is lost or too slow.
        self._reader = dict(facts.reader)
        # The reader that was asked what it has not begun, while it has not answered.
        self._slow: ev.ReaderSlow | None = None
        self._unheard = Unheard(facts.consumers, facts.extent_bytes, self._reader)

    def handle(self, event: ev.Event) -> list[ins.Instruction]:
        """Takes one event, returns what to do about it, in order."""
        if self.state in (LoadState.DONE, LoadState.FAILED):
            return []
        return self._unheard.note(event, list(_HANDLERS[type(event)](self, event)))

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
        if self._restarts[event.rank] >= self.facts.max_worker_restarts:
            yield from self._abort(
                ClusterError(
                    f"{where}: its worker was lost {self._restarts[event.rank] + 1} times ({event.reason}); "
                    f"the load gives up after load.max_worker_restarts = {self.facts.max_worker_restarts} replacements"
                )
            )
            return
        self._restarts[event.rank] += 1
        generation = self._next_generation(event.rank)
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
        if self._is_given_up(event.node):
            return
        failed_on = self._failed_on.setdefault(event.extent, [])
        if event.node not in failed_on:
            failed_on.append(event.node)
        other = next(iter(self._readers_of(event.extent)), None)
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
        node = event.node
        if self._is_given_up(node) or node not in self.nodes:
            return
        self.nodes.remove(node)
        if self._slow is not None and self._slow.node == node:
            self._slow = None
        self._lost[node] = orphans = frozenset(extent for extent, reader in self._reader.items() if reader == node)
        ranks = [rank for rank, home in self._home.items() if home == node]
        moves = self._move(ranks) if self.state is LoadState.RUNNING and self.facts.home else None
        if moves is None:
            yield from self._abort(self._without_place(event, ranks))
            return
        joins = tuple(dict.fromkeys(move.node for move in moves if move.node not in self.nodes))
        self.nodes += joins
        if orphans and not self._readers():
            # Somebody of the fleet who has no part in the load yet.
            other = tuple(one for one in self.facts.readers if one not in self._lost)[:1]
            joins, self.nodes = joins + other, [*self.nodes, *other]
        alone = self._spread(orphans)
        if alone is not None:
            yield from self._abort(
                ClusterError(
                    f"node {node} was lost ({event.reason}), and no other node can read extent {alone}, which it was "
                    "to read; put the checkpoint where several nodes reach it, then load again"
                )
            )
            return
        if self._order:
            self._order += [one for one in joins if one not in self._order]
        yield ins.RecordFault(fault=self._fault(event, orphans, moves))
        line = tuple(one for one in self._order if one not in self._lost)
        yield ins.DropNode(node=node, moves=moves, joins=joins, line=line)

    def _move(self, ranks: list[Rank]) -> tuple[Move, ...] | None:
        """Places of ranks that lost theirs; None where there are not enough."""
        spares = [one for one in self.facts.spares if one.node not in self._lost and one not in self._taken]
        places = place_again(ranks, self.facts.arena_bytes, spares, members=self.nodes)
        if places is None:
            return None
        self._taken.update(places.values())
        self._home |= {rank: spare.node for rank, spare in places.items()}
        return tuple(
            Move(rank=rank, generation=self._next_generation(rank), node=places[rank].node, gpu=places[rank].gpu)
            for rank in sorted(places)
        )

    def _spread(self, extents: Iterable[ExtentId]) -> ExtentId | None:
        """Gives extents other readers; the first that nobody can read, if any."""
        given: Counter[NodeId] = Counter()
        for extent in sorted(extents):
            homes = {self._home[rank] for rank in self.facts.consumers[extent]}
            reader = choose_reader(homes, self._readers_of(extent), given)
            if reader is None:
                return extent
            self._reader[extent] = reader
            given[reader] += self.facts.extent_bytes[extent]
        return None

    def _fault(self, event: ev.AgentLost, orphans: frozenset[ExtentId], moves: tuple[Move, ...]) -> Fault:
        again = orphans.union(*(self._extents_of(move.rank) for move in moves))
        places = listed([f"rank {move.rank} on GPU {move.node}:{move.gpu}" for move in moves])
        return Fault(
            kind="node_lost",
            where=f"node {event.node}: {event.reason}",
            action="what is missing of its share is read by others" + (f", and anew for {places}" if moves else ""),
            bytes_retried=sum(self.facts.extent_bytes[extent] for extent in again),
        )

    def _without_place(self, event: ev.AgentLost, ranks: list[Rank]) -> ClusterError:
        if not ranks:
            return ClusterError(
                f"node {event.node}: its node agent was lost ({event.reason}), and with it blocks on their way; "
                "load again, the fleet starts a new agent"
            )
        need = format_bytes(max(self.facts.arena_bytes[rank] for rank in ranks))
        return ClusterError(
            f"node {event.node} was lost ({event.reason}) with {listed([f'rank {rank}' for rank in ranks])}; the fleet "
            f"has no {len(ranks)} free GPUs with {need} each on other nodes to load them on; bring the node back, add "
            "one or unload other models, then load again"
        )

    def _dropped(self, event: ev.NodeDropped) -> Iterable[ins.Instruction]:
        """Whatever may have gone with the node is read again, for those that lack it."""
        orphans = self._lost.get(event.node)
        if orphans is None:
            return
        lacking = {one.rank: one for one in event.lacking}
        wanted: dict[ExtentId, list[Rank]] = {}
        for rank, state in self.ranks.items():
            told = lacking.get(rank)
            if state is not RankState.LOADING or (told is not None and self._is_stale(rank, told.generation)):
                continue  # whoever is replaced gets all that it needs by itself
            own = self._pool_extents_of[rank]
            for extent in own if told is None else set(own).intersection(told.extents):
                on_its_way = is_between(event.node, self._reader[extent], self._home[rank], self._order)
                if extent in orphans or on_its_way:
                    wanted.setdefault(extent, []).append(rank)
        again: dict[tuple[NodeId, tuple[Rank, ...]], list[ExtentId]] = {}
        for extent in sorted(wanted):
            again.setdefault((self._reader[extent], tuple(wanted[extent])), []).append(extent)
        for (node, ranks), extents in sorted(again.items()):
            yield ins.ReadAgain(node=node, extents=tuple(extents), ranks=ranks)

    def _reader_slow(self, event: ev.ReaderSlow) -> Iterable[ins.Instruction]:
        if self._is_given_up(event.node) or event.node not in self.nodes or self._slow is not None:
            return
        self._slow = event
        yield ins.TakeBack(node=event.node, keep_bytes=bytes_to_keep(event.node, event.paces))

    def _taken_back(self, event: ev.ReadsTakenBack) -> Iterable[ins.Instruction]:
        slow, self._slow = self._slow, None
        if slow is None or slow.node != event.node or self._is_given_up(event.node):
            return  # what a lost node was to read is read by others anyway
        extents = [extent for extent in event.extents if self._reader[extent] == event.node]
        shares = share_reads(
            extents,
            self.facts.extent_bytes,
            [pace for pace in slow.paces if pace.node != event.node],
            readers_of=self._readers_of,
            homes_of=lambda extent: {self._home[rank] for rank in self.facts.consumers[extent] if rank in self._home},
        )
        self._reader |= {extent: node for node, given in shares.items() for extent in given}
        if shares:
            yield ins.RecordFault(fault=describe_straggler(event.node, slow.paces, shares, self.facts.extent_bytes))
        left = tuple(extent for extent in extents if self._reader[extent] == event.node)
        if left:  # nobody else can read them
            shares[event.node] = left
        for node, given in sorted(shares.items()):
            yield ins.ReadInstead(node=node, extents=given)

    def _planner_restarted(self, event: ev.PlannerRestarted) -> Iterable[ins.Instruction]:
        self.state = LoadState.RUNNING
        if self._slow is not None:  # it may have given away what nobody knows of
            slow, self._slow = self._slow.node, None
            self._unheard.note_given(extent for extent, reader in self._reader.items() if reader == slow)
        yield from self._unheard.say_again(
            event.reason,
            [one for one in event.lacking if not self._is_stale(one.rank, one.generation)],
            loading=[rank for rank, state in self.ranks.items() if state is RankState.LOADING],
            replacing=[rank for rank, state in self.ranks.items() if state is RankState.REPLACING],
            generations=self.generations,
            nodes=[node for node in self.facts.nodes if node in self.nodes],
        )

    def _agent_failed(self, event: ev.AgentFailed) -> Iterable[ins.Instruction]:
        if not self._is_given_up(event.node):
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

    def _is_given_up(self, node: NodeId) -> bool:
        stale = node in self._lost
        self.stale_events += stale
        return stale

    def _next_generation(self, rank: Rank) -> Generation:
        self.generations[rank] = Generation(self.generations[rank] + 1)
        self.ranks[rank] = RankState.REPLACING
        return self.generations[rank]

    def _readers(self) -> list[NodeId]:
        return [node for node in self.nodes if not self.facts.readers or node in self.facts.readers]

    def _readers_of(self, extent: ExtentId) -> list[NodeId]:
        """Nodes that can read it, as far as is known."""
        return [node for node in self._readers() if node not in self._failed_on.get(extent, ())]

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
    ev.NodeDropped: LoadMachine._dropped,
    ev.ReaderSlow: LoadMachine._reader_slow,
    ev.ReadsTakenBack: LoadMachine._taken_back,
    ev.PlannerRestarted: LoadMachine._planner_restarted,
    ev.AgentFailed: LoadMachine._agent_failed,
    ev.CancelRequested: LoadMachine._cancelled,
    ev.DeadlinePassed: LoadMachine._deadline,
}
