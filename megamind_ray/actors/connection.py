"""How a client finds a cluster: the running one, a given one, or a local one that it starts."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from megamind_ray.actors.names import NAMESPACE
from megamind_ray.errors import ClusterError, RequestError

__all__ = ["Connection", "connect_ray", "find_cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection of this process to Ray.

    Attributes:
        address: Of the cluster's GCS.
        started: A local cluster was started for it.
        joined: This process was not connected before; who closes it may disconnect.
    """

    address: str
    started: bool
    joined: bool

    def close(self) -> None:
        """Disconnects, and ends the local cluster, if ``connect_ray`` did the opposite."""
        if self.joined and ray.is_initialized():
            ray.shutdown()


def connect_ray(
    address: str | None, *, ray_address: str | None, num_gpus: int | None, pool_bytes: int | None
) -> Connection:
    """Connects this process to Ray.

    Args:
        address: Cluster to join; ``"local"`` starts one; None looks for one.
        ray_address: ``RAY_ADDRESS`` of the environment.
        num_gpus: Logical GPUs of a local cluster; None: what is there.
        pool_bytes: Object store of a local cluster; None: Ray's choice.

    Raises:
        RequestError: There are several clusters, or a size was given for one that runs.
        ClusterError: The cluster cannot be reached.
    """
    if ray.is_initialized():
        _refuse_sizes(num_gpus, pool_bytes, "this process is connected to a running cluster already")
        return Connection(address=ray.get_runtime_context().gcs_address, started=False, joined=False)
    target = find_cluster(address, ray_address=ray_address)
    if target is not None:
        _refuse_sizes(num_gpus, pool_bytes, f"a cluster runs at {target}")
        return _join(target)
    return _start(num_gpus, pool_bytes)


def find_cluster(address: str | None, *, ray_address: str | None) -> str | None:
    """The cluster that is meant: a given one, that of the environment, the one that runs here; None: a local one.

    Raises:
        RequestError: Several run here and none was chosen.
    """
    target = address or ray_address or _running_cluster()
    return None if target == "local" else target


def _join(address: str) -> Connection:
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {error}; check `ray status --address {address}`, and that token "
            "authentication is set up alike on both sides (RAY_AUTH_MODE)"
        ) from error
    return Connection(address=ray.get_runtime_context().gcs_address, started=False, joined=True)


def _start(num_gpus: int | None, pool_bytes: int | None) -> Connection:
    try:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_gpus=num_gpus,
            object_store_memory=pool_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"a local Ray cluster could not be started: {error}") from error
    return Connection(address=ray.get_runtime_context().gcs_address, started=True, joined=True)


def _running_cluster() -> str | None:
    """Address of the one cluster with a process on this machine, as ``ray.init(address="auto")`` looks for it.

    Raises:
        RequestError: There are several.
    """
    from ray._private.services import find_gcs_addresses  # no public call lists clusters

    found = sorted(find_gcs_addresses())
    if len(found) > 1:
        raise RequestError(
            f"several Ray clusters run on this machine: {', '.join(found)}; choose one with address= or RAY_ADDRESS, "
            "or start one of your own with address='local'"
        )
    return found[0] if found else None


def _refuse_sizes(num_gpus: int | None, pool_bytes: int | None, why: str) -> None:
    if num_gpus is not None or pool_bytes is not None:
        given = f"num_gpus={num_gpus}" if num_gpus is not None else f"pool={pool_bytes}"
        raise RequestError(
            f"{given} sets the size of a local cluster, but {why}; leave it out to use that one, or pass "
            "address='local' to start another"
        )
