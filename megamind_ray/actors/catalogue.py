"""What a fleet has loaded: its models, who holds their ranks, what is kept of them, and how they go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from megamind_ray.actors.boundary import ActorLostError, settle
from megamind_ray.actors.fleet import Fleet, GpuKey
from megamind_ray.actors.holdings import WorkerHoldings
from megamind_ray.actors.journal import JournaledModel
from megamind_ray.actors.messages import LoadRequest, ModelInfo, RunCall
from megamind_ray.actors.names import free_model_name
from megamind_ray.actors.pool_check import settled_pool_bytes
from megamind_ray.actors.succession import Estate
from megamind_ray.actors.transfer import Transfer, TransferResult
from megamind_ray.config import Config
from megamind_ray.core.ids import Generation, LoadId, ModelName, NodeId, Rank
from megamind_ray.core.report import LoadReport
from megamind_ray.core.topology import Topology
from megamind_ray.errors import ClusterError, MegamindError, RequestError

__all__ = ["Catalogue", "ModelEntry", "model_entry"]


@dataclass(slots=True)
class ModelEntry:
    """A loaded model.

    Attributes:
        info: As of its load.
        workers: The handles that hold its ranks: a replaced worker no longer does.
        kept: By node the handle that keeps blocks of it, and their bytes; a lost agent keeps none.
        report: What loading it moved.
        ticket: Under which its client knows the load.
    """

    info: ModelInfo
    workers: dict[Rank, tuple[GpuKey, Any]]
    kept: dict[NodeId, tuple[Any, int]]
    report: LoadReport
    ticket: str


class Catalogue:
    """The models of one fleet. Any thread may look; one at a time, under the planner's lock, adds and removes.

    Args:
        fleet: Which.
        config: Deadlines.
        on_removed: Called when a model is no longer there, and before it is freed: what frees it may be cut short.
    """

    def __init__(self, fleet: Fleet, config: Config, *, on_removed: Callable[[], None] = lambda: None) -> None:
        self._fleet = fleet
        self._config = config
        self._on_removed = on_removed
        self._models: dict[ModelName, ModelEntry] = {}

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(list(self._models.values()))

    def infos(self) -> tuple[ModelInfo, ...]:
        """All models, with what is kept of them now."""
        return tuple(
            replace(model.info, kept_bytes=sum(kept.values()), kept_by=kept)
            for model in self
            for kept in [self._kept_bytes(model)]
        )

    def get(self, name: str) -> ModelEntry:
        """A model by its name.

        Raises:
            RequestError: No such model.
        """
        model = self._models.get(ModelName(name))
        if model is None:
            known = ", ".join(sorted(self._models)) or "none"
            raise RequestError(f"no model {name!r} is loaded in fleet {self._fleet.name!r}; loaded: {known}")
        return model

    def free_name(self, request: LoadRequest) -> ModelName:
        """The name of a model that is to be loaded.

        Raises:
            RequestError: The one that was asked for is taken.
        """
        if request.name is None:
            return free_model_name(request.uri, self._models)
        if request.name in self._models:
            raise RequestError(
                f"a model named {request.name!r} is loaded already; unload it first or give another name"
            )
        return request.name

    def kept_bytes(self) -> Counter[NodeId]:
        """Bytes that all models keep in the pool of each node now."""
        kept: Counter[NodeId] = Counter()
        for model in self:
            kept.update(self._kept_bytes(model))
        return kept

    def with_taken(self, topology: Topology) -> Topology:
        """A topology with what blocks of these models, and objects of others, take of each pool now."""
        kept = self.kept_bytes()
        used = settled_pool_bytes(self._fleet.pool_used_bytes, topology, kept)
        nodes = (replace(node, pool_taken_bytes=max(kept[node.id], used.get(node.id, 0))) for node in topology.nodes)
        return replace(topology, nodes=tuple(nodes))

    def on_node(self, node: NodeId) -> list[ModelName]:
        """Models with ranks there, in a worker that lives."""
        return [
            model.info.name
            for model in self
            if any(key[0] == node and self._fleet.holds(key, worker) for key, worker in model.workers.values())
        ]

    def now_keeps(self, load: LoadId, node: NodeId, num_bytes: int) -> None:
        """A node has taken blocks of a load over, and keeps so much of it by now."""
        agent = self._fleet.agents.get(node)
        for model in self:
            if model.info.load == load and agent is not None:
                model.kept[node] = (agent, num_bytes)

    def add(self, model: ModelEntry) -> None:
        """From now on it is loaded."""
        self._models[model.info.name] = model

    def of_ticket(self, ticket: str) -> ModelEntry | None:
        """The model that a load has made, if it is still there."""
        return next((model for model in self if model.ticket == ticket), None)

    def remove(self, name: str) -> None:
        """Forgets a model, then frees its arenas and kept blocks.

        Raises:
            RequestError: No such model, or user code still holds its tensors.
        """
        model = self._models.pop(self.get(name).info.name)
        try:
            self._on_removed()
        finally:
            self._free(model)

    def journaled(self) -> tuple[JournaledModel, ...]:
        """All models, for the journal."""
        return tuple(JournaledModel(info=model.info, report=model.report, ticket=model.ticket) for model in self)

    def restore(self, models: Iterable[JournaledModel], estate: Estate) -> None:
        """Takes the models of an earlier planner; a rank whose worker has it no more counts as lost with its worker."""
        for model in models:
            info = model.info
            self._models[info.name] = ModelEntry(
                info=info,
                workers={
                    rank: ((node, gpu), _who_has(info, generation, estate.workers.get((node, gpu))))
                    for rank, node, gpu, generation in info.ranks
                },
                kept={
                    node: (agent, held.kept_bytes[info.load])
                    for node, (agent, held) in estate.agents.items()
                    if info.load in held.kept_bytes
                },
                report=model.report,
                ticket=model.ticket,
            )

    def clear(self) -> None:
        """Forgets all of them; whoever held them is gone."""
        self._models.clear()

    def submit(self, name: str, payload: bytes, *, rendezvous: str) -> list[Any]:
        """Submits a function to every rank of a model; the refs of the results, by rank.

        Args:
            name: Of the model.
            payload: As ``RunCall`` has it.
            rendezvous: What the names begin with under which ranks meet.

        Raises:
            RequestError: No such model.
            ClusterError: A worker that held a rank is gone.
        """
        model = self.get(name)
        for rank, (key, worker) in model.workers.items():
            if not self._fleet.holds(key, worker):
                raise ClusterError(
                    f"model {name!r}: rank {rank} was lost with its worker on GPU {key[0]}:{key[1]}; "
                    "unload the model and load it again"
                )
        info = model.info
        return [
            worker.run.remote(
                RunCall(
                    model=info.name,
                    load=info.load,
                    rank=rank,
                    coords=info.parallel.coords(rank),
                    parallel=info.parallel,
                    payload=payload,
                    rendezvous=f"{rendezvous}/{info.load}",
                )
            )
            for rank, (_, worker) in sorted(model.workers.items())
        ]

    def _kept_bytes(self, model: ModelEntry) -> dict[NodeId, int]:
        """Bytes that the model keeps in the pools now."""
        return {
            node: num_bytes
            for node, (agent, num_bytes) in list(model.kept.items())
            if self._fleet.has_agent(node, agent)
        }

    def _free(self, model: ModelEntry) -> None:
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


def _who_has(info: ModelInfo, generation: Generation, held: tuple[Any, WorkerHoldings] | None) -> Any:
    """The worker that still has a rank of a model; else something that no fleet holds."""
    return held[0] if held is not None and held[1].ranks.get(info.load) == generation else object()


def model_entry(
    transfer: Transfer, result: TransferResult, report: LoadReport, request: LoadRequest, fleet: Fleet, ticket: str
) -> ModelEntry:
    """The model that a load has made."""
    plan = result.plan
    kept = {
        node: (fleet.agents.get(node), one.kept.num_bytes) for node, one in result.agents.items() if one.kept.num_bytes
    }
    rows = plan.tables["ranks"].to_pylist()
    keys: dict[Rank, GpuKey] = {Rank(row["rank"]): (NodeId(row["node"]), row["gpu"]) for row in rows}
    return ModelEntry(
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
        workers={rank: (key, result.workers[rank]) for rank, key in keys.items()},
        kept=kept,
        report=report,
        ticket=ticket,
    )
