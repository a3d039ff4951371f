"""Commands that ask about what runs never start anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megamind_ray.errors import RequestError

if TYPE_CHECKING:
    from megamind_ray.api.cluster import Cluster

__all__ = ["connect_running", "running_address"]


def running_address(address: str | None) -> str:
    """The Ray cluster that is meant.

    Raises:
        RequestError: None runs here and none was named, or several run here.
    """
    from megamind_ray.actors.connection import find_cluster
    from megamind_ray.config import ray_address

    found = find_cluster(address, ray_address=ray_address())
    if found is None:
        raise RequestError(
            "no Ray cluster runs on this machine; name one with --address HOST:PORT or RAY_ADDRESS, or start one "
            "and load a model with `megamind load --detach`"
        )
    return found


def connect_running(address: str | None, fleet: str) -> Cluster:
    """Connects to a fleet of a running cluster.

    Raises:
        RequestError: No cluster runs, or no such fleet in it.
        ClusterError: It cannot be reached.
    """
    from megamind_ray.api.cluster import connect

    return connect(running_address(address), fleet=fleet, start=False)
