"""How a client finds a cluster: the running one, a given one, or a local one that it starts."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from typing import Final

import ray

from megamind_ray.actors.names import NAMESPACE
from megamind_ray.errors import ClusterError, RequestError

__all__ = ["Connection", "connect_ray", "current_job", "find_cluster", "require_listener"]

_PROBE_S: Final = 5.0

_lock = threading.Lock()
_num_open = 0  # connections of ours that share this process's one connection to Ray, if we made it


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection of this process to Ray.

    Attributes:
        address: Of the cluster's GCS.
        started: A local cluster was started for it.
        joined: We connected this process, not its user; who closes the last such connection disconnects.
    """

    address: str
    started: bool
    joined: bool

    def close(self) -> None:
        """Disconnects, and ends the local cluster, if ``connect_ray`` did the opposite and nobody else uses it."""
        global _num_open
        if not self.joined:
            return
        with _lock:
            _num_open -= 1
            if not _num_open and ray.is_initialized():
                ray.shutdown()


def current_job() -> str | None:
    """Id of this process's connection to Ray; None without one. Each connection has another, in any cluster."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.gcs_address}/{context.get_job_id()}"


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
    global _num_open
    with _lock:
        connection = _connect(address, ray_address, num_gpus, pool_bytes)
        _num_open += connection.joined
    return connection


def _connect(address: str | None, ray_address: str | None, num_gpus: int | None, pool_bytes: int | None) -> Connection:
    global _num_open
    if ray.is_initialized():
        _refuse_sizes(num_gpus, pool_bytes, "this process is connected to a running cluster already")
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "local", "auto") and not _is_same(address, here):
            raise RequestError(
                f"address={address!r}: this process is connected to {here} already, and Ray allows one connection per "
                "process; close that one first, or leave the address out to use it"
            )
        return Connection(address=here, started=False, joined=_num_open > 0)
    _num_open = 0  # somebody called ray.shutdown() under connections of ours: they are closed
    target = find_cluster(address, ray_address=ray_address)
    if target is not None:
        _refuse_sizes(num_gpus, pool_bytes, f"a cluster runs at {target}")
        return _join(target)
    return _start(num_gpus, pool_bytes)


def _is_same(address: str, here: str) -> bool:
    """Whether two addresses may name one cluster; the same host has several names."""
    host, _, port = address.rpartition(":")
    host_here, _, port_here = here.rpartition(":")
    if port != port_here:
        return False
    try:
        ips = {socket.gethostbyname(host), socket.gethostbyname(host_here)}
    except OSError:
        return True
    return len(ips) == 1 or any(ip.startswith("127.") for ip in ips)


def find_cluster(address: str | None, *, ray_address: str | None) -> str | None:
    """The cluster that is meant: a given one, that of the environment, the one that runs here; None: a local one.

    Raises:
        RequestError: Several run here and none was chosen.
    """
    target = address or ray_address or _running_cluster()
    return None if target == "local" else target


def require_listener(address: str) -> None:
    """Ray itself tries for minutes, and names other addresses than the one that was asked for.

    Raises:
        RequestError: It is not ``HOST:PORT``.
        ClusterError: Nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit() or "//" in host:
        raise RequestError(f"address {address!r}: write HOST:PORT of the head, for example 10.0.0.1:6379, or 'local'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"no Ray cluster answers at {address} ({error}); check the address (`ray status` on the head shows it) and "
            "that its port is open from here"
        ) from error


def _join(address: str) -> Connection:
    require_listener(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"the Ray cluster at {address} let nobody in: {error}; most often the token is missing or another one: set "
            "RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN), or check that Ray's "
            "releases are the same"
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
            "or start one of your own with address='local' (--address local)"
        )
    return found[0] if found else None


def _refuse_sizes(num_gpus: int | None, pool_bytes: int | None, why: str) -> None:
    if num_gpus is not None or pool_bytes is not None:
        given = f"num_gpus={num_gpus}" if num_gpus is not None else f"pool={pool_bytes}"
        raise RequestError(
            f"{given} sets the size of a local cluster, but {why}; leave it out to use that one, or start another with "
            "address='local' (--address local)"
        )
