"""The GPU worker: an arena, the ranks that live in it, and the user's code beside them."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter, time
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import cloudpickle

from megamind_ray import __version__
from megamind_ray.actors.boundary import wait_for
from megamind_ray.actors.collector import spare_imports
from megamind_ray.actors.context import RankContext
from megamind_ray.actors.dataplane import DataPlane, RayObjectStore
from megamind_ray.actors.fencing import Epoch, Fence
from megamind_ray.actors.fleet import GpuKey
from megamind_ray.actors.groups import by_order, in_group
from megamind_ray.actors.holdings import WorkerHoldings
from megamind_ray.actors.messages import (
    Delivery,
    RankResult,
    RunCall,
    WorkerFacts,
    WorkerStatus,
    rank_consumer,
)
from megamind_ray.actors.pool_check import find_pool_file
from megamind_ray.actors.rank_load import RankLoad
from megamind_ray.config import Config
from megamind_ray.core.demands import Int64Array
from megamind_ray.core.ids import Generation, LoadId, NodeId
from megamind_ray.core.program import RankProgram
from megamind_ray.core.recorder import NO_RECORD, Recorded, Recorder, RecordSettings
from megamind_ray.device.arena import Arena, HostArena
from megamind_ray.device.cuda import CudaArena
from megamind_ray.device.memory import device_budget_bytes, gpu_facts
from megamind_ray.engine.session import RankSession
from megamind_ray.errors import ClusterError, MegamindError, RequestError

if TYPE_CHECKING:
    import torch

__all__ = ["GpuWorker"]

_STOP_S: Final = 1.0  # how long a failed load waits for threads that still write
_MAX_FAILED: Final = 8  # ranks that failed whose errors are kept: a planner's successor may ask again


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank that is loading, or loaded, in this worker, and what user code keeps beside it."""

    load: RankLoad
    state: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] | None = None
    result: RankResult | None = None

    @property
    def session(self) -> RankSession:
        return self.load.session


class GpuWorker:
    """One per GPU, long-lived. ``load`` and ``unload`` run in the group ``moves``, user code in ``run``."""

    def __init__(
        self,
        device_memory_bytes: int | None,
        num_workers_on_node: int = 1,
        plane: DataPlane | None = None,
        place: GpuKey | None = None,
    ) -> None:
        """Takes its memory.

        Args:
            device_memory_bytes: Budget of the arena; None: what is free, on a CPU target this worker's part of it.
            num_workers_on_node: Workers that share the host's memory.
            plane: How blocks are fetched; default is Ray's object store.
            place: Node and GPU; default is where Ray put it.
        """
        self._plane = plane if plane is not None else RayObjectStore()
        self._lock = threading.Lock()
        self._ranks: dict[LoadId, _Rank] = {}
        # Loads that were stopped: the call that begins one may come after the call that stops it.
        self._aborted: set[LoadId] = set()
        self._failed: dict[tuple[LoadId, Generation], MegamindError] = {}
        self.fence = Fence()
        # Of the latest load: it is asked for when the load is over, also where the rank is gone by then.
        self._recorded: tuple[LoadId, Recorder] | None = None
        # Sessions that ended while a read into their memory was under way, or user code held their tensors.
        self._stuck: list[RankSession] = []
        self._node, self._gpu = place if place is not None else _own_place()
        self._arena = _make_arena(device_memory_bytes, num_workers_on_node, where=f"GPU {self._node[:8]}:{self._gpu}")
        if place is None:  # a process of its own
            spare_imports()

    @by_order("control")
    def facts(self) -> WorkerFacts:
        """The worker as it is now."""
        self._release_stuck(0.0)
        return WorkerFacts(
            node=self._node,
            gpu=self._gpu,
            pid=os.getpid(),
            device=self._arena.device,
            memory_bytes=self._arena.budget_bytes,
            free_bytes=self._arena.free_bytes,
        )

    @in_group("control")
    def epoch(self) -> Epoch:
        """The latest planner that it has heard of."""
        return self.fence.epoch

    @by_order("control")
    def serve(self) -> WorkerHoldings:
        """Obeys a planner from now on, and none before it; says what it has."""
        facts = self.facts()
        with self._lock:
            ranks = {load: rank.load.generation for load, rank in self._ranks.items()}
        return WorkerHoldings(release=__version__, facts=facts, ranks=ranks)

    @by_order("control")
    def leave(self) -> None:
        """Is about to be ended: by order, so that a planner that was succeeded ends nobody."""
        self.fence.leave()

    @by_order("moves")
    def load(
        self,
        program: RankProgram,
        agent: Any,
        generation: Generation,
        config: Config,
        record: RecordSettings | None = None,
    ) -> RankResult:
        """Loads a rank with the load's settings: reads its direct extents, takes its blocks from its node's agent.

        A planner's successor asks again: this waits for the first call, being in its group, and answers as it did.

        Raises:
            MegamindError: It cannot be finished; its memory is given back.
        """
        with self._lock:
            known, failed = self._ranks.get(program.load), self._failed.get((program.load, generation))
        if failed is not None:
            raise failed
        if known is not None and known.result is not None and known.load.generation == generation:
            return known.result
        rank = self._begin(program, generation, config, record)
        try:
            rank.load.receive(_RayHomeAgent(agent, rank.load))
        except BaseException as error:
            with self._lock:
                self._ranks.pop(program.load, None)
                self._stuck.append(rank.session)
                self._note_failed(program.load, generation, error)
            self._release_stuck(_STOP_S)
            raise
        rank.result = self._result(rank.session)
        return rank.result

    @by_order("control")
    def progress(self, load: LoadId, generation: Generation) -> WorkerStatus:
        """How far a rank is."""
        with self._lock:
            rank = self._ranks.get(load)
        if rank is None or rank.load.generation != generation:
            return WorkerStatus()
        return WorkerStatus(bytes_done=rank.session.bytes_to_device, failures=tuple(rank.load.failures))

    @by_order("control")
    def missing(self, load: LoadId, generation: Generation) -> Int64Array | None:
        """Plan ids of the blocks that have not arrived at a rank; None where it has not begun."""
        with self._lock:
            rank = self._ranks.get(load)
        return rank.session.missing_blocks if rank is not None and rank.load.generation == generation else None

    @by_order("control")
    def recorded(self, load: LoadId, first: int) -> Recorded:
        """Ends the recording of a load, the latest one, and gives a page of it from row ``first`` on."""
        with self._lock:
            latest = self._recorded
        return latest[1].page(first) if latest is not None and latest[0] == load else Recorded()

    @by_order("control")
    def abort(self, load: LoadId) -> None:
        """Stops a load; its ``load`` call then raises, also one that has yet to begin. A loaded rank is freed."""
        with self._lock:
            self._aborted.add(load)
            rank = self._ranks.get(load)
        if rank is not None and rank.load.stop():
            self._free(load)

    @by_order("moves")
    def unload(self, load: LoadId) -> None:
        """Frees a rank's memory.

        Raises:
            RequestError: User code still holds its tensors after a while; their memory comes back when it no longer
                does.
        """
        self._free(load)

    @by_order("run")
    def run(self, call: RunCall) -> Any:
        """Runs the user's function on a rank.

        Raises:
            RequestError: The rank is not loaded here, or the function cannot be unpickled here.
            Exception: What the function raises.
        """
        import torch

        with self._lock:
            rank = self._ranks.get(call.load)
        if rank is None:
            raise RequestError(f"model {call.model!r}: rank {call.rank} is not loaded in this worker; load it again")
        if rank.tensors is None:
            rank.tensors = rank.session.state_dict()
        context = RankContext(
            model=call.model,
            rank=call.rank,
            coords=call.coords,
            parallel=call.parallel,
            device=torch.device(self._arena.device),
            state_dict=dict(rank.tensors),
            state=rank.state,
            rendezvous=call.rendezvous,
        )
        fn, args = _unpickle(call)
        return fn(context, *args)

    def _begin(
        self, program: RankProgram, generation: Generation, config: Config, record: RecordSettings | None = None
    ) -> _Rank:
        recorder = NO_RECORD if record is None else record.recorder(wall=time, steps=perf_counter)
        session = RankSession(program, self._arena, config, recorder=recorder)
        load = RankLoad(session, self._plane, node=self._node, generation=generation, deadlines=config.deadlines)
        rank = _Rank(load)
        with self._lock:
            self._recorded = (program.load, recorder)
            if program.load not in self._aborted:
                self._ranks[program.load] = rank
                return rank
        session.release()
        raise ClusterError(f"rank {program.rank}: the load was stopped before it began")

    def _result(self, session: RankSession) -> RankResult:
        reads = session.reads
        return RankResult(
            report=session.report(node=self._node, gpu=self._gpu),
            bytes_read=reads.payload_bytes,
            bytes_retried=reads.retried_bytes,
            verified=session.verified if reads.payload_bytes else "none",
            faults=session.faults,
        )

    def _note_failed(self, load: LoadId, generation: Generation, error: BaseException) -> None:
        """Under the lock."""
        text = f"load {load}: {type(error).__name__}: {error}"
        self._failed[load, generation] = error if isinstance(error, MegamindError) else ClusterError(text)
        while len(self._failed) > _MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def _release_stuck(self, deadline_s: float) -> None:
        """Frees what can be freed of the sessions that ended while their memory was in use; one deadline for all."""
        until_s = monotonic() + deadline_s
        with self._lock:
            stuck, self._stuck = self._stuck, []
        for session in stuck:
            try:
                session.release(max(0.0, until_s - monotonic()))
            except RequestError:
                with self._lock:
                    self._stuck.append(session)

    def _free(self, load: LoadId) -> None:
        with self._lock:
            rank = self._ranks.pop(load, None)
        if rank is None:
            return
        rank.load.stop()
        rank.state.clear()
        rank.tensors = None
        gc.collect()  # tensors in cycles, as tracebacks of failed calls make them, hold leases
        try:
            rank.session.release(rank.load.deadlines.close_s)
        except RequestError as error:
            with self._lock:
                self._stuck.append(rank.session)
            raise RequestError(
                f"load {load}: code in rank {rank.session.program.rank}'s worker still holds its tensors; the model is "
                "unloaded, and its memory there comes back when they are forgotten"
            ) from error


class _RayHomeAgent:
    """The agent of this node behind its actor handle."""

    def __init__(self, handle: Any, load: RankLoad) -> None:
        self._handle = handle
        self._program = load.session.program
        self._generation = load.generation
        self._call_s = load.deadlines.call_s

    def exchange(
        self, acked: Sequence[int], rejected: Sequence[Delivery], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        load, rank = self._program.load, self._program.rank
        answer: tuple[Delivery, ...] | None = wait_for(
            self._handle.exchange.remote(
                load, rank_consumer(rank), self._generation, tuple(acked), tuple(rejected), limit, timeout_s
            ),
            timeout_s=timeout_s + self._call_s,
            what=f"rank {rank}: taking blocks from its node agent",
        )
        return answer

    def retire(self) -> None:
        load, rank = self._program.load, self._program.rank
        wait_for(
            self._handle.retire_rank.remote(load, rank, self._generation),
            timeout_s=self._call_s,
            what=f"rank {rank}: telling its node agent that it has all blocks",
        )


def _own_place() -> GpuKey:
    context = ray.get_runtime_context()
    return NodeId(context.get_node_id()), int(context.get_accelerator_ids()["GPU"][0])


def _make_arena(requested_bytes: int | None, num_workers: int, *, where: str) -> Arena:
    if gpu_facts():
        import torch

        if torch.cuda.is_available():
            return CudaArena(device_budget_bytes("cuda:0", requested_bytes), device="cuda:0")
    if requested_bytes is None:
        pool = find_pool_file(os.getppid())
        promised = pool.size_bytes - pool.resident_bytes if pool else 0  # the object store will take this too
        requested_bytes = max(0, device_budget_bytes("cpu") - promised) // num_workers
    return HostArena(device_budget_bytes("cpu", requested_bytes), where=where)


def _unpickle(call: RunCall) -> tuple[Any, tuple[Any, ...]]:
    try:
        fn, args = cloudpickle.loads(call.payload)
    except (ImportError, AttributeError) as error:
        raise RequestError(
            f"model {call.model!r}: the function cannot be loaded in the workers ({error}); its module must be there "
            "(a Ray job's working_dir, or a fleet started by the same job), or define it in the main script"
        ) from error
    return fn, args
