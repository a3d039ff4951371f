"""A fleet of threads in this process: real agents, ranks and load machine, no Ray; what is to go wrong is chosen.

Every node has a wire of its own, so that its blocks go with it. The planner's part is played by ``ThreadFleet.run``.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from megamind_ray.actors.agent_load import AgentLoad
from megamind_ray.actors.rank_load import RankLoad
from megamind_ray.actors.rerouting import Routes, extents_of
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
from megamind_ray.testing.strikes import NodeStrike, SlowStorage, Strike, WorkerStrike
from megamind_ray.testing.thread_nodes import HomeCalls, NodeWire, PeerCalls, ThreadNode
from megamind_ray.units import MIB

__all__ = ["ThreadFleet"]

_BOUND_S: Final = 60.0
_LOOK_S: Final = 0.01


@dataclass(slots=True, eq=False)
class _Run:
    """A generation of a rank."""

    load: RankLoad
    node: NodeId


class ThreadFleet:
    """Runs one load.

    Attributes:
        machine: Decides.
        log: What it was told, and said.
        sessions: By rank, the latest one.
        error: Why the load was given up; None while it was not.

    Args:
        transfer: What to move.
        config: Of the load.
        strikes: What is to go wrong.
        blind: Nodes that cannot see the files.
        storage: How nodes read, and the clock by which readers are slow; None: as they can, and none is.
        shaken: Delays and repeats calls at random, by this seed; None: does not.
    """

    def __init__(
        self,
        transfer: Transfer,
        config: Config,
        *,
        strikes: Sequence[Strike] = (),
        blind: Sequence[NodeId] = (),
        storage: SlowStorage | None = None,
        shaken: int | None = None,
    ) -> None:
        self.machine = LoadMachine(transfer.facts(max_worker_restarts=config.load.max_worker_restarts))
        self.log: list[LogEntry] = []
        self.sessions: dict[Rank, RankSession] = {}
        self.error: MegamindError | None = None
        self._transfer, self._config, self._blind = transfer, config, blind
        self._storage, self._watch = storage, StragglerWatch(config.straggler)
        self._routes = Routes(transfer.plan)
        self._events: queue.Queue[ev.Event] = queue.Queue()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._num_calls = 0
        self._strikes = deque(sorted(strikes, key=lambda one: one.after))
        self._random = random.Random(shaken)
        self._is_shaken = shaken is not None
        self._nodes: dict[NodeId, ThreadNode] = {}
        self._runs: dict[Rank, _Run] = {}
        self._heard: dict[object, int] = {}
        self._doomed: dict[NodeId, NodeStrike] = {}
        self._broken: list[str] = []

    def run(self) -> None:
        """To its end.

        Raises:
            AssertionError: It has not ended within a minute, or a thread of it broke.
        """
        for node in self.machine.nodes:
            self._open(node)
        self._events.put(ev.LoadStarted())
        self._ask()
        until_s = time.monotonic() + _BOUND_S
        try:
            while self.machine.state in (LoadState.PLANNED, LoadState.RUNNING):
                assert time.monotonic() < until_s, f"it hangs: {self._where_it_stands()}"
                assert not self._broken, self._broken
                self._take_event()
        finally:
            self._stop.set()
            if self.machine.state is not LoadState.DONE:
                self.close()

    def settle(self) -> dict[NodeId, int]:
        """Waits until nothing of the load is in the pools of nodes that took part to its end.

        Returns:
            Bytes that are still reserved, by node; none after a load that leaks nothing.
        """
        until_s = time.monotonic() + _BOUND_S
        while (left := self._reserved()) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        return left

    def close(self) -> None:
        """Ends the load on all nodes."""
        self._stop.set()
        for run in self._runs.values():
            run.load.stop()
        for node in self._nodes.values():
            assert node.load is not None
            node.load.close()

    @property
    def live_bytes(self) -> dict[NodeId, int]:
        """Bytes of blocks that something keeps, of all nodes."""
        return {name: size for name, node in self._nodes.items() if (size := node.memory.live_bytes)}

    def node(self, name: NodeId) -> ThreadNode:
        """A node that takes part."""
        return self._nodes[name]

    def call(self, caller: ThreadNode, callee: ThreadNode) -> None:
        """A call between two actors comes to its node: strikes fall, it takes its time, or it comes to nothing."""
        due: list[Strike] = []
        with self._lock:
            self._num_calls += 1
            while self._strikes and self._strikes[0].after <= self._num_calls:
                due.append(self._strikes.popleft())
            pause_s = self._random.choice((0.0, 0.0, 0.0, 0.002)) if self._is_shaken else 0.0
        for strike in due:
            self._strike(strike)
        if pause_s:
            time.sleep(pause_s)
        for node in (caller, callee):
            node.require_answer(self._stop)

    # What happens.

    def _strike(self, strike: Strike) -> None:
        if isinstance(strike, WorkerStrike):
            run = self._runs.get(strike.rank)
            if run is not None:
                run.load.stop()
                lost = ev.WorkerLost(rank=strike.rank, generation=run.load.generation, reason="it died")
                self._later(strike.noticed_after_s, lambda: self._events.put(lost))
            return
        node = self._nodes.get(strike.node)
        if node is None:  # it has no part yet; should it come to join, it will be found gone
            self._doomed[strike.node] = strike
            return
        if strike.kind == "crash":
            self._crash(node)
        elif strike.kind == "freeze":
            node.is_frozen.set()
        gone = ev.AgentLost(node=strike.node, reason=strike.kind)
        self._later(strike.noticed_after_s, lambda: self._events.put(gone))

    def _crash(self, node: ThreadNode) -> None:
        node.has_crashed.set()
        assert node.load is not None
        threading.Thread(target=node.load.close, daemon=True).start()
        for run in list(self._runs.values()):
            if run.node == node.node:
                run.load.stop()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()

    # The planner's part.

    def _take_event(self) -> None:
        try:
            event = self._events.get(timeout=_LOOK_S)
        except queue.Empty:
            self._ask()
            return
        said = tuple(self.machine.handle(event))
        self.log.append(LogEntry(at_s=0.0, event=event, instructions=said))
        for instruction in said:
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
        sources = self._routes.give(order, self.machine.nodes)
        self._transfer = replace(self._transfer, plan=self._routes.plan)
        for name, peers in sources.items():
            for peer in peers:
                self._tell(name, lambda load, peer=peer: load.relay_from(peer, passes_on=True))  # type: ignore[misc]
        fragment = self._fragment(order.node, order.extents)
        self._tell(order.node, lambda load: load.read_instead(fragment))

    def _drop(self, drop: ins.DropNode) -> None:
        routes = self._routes.drop(drop, self.machine.nodes)
        self._transfer = replace(self._transfer, plan=self._routes.plan)
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
            if self.machine.ranks[rank] is RankState.LOADING and not (self._is_shaken and self._random.random() < 0.1)
        )

    def _tell(self, name: NodeId, what: Callable[[AgentLoad], None]) -> bool:
        """Whether a node took an order; one that did not is lost."""
        node = self._nodes[name]
        if self._is_gone(node) or node.load is None:
            self._events.put(ev.AgentLost(node=name, reason="it took no order"))
            return False
        what(node.load)
        return True

    def _is_gone(self, node: ThreadNode) -> bool:
        return node.has_crashed.is_set() or node.is_frozen.is_set() or node.is_given_up.is_set()

    def _open(self, name: NodeId) -> None:
        node = ThreadNode(name)
        program = self._fragment(name)
        opener = self._storage.by_node[name] if self._storage is not None else None
        peers = {other: PeerCalls(self, node, other) for other in self.machine.nodes if other != name}
        node.load = AgentLoad(program, self._config, plane=NodeWire(self, node), peers=peers, opener=opener)
        self._nodes[name] = node
        if name in self._doomed:
            self._strike(self._doomed.pop(name))

    def _fragment(
        self, name: NodeId, extents: Sequence[ExtentId] | None = None, ranks: Sequence[Rank] | None = None
    ) -> AgentProgram:
        program = self._transfer.agent_program(name, extents=extents, ranks=ranks)
        return replace(program, files=replace(program.files, root="/nowhere")) if name in self._blind else program

    def _start_rank(self, rank: Rank, generation: Generation) -> None:
        program = compile_rank(self._transfer.plan, self._transfer.manifest, rank, self._transfer.load)
        session = RankSession(program, HostArena(64 * MIB), self._config)
        home = self._nodes[self._home(rank)]
        load = RankLoad(
            session, NodeWire(self, home), node=home.node, generation=generation, deadlines=self._config.deadlines
        )
        self.sessions[rank] = session
        self._runs[rank] = _Run(load, home.node)
        threading.Thread(target=self._fill, args=(load, rank, generation, home), daemon=True).start()

    def _fill(self, load: RankLoad, rank: Rank, generation: Generation, home: ThreadNode) -> None:
        try:
            load.receive(HomeCalls(self, home, rank, generation))
        except MegamindError as error:
            # As the driver does: a rank that fails with its node is lost with it.
            if home.has_crashed.is_set():
                self._events.put(ev.AgentLost(node=home.node, reason=str(error)))
            elif not load.is_stopped and not self._stop.is_set():
                self._events.put(ev.RankFailed(rank=rank, generation=generation, error=error))
            return
        except Exception:  # noqa: BLE001 - nobody is above this thread; ``run`` shows it
            self._broken.append(traceback.format_exc())
            return
        done = ev.RankDone(rank=rank, generation=generation)
        self._events.put(done)
        if self._is_shaken and self._random.random() < 0.2:
            self._later(0.005, lambda: self._events.put(done))

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
