"""The GPU worker: an arena, the ranks that live in it, and the user's code beside them."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import cloudpickle

from megamind_ray.actors.boundary import wait_for
from megamind_ray.actors.context import RankContext
from megamind_ray.actors.dataplane import DataPlane, RayObjectStore
from megamind_ray.actors.groups import in_group
from megamind_ray.actors.messages import (
    Delivery,
    ExtentFailure,
    RankResult,
    RunCall,
    WorkerFacts,
    WorkerStatus,
    rank_consumer,
)
from megamind_ray.actors.pool_check import find_pool_file
from megamind_ray.config import Config, DeadlineConfig
from megamind_ray.core.ids import ExtentId, Generation, LoadId, NodeId
from megamind_ray.core.program import RankProgram
from megamind_ray.device.arena import Arena, HostArena
from megamind_ray.device.cuda import CudaArena
from megamind_ray.device.memory import device_budget_bytes, gpu_facts
from megamind_ray.engine.session import RankSession
from megamind_ray.errors import ClusterError, IntegrityError, MegamindError, RequestError, SourceError

if TYPE_CHECKING:
    import torch

__all__ = ["GpuWorker"]

_STOP_S: Final = 1.0  # how long a stopped load waits for reads that are under way
_BATCH: Final = 8  # blocks per exchange: a call costs about 2 ms, a block of 8 MiB about as much


@dataclass(slots=True)
class _Rank:
    """A rank that is loading, or loaded, in this worker."""

    session: RankSession
    generation: Generation
    deadlines: DeadlineConfig
    stop: threading.Event = field(default_factory=threading.Event)
    failures: list[ExtentFailure] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] | None = None


class GpuWorker:
    """One per GPU, long-lived. ``load`` and ``unload`` run in the group ``moves``, user code in ``run``."""

    def __init__(
        self,
        device_memory_bytes: int | None,
        num_workers_on_node: int = 1,
        plane: DataPlane | None = None,
    ) -> None:
        """Takes its memory.

        Args:
            device_memory_bytes: Budget of the arena; None: what is free, on a CPU target this worker's part of it.
            num_workers_on_node: Workers that share the host's memory.
            plane: How blocks are fetched; default is Ray's object store.
        """
        self._plane = plane if plane is not None else RayObjectStore()
        self._lock = threading.Lock()
        self._ranks: dict[LoadId, _Rank] = {}
        # Sessions that ended while a read into their memory was under way, or user code held their tensors.
        self._stuck: list[RankSession] = []
        context = ray.get_runtime_context()
        self._node = NodeId(context.get_node_id())
        self._gpu = int(context.get_accelerator_ids()["GPU"][0])
        self._arena = _make_arena(device_memory_bytes, num_workers_on_node, where=f"GPU {self._node[:8]}:{self._gpu}")

    @in_group("control")
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

    @in_group("moves")
    def load(self, program: RankProgram, agent: Any, generation: Generation, config: Config) -> RankResult:
        """Loads a rank with the load's settings: reads its direct extents, takes its blocks from its node's agent.

        Raises:
            MegamindError: It cannot be finished; its memory is given back.
        """
        rank = _Rank(RankSession(program, self._arena, config), generation, config.deadlines)
        with self._lock:
            self._ranks[program.load] = rank
        try:
            self._receive(rank, agent)
            rank.session.finish()
        except BaseException:
            with self._lock:
                self._ranks.pop(program.load, None)
                self._stuck.append(rank.session)
            self._release_stuck(_STOP_S)
            raise
        session = rank.session
        reads = session.reads
        return RankResult(
            report=session.report(node=self._node, gpu=self._gpu),
            bytes_read=reads.payload_bytes,
            bytes_retried=reads.retried_bytes,
            verified=session.verified if reads.payload_bytes else "none",
            faults=session.faults,
        )

    @in_group("control")
    def progress(self, load: LoadId, generation: Generation) -> WorkerStatus:
        """How far a rank is."""
        with self._lock:
            rank = self._ranks.get(load)
        if rank is None or rank.generation != generation:
            return WorkerStatus()
        return WorkerStatus(bytes_done=rank.session.bytes_to_device, failures=tuple(rank.failures))

    @in_group("control")
    def abort(self, load: LoadId) -> None:
        """Stops a load; its ``load`` call then raises. A rank that is loaded already is freed."""
        with self._lock:
            rank = self._ranks.get(load)
        if rank is not None:
            rank.stop.set()
            rank.session.stop()
            self._free_if_finished(load)

    @in_group("moves")
    def unload(self, load: LoadId) -> None:
        """Frees a rank's memory.

        Raises:
            RequestError: User code still holds its tensors after a while; their memory comes back when it no longer
                does.
        """
        self._free(load)

    @in_group("run")
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

    def _receive(self, rank: _Rank, agent: Any) -> None:
        """Direct reads on threads of their own, blocks from the agent meanwhile, until nothing is missing."""
        session = rank.session
        direct = threading.Thread(target=self._read_direct, args=(rank,), name="direct-reads", daemon=True)
        direct.start()
        from_pool = set(session.program.pool_blocks.tolist())
        acked: list[int] = []
        rejected: list[Delivery] = []
        try:
            while len(missing := session.missing_blocks):
                if rank.stop.is_set():
                    raise ClusterError(f"rank {session.program.rank}: the load was stopped")
                if rank.failures or not from_pool.isdisjoint(missing.tolist()):
                    acked, rejected = self._exchange(rank, agent, acked, rejected)
                else:
                    direct.join(timeout=rank.deadlines.poll_s)
            wait_for(
                agent.retire_rank.remote(session.program.load, session.program.rank, rank.generation),
                timeout_s=rank.deadlines.call_s,
                what=f"rank {session.program.rank}: telling its node agent that it has all blocks",
            )
        finally:
            session.stop()
            direct.join(timeout=_STOP_S)

    def _read_direct(self, rank: _Rank) -> None:
        def failed(extent: int, error: MegamindError) -> None:
            retryable = isinstance(error, SourceError | IntegrityError | RequestError)
            rank.failures.append(
                ExtentFailure(extent=ExtentId(extent), node=self._node, error=error, retryable=retryable)
            )

        try:
            rank.session.read_direct(failed, stop=rank.stop)
        except ClusterError as error:
            if not rank.stop.is_set():
                failed(-1, error)

    def _exchange(
        self, rank: _Rank, agent: Any, acked: list[int], rejected: list[Delivery]
    ) -> tuple[list[int], list[Delivery]]:
        """Acks one batch and takes the next; returns what to ack and to reject with the next call."""
        begin = perf_counter()
        deliveries = self._ask(agent, rank, acked, rejected, limit=_BATCH, timeout_s=rank.deadlines.poll_s)
        rank.session.add_seconds("wait", perf_counter() - begin)
        arrived: list[int] = []
        damaged: list[Delivery] = []
        blocks = self._plane.get([one.handle for one in deliveries], timeout_s=rank.deadlines.call_s)
        for delivery in deliveries:
            try:
                rank.session.apply(delivery.block, blocks.pop(0), delivery.crc32s)
                arrived.append(delivery.serial)
            except IntegrityError:
                damaged.append(delivery)
        return arrived, damaged

    def _ask(
        self, agent: Any, rank: _Rank, acked: list[int], rejected: list[Delivery], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...]:
        program = rank.session.program
        answer: tuple[Delivery, ...] | None = wait_for(
            agent.exchange.remote(
                program.load,
                rank_consumer(program.rank),
                rank.generation,
                tuple(acked),
                tuple(rejected),
                limit,
                timeout_s,
            ),
            timeout_s=timeout_s + rank.deadlines.call_s,
            what=f"rank {program.rank}: taking blocks from its node agent",
        )
        if answer is None:
            raise ClusterError(f"rank {program.rank}: the load ended on its node before all blocks had come")
        return answer

    def _release_stuck(self, deadline_s: float) -> None:
        """Frees what can be freed of the sessions that ended while their memory was in use."""
        with self._lock:
            stuck, self._stuck = self._stuck, []
        for session in stuck:
            try:
                session.release(deadline_s)
            except RequestError:
                with self._lock:
                    self._stuck.append(session)

    def _free_if_finished(self, load: LoadId) -> None:
        with self._lock:
            rank = self._ranks.get(load)
        if rank is not None and not len(rank.session.missing_blocks):
            self._free(load)

    def _free(self, load: LoadId) -> None:
        with self._lock:
            rank = self._ranks.pop(load, None)
            if rank is None:
                return
            self._stuck.append(rank.session)
        rank.stop.set()
        rank.state.clear()
        rank.tensors = None
        gc.collect()  # tensors in cycles, as tracebacks of failed calls make them, hold leases
        self._release_stuck(rank.deadlines.close_s)
        if rank.session in self._stuck:
            raise RequestError(
                f"load {load}: code in rank {rank.session.program.rank}'s worker still holds its tensors; the model is "
                "unloaded, and its memory there comes back when they are forgotten"
            )


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
