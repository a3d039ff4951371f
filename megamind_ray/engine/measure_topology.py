"""From what was measured to a topology."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from megamind_ray.config import WireConfig
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.core.wires import WireName, choose_wire, known_ceilings, with_wire
from megamind_ray.device.memory import device_budget_bytes, gpu_facts, host_memory
from megamind_ray.engine.measure import NodeMeasurement
from megamind_ray.errors import RequestError
from megamind_ray.units import MIB

__all__ = ["machine_gpus", "machine_topology", "measured_topology", "measurement_comments"]

# What Ray takes for its object store, unless it is told another size.
_POOL_SHARE: Final = 0.3
# Of the free memory, for all arenas together where they are in host memory: the rest is for the pool and the system.
_ARENA_SHARE: Final = 0.5
_SHARED_MEMORY: Final = "/dev/shm"
_NOT: Final = ": not measured"  # what is in all notes on figures that keep their default


def machine_gpus(num_logical: int | None = None) -> tuple[Gpu, ...]:
    """The GPUs of this machine; where it has none, logical ones in host memory.

    Args:
        num_logical: How many of those; None: one.

    Raises:
        RequestError: Logical ones are asked for and there are real ones.
    """
    num_cuda = _num_cuda()
    if num_cuda and num_logical is not None:
        raise RequestError(
            f"--gpus {num_logical}: is for machines without GPUs, and this one has {num_cuda}; leave it out"
        )
    if num_cuda:
        budgets = [device_budget_bytes(f"cuda:{index}") for index in range(num_cuda)]
        return tuple(Gpu(index=index, memory_bytes=size, free_bytes=size) for index, size in enumerate(budgets))
    count = num_logical or 1
    each = int(host_memory().free_bytes * _ARENA_SHARE) // count // MIB * MIB
    return tuple(Gpu(index=index, memory_bytes=each, free_bytes=each, kind="cpu") for index in range(count))


def _num_cuda() -> int:
    if not gpu_facts():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def machine_topology(found: NodeMeasurement, gpus: tuple[Gpu, ...]) -> Topology:
    """A topology of this machine alone, as it was measured."""
    memory = host_memory()
    room = shutil.disk_usage(_SHARED_MEMORY).free if os.path.isdir(_SHARED_MEMORY) else 0  # noqa: PTH112
    node = Node(
        id=NodeId(found.hostname),
        gpus=gpus,
        memory_bytes=memory.total_bytes,
        pool_bytes=int(min(memory.free_bytes * _POOL_SHARE, room)) // MIB * MIB,
    )
    return measured_topology(Topology(nodes=(node,), name=found.hostname), {node.id: found})


def measured_topology(
    topology: Topology, found: Mapping[NodeId, NodeMeasurement], wires: Mapping[WireName, float] | None = None
) -> Topology:
    """A topology with what was measured on its nodes; nodes on which nothing was stay as they are.

    Args:
        topology: What is there.
        found: By node.
        wires: Bytes per second from node to node by wire; the ceiling is that of the one that ``wire.use = "auto"``
            takes. None: not measured.
    """
    nodes = tuple(_measured(node, found[node.id]) if node.id in found else node for node in topology.nodes)
    links = replace(
        topology.links,
        ray_bytes_per_s=(wires or {}).get("ray"),
        nixl_bytes_per_s=(wires or {}).get("nixl"),
        wire_bytes_per_s=(wires or {}).get("ray", topology.links.wire_bytes_per_s),
    )
    faster = WireConfig().faster
    choice = choose_wire("auto", lacking="", ceilings=known_ceilings(links, "measured"), faster=faster)
    measured = replace(topology, nodes=nodes, links=links, source=_source(topology, found, with_wires=bool(wires)))
    return with_wire(measured, choice)


def measurement_comments(found: Mapping[NodeId, NodeMeasurement]) -> Iterator[str]:
    """What was measured on which node, with how far it scatters, for the top of a topology file."""
    for one in found.values():
        yield f"{one.hostname}, {one.date}: medians"
        yield from (f"  {figure}" for figure in one.figures)
        yield from (f"  note: {note}" for note in one.notes)


def _measured(node: Node, found: NodeMeasurement) -> Node:
    rates = dict(found.device_bytes_per_s)
    gpus = []
    for gpu in node.gpus:
        rate = found.fill_bytes_per_s if gpu.kind == "cpu" else rates.get(gpu.index)
        gpus.append(gpu if rate is None else replace(gpu, pcie_bytes_per_s=rate))
    return replace(
        node,
        gpus=tuple(gpus),
        host=found.host,
        disks=found.disks or node.disks,
        nics=found.nics or node.nics,
    )


def _source(topology: Topology, found: Mapping[NodeId, NodeMeasurement], *, with_wires: bool) -> str:
    """One line: the comments have the rest."""
    hosts = sorted({one.hostname for one in found.values()})
    named = hosts[0] if len(hosts) == 1 else f"{len(found)} nodes"
    begin = min((one.date for one in found.values()), default="")
    left_out = {note.partition(_NOT)[0] for one in found.values() for note in one.notes if _NOT in note}
    if any(
        gpu.kind == "cuda" and not _has_rate(gpu, found.get(node.id)) for node in topology.nodes for gpu in node.gpus
    ):
        left_out.add("host to device")
    links = "NVLink and uplinks" if with_wires else "links"
    return (
        f"measured by megamind topology on {named}, {begin}: medians of 3 samples or more; network interfaces at "
        f"the speed that they tell; defaults, not measured: {', '.join([*sorted(left_out), links])}"
    )


def _has_rate(gpu: Gpu, found: NodeMeasurement | None) -> bool:
    return found is not None and gpu.index in dict(found.device_bytes_per_s)
