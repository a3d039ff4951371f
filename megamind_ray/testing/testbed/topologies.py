"""Topologies of a few small hosts, as ``Topology``: beds are built of them and plans are made for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Gpu, Nic, Node, Rack, Storage, Topology
from megamind_ray.units import GIB, MIB

__all__ = ["bed_node", "in_two_racks", "switched", "with_nic"]

_POOL_BYTES = 100 * MIB


def bed_node(
    name: str,
    *,
    num_gpus: int = 1,
    nic_bytes_per_s: float = 62.5e6,
    pool_bytes: int = _POOL_BYTES,
    rack: str | None = None,
) -> Node:
    """A host of a bed.

    Args:
        name: Its name.
        num_gpus: Logical GPUs, which are host memory; 0 for a host that is only a head.
        nic_bytes_per_s: Each way; 62.5e6 is 500 Mbit/s.
        pool_bytes: Object store; Ray takes 75 MB at least.
        rack: Where it stands.
    """
    gpus = tuple(Gpu(index=index, memory_bytes=GIB, free_bytes=GIB, kind="cpu") for index in range(num_gpus))
    nic = Nic(name="eth0", bytes_per_s=nic_bytes_per_s)
    return Node(id=NodeId(name), gpus=gpus, memory_bytes=4 * GIB, pool_bytes=pool_bytes, nics=(nic,), rack=rack)


def switched(
    *,
    num_hosts: int,
    num_gpus: int = 1,
    nic_bytes_per_s: float = 62.5e6,
    pool_bytes: int = _POOL_BYTES,
    storage_bytes_per_s: float | None = None,
) -> Topology:
    """Hosts ``n0``, ``n1``, ... on one switch.

    Args:
        num_hosts: How many.
        num_gpus: Logical GPUs of each.
        nic_bytes_per_s: Of each, each way.
        pool_bytes: Object store of each.
        storage_bytes_per_s: What storage that all reach gives; None: there is none.
    """
    names = [f"n{index}" for index in range(num_hosts)]
    return _topology(
        "one switch",
        [bed_node(name, num_gpus=num_gpus, nic_bytes_per_s=nic_bytes_per_s, pool_bytes=pool_bytes) for name in names],
        storage_bytes_per_s,
    )


def in_two_racks(
    *,
    hosts_per_rack: int = 2,
    num_gpus: int = 1,
    nic_bytes_per_s: float = 62.5e6,
    oversubscribed: float = 2.0,
    storage_bytes_per_s: float | None = None,
) -> Topology:
    """Hosts ``r0n0``, ``r0n1``, ..., ``r1n0``, ... in racks ``r0`` and ``r1``.

    Args:
        hosts_per_rack: How many in each.
        num_gpus: Logical GPUs of each host.
        nic_bytes_per_s: Of each host, each way.
        oversubscribed: NICs of a rack together, divided by its uplink.
        storage_bytes_per_s: What storage that all reach gives; None: there is none.
    """
    uplink = hosts_per_rack * nic_bytes_per_s / oversubscribed
    nodes = [
        bed_node(f"{rack}n{index}", num_gpus=num_gpus, nic_bytes_per_s=nic_bytes_per_s, rack=rack)
        for rack in ("r0", "r1")
        for index in range(hosts_per_rack)
    ]
    racks = tuple(Rack(name=rack, uplink_bytes_per_s=uplink) for rack in ("r0", "r1"))
    return replace(_topology("two racks", nodes, storage_bytes_per_s), racks=racks)


def with_nic(topology: Topology, name: str, bytes_per_s: float) -> Topology:
    """The same, but one host's link has another rate.

    Raises:
        KeyError: There is no such host.
    """
    slow = topology.node(name)
    changed = replace(slow, nics=(replace(slow.nics[0], bytes_per_s=bytes_per_s),))
    return replace(topology, nodes=tuple(changed if node is slow else node for node in topology.nodes))


def _topology(name: str, nodes: Iterable[Node], storage_bytes_per_s: float | None) -> Topology:
    storage = None if storage_bytes_per_s is None else Storage(bytes_per_s=storage_bytes_per_s, latency_s=0.002)
    return Topology(nodes=tuple(nodes), name=name, storage=storage, source="a test bed on one machine")
