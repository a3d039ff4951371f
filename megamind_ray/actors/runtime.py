"""Makes the plain classes remote. The only place with ``ray.remote``; it wires everything else."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from typing import Any, Final, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megamind_ray.actors.boundary import settle, stand_down_by, wait_for
from megamind_ray.actors.fencing import Epoch, bare, commanded
from megamind_ray.actors.gpu_worker import GpuWorker
from megamind_ray.actors.journal import Charter
from megamind_ray.actors.messages import Lifetime
from megamind_ray.actors.names import NAMESPACE, belongs_to, is_agent, is_member, nursery_name, planner_name
from megamind_ray.actors.node_agent import NodeAgent
from megamind_ray.actors.nursery import Nursery
from megamind_ray.actors.planner import Planner
from megamind_ray.actors.spawner import NodeResources
from megamind_ray.core.ids import NodeId
from megamind_ray.errors import ClusterError

__all__ = [
    "RaySpawner",
    "abandon_load",
    "end_fleet",
    "fleet_actors",
    "is_orphaned",
    "restart_planner",
    "running_planner",
    "start_planner",
]

# Threads per concurrency group. ``exchange`` is a long poll: a thread for each rank of a node, and for each node that
# takes blocks from here ``RELAY_FETCHES``; as a rule these are the two beside it in the line of the load.
_AGENT_GROUPS: Final = {"control": 4, "exchange": 96}
_WORKER_GROUPS: Final = {"control": 4, "moves": 1, "run": 1}
_PLANNER_GROUPS: Final = {"control": 8, "moves": 16}
_HEAD: Final = "node:__internal_head__"  # a resource that Ray gives to the node of its head


# Ray starts a planner again that ends by itself, so many times; after that a client has to.
_PLANNER_RESTARTS: Final = 10
_NURSERY_S: Final = 30.0  # it answers at once, or its node is in trouble
_LEAVE_S: Final = 1.0  # an actor that does not leave at its word within it is ended by force
_GONE_S: Final = 5.0  # how long actors whose driver has ended may still be found by name
_GONE_EVERY_S: Final = 0.1
_STABLE_S: Final = 1.0  # of a fleet that is being taken down, some actor ends within it

# Ray ends an actor when the process that started it forgets its handle.
_nurseries: dict[str, Any] = {}


class RaySpawner:
    """Starts actors on given nodes. Picklable: it travels into the planner.

    Args:
        fleet: Of which fleet.
        lineage: Of the nursery that starts its actors; empty where they are detached.
    """

    def __init__(self, fleet: str, lineage: str) -> None:
        self._fleet = fleet
        self.lineage = lineage
        self._epoch = Epoch()

    def take_command(self, epoch: Epoch) -> None:
        self._epoch = epoch
        stand_down_by(partial(os._exit, 1))

    def members(self) -> list[tuple[str, Any]]:
        names = _members(self._fleet)
        until_s = monotonic() + _GONE_S
        # Of a driver that has ended: Ray ends them, and their GPUs are free a moment later.
        while any(not is_member(name, self._fleet, self.lineage) for name in names) and monotonic() < until_s:
            sleep(_GONE_EVERY_S)
            names = _members(self._fleet)
        found: list[tuple[str, Any]] = []
        for name in names:
            try:
                handle = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:  # it ended between listing and looking
                continue
            if is_member(name, self._fleet, self.lineage):
                found.append((name, handle))
            else:
                ray.kill(handle, no_restart=True)
        return found

    def nodes(self) -> list[NodeResources]:
        free = _free_resources()
        return [
            NodeResources(
                node=NodeId(row["NodeID"]),
                address=row["NodeManagerAddress"],
                num_gpus=int(row["Resources"].get("GPU", 0)),
                free_gpus=int(free.get(row["NodeID"], {}).get("GPU", 0)),
                pool_used_bytes=_used(row["Resources"], free.get(row["NodeID"], {}), "object_store_memory"),
                host=row["NodeManagerHostname"],
                is_head=_HEAD in row["Resources"],
            )
            for row in sorted(ray.nodes(), key=lambda row: (row["NodeManagerAddress"], row["NodeID"]))
            if row["Alive"]
        ]

    def here(self) -> NodeId:
        return _here()

    def agent(self, name: str, node: NodeId, lifetime: Lifetime) -> Any:
        return self._start(partial(_start_agent, name, node, lifetime))

    def worker(self, name: str, node: NodeResources, lifetime: Lifetime, device_memory_bytes: int | None) -> Any:
        return self._start(partial(_start_worker, name, node, lifetime, device_memory_bytes))

    def kill(self, handle: Any) -> None:
        threading.Thread(target=_end, args=(handle,), name="end-actor", daemon=True).start()

    def _start(self, start: Callable[[], Any]) -> Any:
        if not self.lineage:
            return commanded(start(), self._epoch)
        nursery = ray.get_actor(nursery_name(self._fleet), namespace=NAMESPACE)
        what = f"fleet {self._fleet!r}: starting an actor"
        return commanded(wait_for(nursery.start.remote(start), timeout_s=_NURSERY_S, what=what), self._epoch)


def _start_agent(name: str, node: NodeId, lifetime: Lifetime) -> Any:
    actor = ray.remote(concurrency_groups=_AGENT_GROUPS)(NodeAgent)
    return actor.options(**_options(name, lifetime), scheduling_strategy=_on(node)).remote()


def _start_worker(name: str, node: NodeResources, lifetime: Lifetime, device_memory_bytes: int | None) -> Any:
    actor = ray.remote(concurrency_groups=_WORKER_GROUPS)(GpuWorker)
    return actor.options(**_options(name, lifetime), num_gpus=1, scheduling_strategy=_on(node.node)).remote(
        device_memory_bytes, num_workers_on_node=node.num_gpus
    )


def _start_planner(charter: Charter, lineage: str) -> Any:
    actor = ray.remote(concurrency_groups=_PLANNER_GROUPS)(Planner)
    # On this process's node: a path means there what it means to the caller. Of actors that ask for no CPU, Ray starts
    # about half elsewhere where the affinity is soft, though that node has room.
    options = _options(planner_name(charter.fleet), charter.lifetime) | {"max_restarts": _PLANNER_RESTARTS}
    return actor.options(**options, get_if_exists=True, scheduling_strategy=_on(_here())).remote(
        charter, RaySpawner(charter.fleet, lineage)
    )


def _end(handle: Any) -> None:
    """Ends an actor once it has heard of it, which it refuses if there is a later planner, or where it does not answer.

    A planner that was frozen meanwhile may have come too late for an answer: then it asks again.
    """
    for _ in range(2):
        began_s = monotonic()
        settle([handle.leave.remote()], timeout_s=_LEAVE_S, what="ending an actor")
        if monotonic() - began_s < 2 * _LEAVE_S:
            break
    ray.kill(bare(handle), no_restart=True)


def start_planner(charter: Charter, *, dead: Any | None = None) -> Any:
    """The planner of a fleet: the running one, else a new one.

    Args:
        charter: What a new fleet is started with; of one whose planner was lost, it keeps its own.
        dead: The handle of a planner that was lost: it is ended for good.

    Raises:
        ClusterError: It cannot be started.
    """
    if charter.lifetime == "detached" or is_orphaned(charter.fleet):
        return _start_detached(replace(charter, lifetime="detached"), dead)
    # Where the driver is: with its node, all of the fleet ends.
    nursery = (
        ray.remote(Nursery)
        .options(
            **_options(nursery_name(charter.fleet), "job") | {"max_restarts": -1},
            get_if_exists=True,
            scheduling_strategy=_on(_here()),
        )
        .remote(f"{uuid.uuid4().hex[:8]}-", partial(_start_planner, charter))
    )
    _nurseries[charter.fleet] = nursery
    return _planner_of(nursery, charter, dead)


def restart_planner(charter: Charter, *, dead: Any | None = None) -> Any:
    """The planner of a fleet that runs, or whose planner was lost: as ``start_planner``, but no new fleet.

    Raises:
        ClusterError: The fleet has ended.
    """
    ended = ClusterError(f"fleet {charter.fleet!r} has ended; connect again to start it anew")
    if charter.lifetime == "detached":
        if not is_orphaned(charter.fleet):
            raise ended
        return _start_detached(charter, dead)
    try:
        nursery = ray.get_actor(nursery_name(charter.fleet), namespace=NAMESPACE)
    except ValueError:  # Ray's word for: no such actor
        raise ended from None
    return _planner_of(nursery, charter, dead)


def _start_detached(charter: Charter, dead: Any | None) -> Any:
    if dead is not None:
        forget_planner(dead)
    return _start_planner(charter, "")


def _planner_of(nursery: Any, charter: Charter, dead: Any | None) -> Any:
    if dead is not None:
        forget_planner(dead)
    what = f"fleet {charter.fleet!r}: starting its planner"
    return wait_for(nursery.planner.remote(dead), timeout_s=_NURSERY_S, what=what)


def is_orphaned(fleet: str) -> bool:
    """Whether a detached fleet, which has no planner, has agents or workers that one could take over.

    Not those of a fleet that is just being taken down: of that, fewer and fewer are left.
    """
    left = None
    while (names := {name for name in _members(fleet) if is_member(name, fleet, "")}) and names != left:
        left = names
        sleep(_STABLE_S)
    return bool(names)


def abandon_load(fleet: str, ticket: str, *, timeout_s: float) -> None:
    """Ends a load on all agents and workers, and for the next planner, where there is none that could."""
    handles: list[tuple[str, Any]] = []
    for name in _members(fleet):
        with suppress(ValueError):  # it ended between listing and looking
            handles.append((name, ray.get_actor(name, namespace=NAMESPACE)))
    what = "giving up a load without a planner"
    agents = [handle.abandon.remote(ticket) for name, handle in handles if is_agent(name, fleet)]
    loads = {load for load in settle(agents, timeout_s=timeout_s, what=what) if isinstance(load, str)}
    workers = [handle for name, handle in handles if not is_agent(name, fleet)]
    settle([worker.abort.remote(load) for worker in workers for load in loads], timeout_s=timeout_s, what=what)


def running_planner(fleet: str) -> Any | None:
    """The fleet's planner if it runs."""
    try:
        return ray.get_actor(planner_name(fleet), namespace=NAMESPACE)
    except ValueError:  # Ray's word for: no such actor
        return None


def forget_planner(dead: Any) -> None:
    """Ends a planner for good; and the process that started it, which remembers it by name, finds its successor."""
    ray.kill(dead, no_restart=True)


def fleet_actors(fleet: str) -> list[str]:
    """Names of the living actors of a fleet."""
    rows = ray.util.list_named_actors(all_namespaces=True)
    return sorted(row["name"] for row in rows if row["namespace"] == NAMESPACE and belongs_to(row["name"], fleet))


def _members(fleet: str) -> list[str]:
    apart = (planner_name(fleet), nursery_name(fleet))
    return [name for name in fleet_actors(fleet) if name not in apart]


def end_fleet(fleet: str) -> list[str]:
    """Kills every actor that carries the fleet's name, the planner and who starts it first; returns their names."""
    names = fleet_actors(fleet)
    first = (planner_name(fleet), nursery_name(fleet))
    for name in sorted(names, key=lambda name: first.index(name) if name in first else len(first)):
        try:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        except ValueError:  # it ended between listing and killing
            continue
    return names


def _options(name: str, lifetime: Lifetime) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached" if lifetime == "detached" else None,
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
    }


def _here() -> NodeId:
    return NodeId(ray.get_runtime_context().get_node_id())


def _on(node: NodeId) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _used(total: Mapping[str, float], free: Mapping[str, float], name: str) -> int:
    """0 where Ray does not say: a resource of which nothing is free is left out of the one, not of the other."""
    return int(total.get(name, 0) - free.get(name, 0)) if free else 0


def _free_resources() -> Mapping[str, Mapping[str, float]]:
    """Free resources by node id. Ray has no public call for this (``ray.available_resources`` sums over nodes)."""
    from ray._private.state import available_resources_per_node

    per_node = cast(Mapping[str, Mapping[str, float]], available_resources_per_node())
    if not per_node:
        raise ClusterError("Ray does not say which resources are free; is the cluster still up? See `ray status`")
    return per_node
