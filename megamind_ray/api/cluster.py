"""The cluster API: connect, load, run, unload."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megamind_ray.api.arguments import require_config, require_parallel
from megamind_ray.api.record import record_folder, write_record
from megamind_ray.config import Config, load_config, ray_address
from megamind_ray.core.ids import model_name
from megamind_ray.core.location import parse_location
from megamind_ray.core.parallel import Parallel, Rule
from megamind_ray.core.progress import Progress
from megamind_ray.core.report import LoadReport
from megamind_ray.errors import RequestError
from megamind_ray.units import parse_bytes

if TYPE_CHECKING:
    from megamind_ray.actors.client import FleetClient
    from megamind_ray.actors.messages import Lifetime, ModelInfo
    from megamind_ray.core.departure import DrainReport
    from megamind_ray.core.ids import NodeId
    from megamind_ray.core.topology import Topology

__all__ = ["Cluster", "LoadedModel", "connect", "down"]


def connect(
    address: str | None = None,
    num_gpus: int | None = None,
    device_memory: int | str | None = None,
    lifetime: Lifetime = "job",
    *,
    fleet: str = "default",
    pool: int | str | None = None,
    config: Config | None = None,
    start: bool = True,
) -> Cluster:
    """Connects to the fleet of a cluster, and starts the fleet if it does not run.

    Args:
        address: Ray cluster to join (``"10.0.0.1:6379"``); ``"local"`` starts one on this machine; None joins the
            running one (``RAY_ADDRESS``, or the one that runs here), else starts a local one.
        num_gpus: Logical GPUs of a local cluster. Refused together with a running one.
        device_memory: Arena budget per GPU, in bytes or as ``"20GiB"``; None takes what is free.
        lifetime: ``"job"`` ends the fleet with this process; ``"detached"`` leaves it until ``down``.
        fleet: Name of the fleet.
        pool: Object store of a local cluster, as ``device_memory``.
        config: Settings; None reads file and environment.
        start: False refuses to start a fleet that does not run.

    Raises:
        RequestError: The request contradicts what runs, or the fleet is of another release.
        ClusterError: The cluster cannot be reached or started.

    Example:
        >>> with connect(num_gpus=2) as cluster:
        ...     model = cluster.load("./llama", parallel=Parallel(tp=2))
        ...     model.run(lambda ctx: sorted(ctx.state_dict)[0])
    """
    if lifetime not in ("job", "detached"):
        raise RequestError(f"lifetime={lifetime!r}: take 'job' or 'detached'")
    require_config(config)
    from megamind_ray.actors.connection import connect_ray

    settings = load_config(profile=False) if config is None else config
    model_name(fleet)
    memory_bytes = None if device_memory is None else parse_bytes(device_memory, what="device_memory")
    pool_bytes = None if pool is None else parse_bytes(pool, what="pool")
    connection = connect_ray(address, ray_address=ray_address(), num_gpus=num_gpus, pool_bytes=pool_bytes)
    try:
        from megamind_ray.actors.client import FleetClient
        from megamind_ray.integrations.transformers import fallback_rules

        client = FleetClient.open(
            fleet,
            lifetime=lifetime,
            config=settings,
            device_memory_bytes=memory_bytes,
            start=start,
            fallback_rules=fallback_rules,
        )
        return Cluster(client, connection.address, settings, on_close=connection.close)
    except BaseException:
        connection.close()
        raise


def down(address: str | None = None, *, fleet: str = "default") -> list[str]:
    """Ends a detached fleet: its planner, agents and workers, whatever state they are in.

    Returns:
        Names of the actors that were ended; empty if there were none.

    Raises:
        ClusterError: The cluster cannot be reached.
        RequestError: No cluster runs.
    """
    from megamind_ray.actors.connection import connect_ray, find_cluster

    model_name(fleet)
    target = find_cluster(address, ray_address=ray_address())
    if target is None:
        raise RequestError("no Ray cluster runs on this machine; give its address (--address HOST:PORT or RAY_ADDRESS)")
    connection = connect_ray(target, ray_address=None, num_gpus=None, pool_bytes=None)
    try:
        from megamind_ray.actors.runtime import end_fleet

        return end_fleet(fleet)
    finally:
        connection.close()


class Cluster:
    """A connection to a fleet. Use it as a context manager, or call ``close``."""

    def __init__(self, client: FleetClient, address: str, config: Config, *, on_close: Callable[[], None]) -> None:
        """Made by ``connect``."""
        self._client = client
        self._config = config
        self._on_close = on_close
        self._closed = False
        self.address = address

    def load(
        self,
        uri: str | os.PathLike[str],
        parallel: Parallel | None = None,
        name: str | None = None,
        keep: bool = True,
        *,
        rules: Sequence[Rule] = (),
        allow_replication: bool = False,
        sidecar: str | os.PathLike[str] | bool | None = None,
        record: str | os.PathLike[str] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> LoadedModel:
        """Loads a checkpoint onto the GPUs of the fleet, each rank its own slices.

        Args:
            uri: Path or URI of a safetensors file or a Hugging Face folder, reachable from every node.
            parallel: The mesh; default is one rank.
            name: Name of the model in the fleet; default comes from the URI.
            keep: Leave the blocks in the pool as far as they fit, for fast reloads.
            rules: Placement rules that go before the built-in ones.
            allow_replication: Load also if more of the checkpoint is replicated than ``plan.max_replicated_share``.
            sidecar: Recorded checksums: None uses those beside the checkpoint, a path others, False none.
            record: A folder, new or empty, for what is recorded of the load: ``report.json``, ``timeline.json``,
                ``events.jsonl`` (``megamind replay`` reads it), ``trace.json`` for Perfetto and ``timeline.html``. A
                load that fails leaves what there is of them.
            on_progress: Called about three times a second on this thread.

        Raises:
            RequestError: The checkpoint or the mesh cannot be loaded as asked, or ``plan.topology`` cannot be read.
            CapacityError: It does not fit.
            IntegrityError: Bytes are wrong.
            SourceError: Storage failed after all retries.
            ClusterError: The cluster failed. In all these cases nothing of the model is left behind.
            RecordError: The load was done, and its record could not be written; the model stays loaded.
        """
        from megamind_ray.actors.messages import LoadRequest
        from megamind_ray.planning import load_topology

        self._require_open()
        require_parallel(parallel)
        topology = self._config.plan.topology
        request = LoadRequest(
            uri=_absolute(uri),
            parallel=parallel or Parallel(),
            name=None if name is None else model_name(name),
            keep=keep,
            config=self._config,
            rules=tuple(rules),
            allow_replication=allow_replication,
            sidecar=sidecar if sidecar is None or isinstance(sidecar, bool) else _absolute(sidecar),
            record=record is not None,
            known=load_topology(topology) if topology else None,
        )
        with record_folder(record) as folder:
            on_record = None if folder is None else partial(write_record, folder)
            return LoadedModel(self, self._client.load(request, on_progress, on_record))

    def models(self) -> list[ModelInfo]:
        """The models of the fleet, also those that others loaded."""
        self._require_open()
        return list(self._client.models())

    def model(self, name: str) -> LoadedModel:
        """A model that is loaded already, by whomever.

        Raises:
            RequestError: No model of that name is loaded.
        """
        self._require_open()
        return LoadedModel(self, self._client.report(model_name(name)))

    def unload(self, name: str) -> None:
        """Frees a model's device memory and its kept blocks.

        Raises:
            RequestError: No model of that name is loaded.
        """
        self._require_open()
        self._client.unload(model_name(name))

    def drain(
        self,
        node: str,
        *,
        force: bool = False,
        wait_s: float = 600.0,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> DrainReport:
        """Empties a node, so that it can leave the cluster. When this returns nothing of the fleet is left there.

        From the start on no load uses it. Then a load that is under way is waited for, kept blocks that no other node
        has are copied to others, and the fleet's actors on it end. Where that is refused or interrupted nothing is
        lost, and the node stays marked: drain it once more, or ``undrain`` it. A node that has been drained gives the
        same report again.

        Args:
            node: Ray's id of it, digits with which no other id begins, its address, or the name of its host.
            force: Unload models with ranks there, and give up blocks that have no room elsewhere.
            wait_s: How long a load that is under way may take; 0: it is not waited for.
            on_progress: Called about three times a second on this thread.

        Raises:
            RequestError: No such node; one that cannot leave (the last one, the planner's, Ray's head); models have
                ranks there; or a load is under way and is not to be waited for.
            CapacityError: Blocks that it alone keeps have no room elsewhere.
            ClusterError: A load took longer, or the node was lost before all was safe.
        """
        from megamind_ray.actors.messages import DrainRequest

        self._require_open()
        if not wait_s >= 0:
            raise RequestError(f"wait_s={wait_s!r}: take 0 or more seconds")
        return self._client.drain(DrainRequest(node=node, force=force, wait_s=wait_s), on_progress)

    def undrain(self, node: str) -> NodeId:
        """Takes a node back that is leaving: a drain of it is called off, and the next load uses it again.

        Args:
            node: As ``drain`` has it.

        Returns:
            Ray's id of it.

        Raises:
            RequestError: No such node, or it is not leaving.
        """
        self._require_open()
        return self._client.undrain(node)

    @property
    def leaving(self) -> tuple[NodeId, ...]:
        """Nodes that are to leave, or have been drained and are still in the cluster."""
        self._require_open()
        return self._client.leaving()

    def topology(self) -> Topology:
        """The fleet's nodes and GPUs with what is free now, as Ray has them: those that joined, not those that left.

        It waits for a load that is under way.
        """
        self._require_open()
        return self._client.topology()

    def close(self) -> None:
        """Disconnects. A fleet of lifetime ``"job"`` that this process started ends, a detached one goes on."""
        if self._closed:
            return
        self._closed = True
        try:
            self._client.close()
        finally:
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("this cluster connection was closed; connect again")


class LoadedModel:
    """A model on the GPUs of a fleet.

    Attributes:
        name: Its name in the fleet.
        report: What loading it moved, how long it took, what it proved.
    """

    def __init__(self, cluster: Cluster, report: LoadReport) -> None:
        """Made by ``Cluster.load``."""
        self._cluster = cluster
        self.name = model_name(report.model)
        self.report = report

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``fn(ctx, *args)`` in the actor of every rank.

        Calls of one model enter all ranks in the same order, whoever makes them. ``ctx`` has ``rank``, ``coords``,
        ``device``, ``state_dict`` (the rank's tensors), ``state`` (a dict that stays from call to call) and
        ``device_mesh``.

        Returns:
            The results, by rank.

        Raises:
            Exception: What ``fn`` raised in a rank.
            ClusterError: A worker died.
        """
        self._cluster._require_open()
        return self._cluster._client.run(self.name, fn, args)

    def unload(self) -> None:
        """Frees its device memory and kept blocks."""
        self._cluster.unload(self.name)


def _absolute(uri: str | os.PathLike[str]) -> str:
    """A local path as the planner, which has another working directory, must see it."""
    location = parse_location(uri)
    return (location.uri or "/") if location.is_local else os.fspath(uri)
