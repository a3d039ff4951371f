"""Makes the plain classes remote. The only place with ``ray.remote``; it wires everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megamind_ray.actors.fleet import NodeResources
from megamind_ray.actors.gpu_worker import GpuWorker
from megamind_ray.actors.messages import Lifetime
from megamind_ray.actors.names import NAMESPACE, belongs_to, planner_name
from megamind_ray.actors.node_agent import NodeAgent
from megamind_ray.actors.planner import Planner
from megamind_ray.config import Config
from megamind_ray.core.ids import NodeId
from megamind_ray.errors import ClusterError
from megamind_ray.planning import RuleSource

__all__ = ["RaySpawner", "end_fleet", "fleet_actors", "forget_planner", "running_planner", "start_planner"]

# Threads per concurrency group. ``exchange`` is a long poll: a thread for each rank of a node, and for each node that
# takes blocks from here ``RELAY_FETCHES``; as a rule these are the two beside it in the line of the load.
_AGENT_GROUPS: Final = {"control": 4, "exchange": 96}
_WORKER_GROUPS: Final = {"control": 4, "moves": 1, "run": 1}
_PLANNER_GROUPS: Final = {"control": 8, "moves": 16}
_HEAD: Final = "node:__internal_head__"  # a resource that Ray gives to the node of its head


class RaySpawner:
    """Starts actors on given nodes. Picklable: it travels into the planner."""

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
        actor = ray.remote(concurrency_groups=_AGENT_GROUPS)(NodeAgent)
        return actor.options(**_options(name, lifetime), scheduling_strategy=_on(node)).remote()

    def worker(self, name: str, node: NodeResources, lifetime: Lifetime, device_memory_bytes: int | None) -> Any:
        actor = ray.remote(concurrency_groups=_WORKER_GROUPS)(GpuWorker)
        return actor.options(**_options(name, lifetime), num_gpus=1, scheduling_strategy=_on(node.node)).remote(
            device_memory_bytes, num_workers_on_node=node.num_gpus
        )

    def kill(self, handle: Any) -> None:
        ray.kill(handle, no_restart=True)


def start_planner(
    fleet: str,
    *,
    lifetime: Lifetime,
    config: Config,
    device_memory_bytes: int | None,
    owner: str,
    fallback_rules: RuleSource | None = None,
) -> Any:
    """The planner of the fleet: the running one, else a new one.

    Args:
        fleet: Its name.
        lifetime: Of a new one.
        config: Of a new one.
        device_memory_bytes: Arena budget of each worker of a new one; None: what is free.
        owner: What the caller calls itself; ``Planner.hello`` tells it.
        fallback_rules: Where a new one gets rules for families that planning has none for. A function of an
            importable module: it travels by name.
    """
    actor = ray.remote(concurrency_groups=_PLANNER_GROUPS)(Planner)
    # On the caller's node: a path means there what it means to the caller. Of actors that ask for no CPU, Ray starts
    # about half elsewhere where the affinity is soft, though that node has room.
    options = _options(planner_name(fleet), lifetime)
    return actor.options(**options, get_if_exists=True, scheduling_strategy=_on(_here())).remote(
        fleet,
        lifetime=lifetime,
        config=config,
        spawner=RaySpawner(),
        device_memory_bytes=device_memory_bytes,
        owner=owner,
        fallback_rules=fallback_rules,
    )


def running_planner(fleet: str) -> Any | None:
    """The fleet's planner if it runs."""
    try:
        return ray.get_actor(planner_name(fleet), namespace=NAMESPACE)
    except ValueError:  # Ray's word for: no such actor
        return None


def forget_planner(dead: Any) -> None:
    """Lets the process that started a planner find its successor: it remembers the dead one under its name."""
    ray.kill(dead, no_restart=True)


def fleet_actors(fleet: str) -> list[str]:
    """Names of the living actors of a fleet."""
    rows = ray.util.list_named_actors(all_namespaces=True)
    return sorted(row["name"] for row in rows if row["namespace"] == NAMESPACE and belongs_to(row["name"], fleet))


def end_fleet(fleet: str) -> list[str]:
    """Kills every actor that carries the fleet's name, the planner first; returns their names."""
    names = fleet_actors(fleet)
    for name in sorted(names, key=lambda name: name != planner_name(fleet)):
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
