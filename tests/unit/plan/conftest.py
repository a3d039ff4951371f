"""Small hardware for the planning tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Disk, Gpu, Nic, Node

GIB = 1 << 30


def make_node(name: str, free_gib: list[float], *, groups: int = 1, pool_gib: float = 64, disk: float = 1e9) -> Node:
    """A node whose GPUs of 80 GiB have so much free, in ``groups`` NVLink groups (and NUMA nodes) of equal size."""
    size = max(1, len(free_gib) // groups)
    gpus = tuple(
        Gpu(index=i, memory_bytes=80 * GIB, free_bytes=int(free * GIB), numa=i // size, nvlink_group=i // size)
        for i, free in enumerate(free_gib)
    )
    return Node(
        id=NodeId(name),
        gpus=gpus,
        memory_bytes=512 * GIB,
        pool_bytes=int(pool_gib * GIB),
        disks=(Disk(name="nvme0", bytes_per_s=disk),),
        nics=(Nic(name="eth0", bytes_per_s=25e9),),
    )


@pytest.fixture
def node() -> Callable[..., Node]:
    return make_node
