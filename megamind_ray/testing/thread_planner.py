"""The planner's part in a fleet of threads: it drives the load machine, dies when it is told to, and is succeeded."""

from __future__ import annotations

import queue
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from megamind_ray.actors.agent_load import AgentLoad
from megamind_ray.actors.journal import is_journaled, journaled
from megamind_ray.actors.rank_load import RankLoad
from megamind_ray.actors.rerouting import extents_of
from megamind_ray.actors.standing import Standing
from megamind_ray.actors.transfer import Transfer
from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import LogEntry
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadMachine, LoadState, RankState
from megamind_ray.core.node_loss import Lacking
from megamind_ray.core.program import AgentProgram
from megamind_ray.core.stragglers import ReadProgress, StragglerWatch
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.session import RankSession
from megamind_ray.errors import MegamindError
from megamind_ray.planning import compile_rank
from megamind_ray.testing.strikes import SlowStorage
from megamind_ray.testing.thread_nodes import HomeCalls, NodeWire, PeerCalls, ThreadNode, ThreadRank
from megamind_ray.units import MIB

__all__ = ["ThreadPlanner"]

_BOUND_S: Final = 60.0
_LOOK_S: Final = 0.01


class _PlannerDied(Exception):
    pass


class ThreadPlanner(ABC):
    """Runs one load. What happens to nodes meanwhile, and how calls between them go, is for a subclass.

    Attributes:
        sessions: By rank, the latest one.
        error: Why the load was given up; None while it was not.

    Args:
        transfer: What to move.
        config: Of the load.
        dies_after: So many steps of planners were made before one dies.
        blind: Nodes that cannot see the files.
        storage: How nodes read, and the clock by which readers are slow; None: as they can, and none is.
        shaken: Delays and repeats calls at random, by this seed; None: does not.
    """

    def __init__(
        self,
        transfer: Transfer,
        config: Config,
        *,
        dies_after: Sequence[int],
        blind: Sequence[NodeId],
        storage: SlowStorage | None,
        shaken: int | None,
    ) -> None:
        self._planned = transfer
        self._standing = Standing(transfer, max_worker_restarts=config.load.max_worker_restarts)
        self._journal: tuple[LogEntry, ...] = ()
        self.sessions: dict[Rank, RankSession] = {}
        self.error: MegamindError | None = None
        self._config, self._blind = config, blind
        self._storage, self._watch = storage, StragglerWatch(config.straggler)
        self._events: queue.Queue[ev.Event] = queue.Queue()
        self._stop = threading.Event()
        self._num_steps = 0
        self._dies_after = deque(sorted(dies_after))
        self._random = random.Random(shaken)
        self._is_shaken = shaken is not None
        self._nodes: dict[NodeId, ThreadNode] = {}
        self._runs: dict[Rank, ThreadRank] = {}
        self._heard: dict[object, int] = {}
        self._broken: list[str] = []

    @abstractmethod
    def call(self, caller: ThreadNode, callee: ThreadNode) -> None:
        """A call between two actors comes to its node, or to nothing."""

    @abstractmethod
    def close(self) -> None:
        """Ends the load on all nodes."""

    @abstractmethod
    def _opened(self, name: NodeId) -> None:
        """A node has a part in the load from now on."""

    def node(self, name: NodeId) -> ThreadNode:
        """A node that takes part."""
        return self._nodes[name]

    @property
    def machine(self) -> LoadMachine:
        return self._standing.machine

    @property
    def log(self) -> list[LogEntry]:
        return self._standing.entries

    @property
    def _transfer(self) -> Transfer:
        return self._standing.transfer

    def run(self) -> None:
        """To its end.

        Raises:
            AssertionError: It has not ended within a minute, or a thread of it broke.
        """
        act = self._begin
        until_s = time.monotonic() + _BOUND_S
        try:
            while self.machine.state in (LoadState.PLANNED, LoadState.RUNNING):
                assert time.monotonic() < until_s, f"it hangs: {self._where_it_stands()}"
                assert not self._broken, self._broken
                try:
                    act()
                    act = self._take_event
                except _PlannerDied:
                    act = self._succeed
        finally:
            self._stop.set()
            if self.machine.state is not LoadState.DONE:
                self.close()

    def _step(self) -> None:
        """A planner does something; it may have died just before."""
        self._num_steps += 1
        if self._dies_after and self._dies_after[0] <= self._num_steps:
            self._dies_after.popleft()
            raise _PlannerDied

    def _begin(self) -> None:
        for node in self.machine.nodes:
            self._open(node)
        self._events.put(ev.LoadStarted())
        self._ask()

    def _succeed(self) -> None:
        """A new planner knows the journal alone, and asks everybody for the rest."""
        self._events = queue.Queue()
        self._heard, self._watch = {}, StragglerWatch(self._config.straggler)
        restarts = self._config.load.max_worker_restarts
        self._standing = Standing(self._planned, max_worker_restarts=restarts, entries=self._journal)
        self.error = self._standing.error
        for node in self.machine.nodes:
            self._open(node)
        self._events.put(ev.PlannerRestarted(reason="it died", lacking=self._lacking()))
        for node in self.machine.nodes:
            if self._is_gone(self._nodes[node]):
                self._events.put(ev.AgentLost(node=node, reason="it did not answer the new planner"))

    def _take_event(self) -> None:
        try:
            event = self._events.get(timeout=_LOOK_S)
        except queue.Empty:
            self._ask()
            return
        self._step()
        if self._standing.was_heard(event):
            return
        said = tuple(self.machine.handle(event))
        self.log.append(LogEntry(at_s=0.0, event=event, instructions=said))
        if is_journaled(event):
            self._journal = journaled(self.log)
        for instruction in said:
            self._step()
            self._execute(instruction)

    def _ask(self) -> None:
        progress: dict[NodeId, ReadProgress] = {}
        for name, node in list(self._nodes.items()):
            if node.load is None or self._is_gone(node):
                continue
            status = node.load.status()
            progress[name] = status.reads
            for one in status.failures[self._heard.get(name, 0) :]:
                self._events.put(
                    ev.ExtentFailed(extent=one.extent, node=name, error=one.error, retryable=one.retryable)
                )
            self._heard[name] = len(status.failures)
            if status.error is not None:
                self._events.put(ev.AgentFailed(node=name, error=status.error))
        for rank, run in list(self._runs.items()):
            key = (rank, run.load.generation)
            for one in run.load.failures[self._heard.get(key, 0) :]:
                self._events.put(
                    ev.ExtentFailed(extent=one.extent, node=run.node, error=one.error, retryable=one.retryable)
                )
            self._heard[key] = len(run.load.failures)
        slow = None if self._storage is None else self._watch.look(self._storage.now_s(), progress)
        if slow is not None:
            self._events.put(ev.ReaderSlow(node=slow.node, paces=slow.paces))

    def _execute(self, instruction: ins.Instruction) -> None:
        match instruction:
            case ins.StartRank(rank=rank, generation=generation):
                self._start_rank(rank, generation)
            case ins.StartReads(node=node):
                self._tell(node, lambda load: load.start())
            case ins.ReplaceWorker(rank=rank, generation=generation):
                home = self._home(rank)
                if self._tell(home, lambda load: load.reset_rank(rank, generation)):
                    self._events.put(ev.WorkerReady(rank=rank, generation=generation))
            case ins.ReadAgain():
                self._read_again(instruction)
            case ins.TakeBack(node=node, keep_bytes=keep_bytes):
                self._take_back(node, keep_bytes)
            case ins.ReadInstead():
                self._read_instead(instruction)
            case ins.DropNode():
                self._drop(instruction)
            case ins.AbortLoad(error=error):
                self.error = error

    def _read_again(self, instruction: ins.ReadAgain) -> None:
        node, ranks = instruction.node, instruction.ranks
        fragment = self._fragment(node, instruction.extents, ranks)
        for home in sorted({self._home(rank) for rank in ranks} - {node}):
            self._tell(home, lambda load: load.relay_from(node))
        self._tell(node, lambda load: load.read_again(fragment, ranks))

    def _take_back(self, node: NodeId, keep_bytes: int) -> None:
        taken: list[ExtentId] = []
        if self._tell(node, lambda load: taken.extend(load.take_back(keep_bytes))):
            self._events.put(ev.ReadsTakenBack(node=node, extents=tuple(taken)))

    def _read_instead(self, order: ins.ReadInstead) -> None:
        sources = self._standing.give(order)
        for name, peers in sources.items():
            for peer in peers:
                self._tell(name, lambda load, peer=peer: load.relay_from(peer, passes_on=True))  # type: ignore[misc]
        fragment = self._fragment(order.node, order.extents)
        self._tell(order.node, lambda load: load.read_instead(fragment))

    def _drop(self, drop: ins.DropNode) -> None:
        routes = self._standing.drop(drop)
        for move in drop.moves:
            old = self._runs.pop(move.rank, None)
            if old is not None:
                old.load.stop()
        for node in drop.joins:
            self._open(node)
        names = list(routes)
        self._random.shuffle(names)
        for name in names:
            peers = {other: PeerCalls(self, self._nodes[name], other) for other in drop.joins if other != name}
            for _ in range(1 + (self._is_shaken and self._random.random() < 0.2)):
                self._tell(name, lambda load, name=name, peers=peers: load.reroute(routes[name], peers))  # type: ignore[misc]
        self._nodes[drop.node].is_given_up.set()
        told = [move for move in drop.moves if self._reset(move.node, move.rank, move.generation)]
        self._events.put(ev.NodeDropped(node=drop.node, lacking=self._lacking()))
        for move in told:
            self._events.put(ev.WorkerReady(rank=move.rank, generation=move.generation))

    def _reset(self, node: NodeId, rank: Rank, generation: Generation) -> bool:
        return self._tell(node, lambda load: load.reset_rank(rank, generation))

    def _lacking(self) -> tuple[Lacking, ...]:
        """What the ranks say; some do not answer."""
        return tuple(
            Lacking(
                rank=rank,
                generation=run.load.generation,
                extents=extents_of(self._transfer.plan, run.load.session.missing_blocks),
            )
            for rank, run in self._runs.items()
            if self.machine.ranks[rank] is RankState.LOADING
            and run.generation == self.machine.generations[rank]
            and not (self._is_shaken and self._random.random() < 0.1)
        )

    def _tell(self, name: NodeId, what: Callable[[AgentLoad], None]) -> bool:
        """Whether a node took an order; one that did not is lost."""
        self._step()
        node = self._nodes[name]
        if self._is_gone(node) or node.load is None:
            self._events.put(ev.AgentLost(node=name, reason="it took no order"))
            return False
        what(node.load)
        return True

    def _is_gone(self, node: ThreadNode) -> bool:
        return node.has_crashed.is_set() or node.is_frozen.is_set() or node.is_given_up.is_set()

    def _open(self, name: NodeId) -> None:
        self._step()
        if name in self._nodes:  # a planner before opened it
            return
        node = ThreadNode(name)
        program = self._fragment(name)
        opener = self._storage.by_node[name] if self._storage is not None else None
        peers = {other: PeerCalls(self, node, other) for other in self.machine.nodes if other != name}
        node.load = AgentLoad(program, self._config, plane=NodeWire(self, node), peers=peers, opener=opener)
        self._nodes[name] = node
        self._opened(name)

    def _fragment(
        self, name: NodeId, extents: Sequence[ExtentId] | None = None, ranks: Sequence[Rank] | None = None
    ) -> AgentProgram:
        program = self._transfer.agent_program(name, extents=extents, ranks=ranks)
        return replace(program, files=replace(program.files, root="/nowhere")) if name in self._blind else program

    def _start_rank(self, rank: Rank, generation: Generation) -> None:
        self._step()
        run = self._runs.get(rank)
        if run is not None and run.generation == generation:  # a planner before started it: wait for what it comes to
            threading.Thread(target=self._await, args=(run, self._events), daemon=True).start()
            return
        program = compile_rank(self._transfer.plan, self._transfer.manifest, rank, self._transfer.load)
        session = RankSession(program, HostArena(64 * MIB), self._config)
        home = self._nodes[self._home(rank)]
        load = RankLoad(
            session, NodeWire(self, home), node=home.node, generation=generation, deadlines=self._config.deadlines
        )
        self.sessions[rank] = session
        self._runs[rank] = run = ThreadRank(load, rank, home)
        run.begin(HomeCalls(self, home, rank, generation), self._stop, self._broken)
        threading.Thread(target=self._await, args=(run, self._events), daemon=True).start()

    def _await(self, run: ThreadRank, events: queue.Queue[ev.Event]) -> None:
        """The call of a planner: its answer goes to that one, if it lives by then."""
        came_to = run.wait(_BOUND_S)
        if came_to is None:
            return
        events.put(came_to)
        if self._is_shaken and self._random.random() < 0.2:
            self._later(0.005, lambda: events.put(came_to))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()

    def _home(self, rank: Rank) -> NodeId:
        return NodeId(self._transfer.plan.tables["ranks"]["node"][rank].as_py())

    def _reserved(self) -> dict[NodeId, int]:
        living = [self._nodes[name] for name in self.machine.nodes]
        return {
            node.node: size
            for node in living
            if node.load is not None and not node.has_crashed.is_set() and (size := node.load.reserved_bytes)
        }

    def _where_it_stands(self) -> str:
        ranks = {rank: state.value for rank, state in self.machine.ranks.items()}
        missing = {rank: session.missing_blocks.tolist() for rank, session in self.sessions.items()}
        events = [type(entry.event).__name__ for entry in self.log]
        return f"{ranks}, missing {missing}, reserved {self._reserved()}, after {events}"
