"""The planner: decides what a load moves where, has it done, and knows what is loaded. One actor per fleet."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final

import numpy as np

from megamind_ray import __version__
from megamind_ray.actors.boundary import ActorLostError, settle
from megamind_ray.actors.fleet import Fleet, GpuKey, Spawner
from megamind_ray.actors.groups import in_group
from megamind_ray.actors.load_driver import LoadDriver
from megamind_ray.actors.load_report import build_report, pool_notes
from megamind_ray.actors.messages import Lifetime, LoadRequest, ModelInfo, PlannerFacts, RunCall
from megamind_ray.actors.names import free_model_name
from megamind_ray.actors.pool_check import check_pool, settled_pool_bytes
from megamind_ray.actors.recording import RecordBook
from megamind_ray.actors.ticket import Ticket
from megamind_ray.actors.transfer import Transfer, TransferResult, spares_beside
from megamind_ray.actors.visibility import Visibility, look_around
from megamind_ray.config import Config
from megamind_ray.core.ids import LoadId, ModelName, NodeId, Rank
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.plan import Plan
from megamind_ray.core.progress import Progress
from megamind_ray.core.recording import LoadRecord
from megamind_ray.core.report import LoadReport
from megamind_ray.core.topology import Topology
from megamind_ray.errors import ClusterError, MegamindError, RequestError
from megamind_ray.io import open_manifest
from megamind_ray.io.copies import reference_notes, require_mirrors
from megamind_ray.planning import (
    RuleSource,
    build_demands,
    build_plan,
    choose_keep_blocks,
    pool_budget_bytes,
    with_known_links,
)

__all__ = ["Planner"]

_CANCEL_EVERY_S: Final = 0.1  # how often a load that queues looks whether it is still wanted


@dataclass(slots=True)
class _Model:
    """A loaded model.

    Attributes:
        info: As of its load.
        plan: What was planned.
        workers: The handles that hold its ranks: a replaced worker no longer does.
        kept: By node the handle that keeps blocks of it, and their bytes; a lost agent keeps none.
        report: What loading it moved.
    """

    info: ModelInfo
    plan: Plan
    workers: dict[Rank, tuple[GpuKey, Any]]
    kept: dict[NodeId, tuple[Any, int]]
    report: LoadReport


class Planner:
    """Plans, has executed, and remembers. Methods run on threads of their concurrency groups (see ``runtime``)."""

    def __init__(
        self,
        fleet: str,
        *,
        lifetime: Lifetime,
        config: Config,
        spawner: Spawner,
        device_memory_bytes: int | None = None,
        owner: str = "",
        fallback_rules: RuleSource | None = None,
    ) -> None:
        self._name = fleet
        self._owner = owner
        self._lifetime: Lifetime = lifetime
        self._config = config
        self._device_memory_bytes = device_memory_bytes
        self._fallback_rules = fallback_rules
        self._fleet = Fleet(
            fleet, lifetime=lifetime, config=config, spawner=spawner, device_memory_bytes=device_memory_bytes
        )
        self._moves = threading.Lock()  # one load or unload at a time
        self._calls = threading.Lock()  # collective calls enter all ranks in one order
        self._tickets: dict[str, Ticket] = {}
        self._models: dict[ModelName, _Model] = {}
        self._records = RecordBook()
        self._num_loads = 0
        # Load ids begin again with each planner; what outlives one is marked with this.
        self._incarnation = uuid.uuid4().hex

    @in_group("control")
    def hello(self, version: str) -> PlannerFacts:
        """Greets a client.

        Raises:
            RequestError: The client is of another release.
        """
        if version != __version__:
            raise RequestError(
                f"fleet {self._name!r} runs megamind-ray {__version__}, this client is {version}; use the same "
                f"release, or end the fleet with `megamind down --fleet {self._name}` and start it anew"
            )
        return PlannerFacts(
            version=__version__,
            fleet=self._name,
            lifetime=self._lifetime,
            owner=self._owner,
            device_memory_bytes=self._device_memory_bytes,
        )

    @in_group("moves")
    def load(self, ticket_id: str, request: LoadRequest) -> LoadReport:
        """Loads a checkpoint onto the fleet.

        Raises:
            MegamindError: It cannot be done or went wrong; nothing of it is left behind.
        """
        ticket = self._tickets.setdefault(ticket_id, Ticket())
        try:
            while not self._moves.acquire(timeout=_CANCEL_EVERY_S):
                ticket.raise_if_cancelled()
            try:
                return self._load(ticket, request)
            finally:
                self._moves.release()
                self._records.keep(ticket_id, ticket.recorded())
        finally:
            self._tickets.pop(ticket_id, None)

    @in_group("control")
    def record(self, ticket_id: str) -> LoadRecord | None:
        """What was recorded of a load that has ended, well or not; once. None where nothing was to be recorded."""
        return self._records.take(ticket_id)

    @in_group("control")
    def progress(self, ticket_id: str) -> Progress:
        """How far a load is. A ticket that is not there yet, or no more, is ``queued`` with no bytes."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.driver is None:
            return Progress(phase=ticket.phase if ticket else "queued")
        ranks = ticket.driver.progress()
        return Progress(
            phase=ticket.phase,
            bytes_done=sum(rank.bytes_done for rank in ranks),
            bytes_total=sum(rank.bytes_total for rank in ranks),
            ranks=ranks,
        )

    @in_group("control")
    def cancel(self, ticket_id: str, reason: str) -> None:
        """Stops a load, also one that still queues."""
        ticket = self._tickets.setdefault(ticket_id, Ticket())
        ticket.cancelled = reason
        if ticket.driver is not None:
            ticket.driver.cancel(reason)

    @in_group("control")
    def models(self) -> tuple[ModelInfo, ...]:
        """What is loaded."""
        return tuple(
            replace(model.info, kept_bytes=sum(self._kept_bytes(model).values()))
            for model in list(self._models.values())
        )

    @in_group("control")
    def report(self, name: str) -> LoadReport:
        """What loading a model moved.

        Raises:
            RequestError: No such model.
        """
        return self._model(name).report

    @in_group("moves")
    def topology(self) -> Topology:
        """The fleet's hardware now."""
        with self._moves:
            self._fleet.refresh()
            return self._fleet.topology()

    @in_group("moves")
    def unload(self, name: str) -> None:
        """Frees a model's arenas and kept blocks.

        Raises:
            RequestError: No such model, or user code still holds its tensors; it is unloaded all the same, and their
                memory comes back when they are forgotten.
        """
        with self._moves:
            model = self._model(name)
            del self._models[model.info.name]
            self._free(model)

    @in_group("control")
    def run(self, name: str, payload: bytes) -> list[Any]:
        """Submits a function to every rank of a model; returns the refs of the results, by rank.

        Raises:
            RequestError: No such model.
            ClusterError: A worker that held a rank is gone.
        """
        with self._calls:
            model = self._model(name)
            for rank, (key, worker) in model.workers.items():
                if not self._fleet.holds(key, worker):
                    raise ClusterError(
                        f"model {name!r}: rank {rank} was lost with its worker on GPU {key[0]}:{key[1]}; "
                        "unload the model and load it again"
                    )
            return [
                worker.run.remote(
                    RunCall(
                        model=model.info.name,
                        load=model.info.load,
                        rank=rank,
                        coords=model.plan.parallel.coords(rank),
                        parallel=model.plan.parallel,
                        payload=payload,
                        rendezvous=f"{self._incarnation}/{model.info.load}",
                    )
                )
                for rank, (_, worker) in sorted(model.workers.items())
            ]

    @in_group("control")
    def shut_down(self) -> None:
        """Ends all actors of the fleet but this one."""
        for ticket in list(self._tickets.values()):
            ticket.cancelled = "the fleet was taken down"
            if ticket.driver is not None:
                ticket.driver.cancel(ticket.cancelled)
        self._fleet.shut_down()
        self._models.clear()

    def _load(self, ticket: Ticket, request: LoadRequest) -> LoadReport:
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        begin = monotonic()
        if request.record:
            ticket.start_recording()
        with ticket.timed("manifest"):
            manifest = open_manifest(
                request.uri, sidecar=request.sidecar, io=request.config.io, retry=request.config.retry
            )
            require_mirrors(manifest, request.config.io.mirrors, retry=request.config.retry)
            name = self._free_name(request)
        with ticket.timed("workers"):
            self._fleet.refresh()
            seen = look_around(self._fleet, manifest, request.config)
            topology = self._topology_now(request)
        with ticket.timed("plan"):
            demands = build_demands(
                manifest,
                request.parallel,
                rules=request.rules,
                fallback_rules=self._fallback_rules or (),
                max_replicated_share=request.config.plan.max_replicated_share,
                allow_replication=request.allow_replication,
            )
            plan = build_plan(
                manifest, demands, topology, config=request.config, keep=request.keep, readers=seen.readers
            )
            transfer = self._transfer(name, plan, manifest, topology, request.config, seen)
        with ticket.timed("transfer"):
            ticket.driver = LoadDriver(transfer, self._fleet, request.config, record=ticket.record, began_s=begin)
            if ticket.cancelled is not None:
                ticket.driver.cancel(ticket.cancelled)
            result = ticket.driver.run()
        ticket.phase = "finish"
        seconds = ticket.seconds | {"total": monotonic() - begin}
        report = build_report(
            name,
            request,
            manifest,
            result,
            keep_blocks=transfer.keep_blocks,
            seconds=seconds,
            started_at=started_at,
            notes=(*pool_notes(topology), *reference_notes(manifest, request.config.io.mirrors), *seen.notes),
        )
        self._models[name] = self._loaded(transfer, result, report, request)
        return report

    def _topology_now(self, request: LoadRequest) -> Topology:
        """The fleet, with the links of a topology file and what other models' kept blocks take of each pool."""
        topology = self._fleet.topology()
        if not topology.num_gpus:
            raise RequestError(
                "the cluster has no free GPU for this fleet; `ray status` shows who holds them. On a machine without "
                "GPUs ask for logical ones: `megamind load --num-gpus N` or connect(num_gpus=N) where that starts Ray, "
                "`ray start --num-gpus N` where Ray runs already"
            )
        if request.known is not None:
            topology = with_known_links(topology, request.known, origin=request.config.plan.topology)
        kept: Counter[NodeId] = Counter()
        for model in self._models.values():
            kept.update(self._kept_bytes(model))
        used = settled_pool_bytes(self._fleet.pool_used_bytes, topology, kept)
        nodes = (replace(node, pool_taken_bytes=max(kept[node.id], used.get(node.id, 0))) for node in topology.nodes)
        return replace(topology, nodes=tuple(nodes))

    def _kept_bytes(self, model: _Model) -> dict[NodeId, int]:
        """Bytes that the model keeps in the pools now."""
        return {
            node: num_bytes
            for node, (agent, num_bytes) in list(model.kept.items())
            if self._fleet.has_agent(node, agent)
        }

    def _transfer(
        self,
        name: ModelName,
        plan: Plan,
        manifest: Manifest,
        topology: Topology,
        config: Config,
        seen: Visibility,
    ) -> Transfer:
        sizes = plan.tables["blocks"]["nbytes"].to_numpy()
        kept = choose_keep_blocks(plan, topology, config) if plan.keep else {}
        credit: dict[NodeId, int] = {}
        for node_id in map(NodeId, sorted({*plan.tables["ranks"]["node"].to_pylist(), *plan.pool_need_bytes})):
            stays = int(sizes[kept[node_id]].sum()) if node_id in kept else 0
            credit[node_id] = pool_budget_bytes(topology.node(node_id), config) - stays
            need = min(credit[node_id] + stays, plan.pool_need_bytes.get(node_id, 0))
            check_pool(self._fleet.agent_facts[node_id], need)
        self._num_loads += 1
        readers = [node.id for node in topology.nodes if seen.readers is None or node.id in seen.readers]
        return Transfer(
            load=LoadId(f"{name}#{self._num_loads}"),
            plan=plan,
            manifest=manifest,
            # Of the others, for a load that loses nodes and needs them.
            credit_bytes={node.id: pool_budget_bytes(node, config) for node in topology.nodes} | credit,
            keep_blocks={node: kept.get(node, np.zeros(0, np.int64)) for node in credit},
            readers=tuple(readers),
            spares=spares_beside(plan, topology),
        )

    def _loaded(self, transfer: Transfer, result: TransferResult, report: LoadReport, request: LoadRequest) -> _Model:
        plan = result.plan
        kept = {node: (self._fleet.agents.get(node), one.kept.num_bytes) for node, one in result.agents.items()}
        rows = plan.tables["ranks"].to_pylist()
        keys: dict[Rank, GpuKey] = {Rank(row["rank"]): (NodeId(row["node"]), row["gpu"]) for row in rows}
        return _Model(
            info=ModelInfo(
                name=ModelName(report.model),
                load=transfer.load,
                uri=request.uri,
                parallel=request.parallel,
                num_bytes=plan.bytes_to_device,
                kept_bytes=sum(num_bytes for _, num_bytes in kept.values()),
                loaded_at=datetime.now(UTC).isoformat(timespec="seconds"),
                ranks=tuple((rank, *keys[rank], result.generations[rank]) for rank in sorted(keys)),
            ),
            plan=plan,
            workers={rank: (key, result.workers[rank]) for rank, key in keys.items()},
            kept=kept,
            report=report,
        )

    def _free(self, model: _Model) -> None:
        load = model.info.load
        workers = [worker for key, worker in model.workers.values() if self._fleet.holds(key, worker)]
        deadlines = self._config.deadlines
        drops = [agent.unload.remote(load) for agent in self._fleet.agents.values()]
        frees = [worker.unload.remote(load) for worker in workers]
        # A worker waits close_s for user code that still holds tensors.
        timeout_s = deadlines.call_s + deadlines.close_s
        for answer in settle([*drops, *frees], timeout_s=timeout_s, what=f"unloading {model.info.name}"):
            if isinstance(answer, MegamindError) and not isinstance(answer, ActorLostError):
                raise answer

    def _model(self, name: str) -> _Model:
        model = self._models.get(ModelName(name))
        if model is None:
            known = ", ".join(sorted(self._models)) or "none"
            raise RequestError(f"no model {name!r} is loaded in fleet {self._name!r}; loaded: {known}")
        return model

    def _free_name(self, request: LoadRequest) -> ModelName:
        if request.name is not None:
            if request.name in self._models:
                raise RequestError(
                    f"a model named {request.name!r} is loaded already; unload it first or give another name"
                )
            return request.name
        return free_model_name(request.uri, self._models)
