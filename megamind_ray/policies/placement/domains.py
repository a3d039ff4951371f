"""GPUs as placement sees them: the slots that ranks take, and the domains in which slots reach each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from megamind_ray.core.ids import NodeId
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Gpu, Node, Topology

__all__ = ["Domain", "Level", "Slot", "closeness", "domains", "few_nodes", "gangs", "slots"]


class Level(IntEnum):
    """How close GPUs are to each other; a smaller value is closer."""

    NVLINK = 0
    NUMA = 1
    NODE = 2
    RACK = 3
    CLUSTER = 4


@dataclass(frozen=True, slots=True)
class Slot:
    """A GPU that may take one rank.

    Attributes:
        order: Its place in the topology, counted through all nodes.
        node_index: The place of its node.
        node: Its node.
        gpu: The GPU.
    """

    order: int
    node_index: int
    node: Node
    gpu: Gpu


@dataclass(frozen=True, slots=True)
class Domain:
    """GPUs that reach each other at one level.

    Attributes:
        level: How close they are.
        label: For people.
        slots: The GPUs, in the topology's order.
    """

    level: Level
    label: str
    slots: tuple[Slot, ...]


def slots(topology: Topology) -> list[Slot]:
    """All GPUs, in the order of the topology."""
    found: list[Slot] = []
    for index, node in enumerate(topology.nodes):
        for gpu in node.gpus:
            found.append(Slot(len(found), index, node, gpu))
    return found


def domains(every: Iterable[Slot]) -> list[Domain]:
    """All domains, closest-knit first, in topology order within a level."""
    every = tuple(every)
    found: dict[tuple[Level, NodeId, int | None], list[Slot]] = {}
    for slot in every:
        if slot.gpu.nvlink_group is not None:
            found.setdefault((Level.NVLINK, slot.node.id, slot.gpu.nvlink_group), []).append(slot)
        if slot.gpu.numa is not None:
            found.setdefault((Level.NUMA, slot.node.id, slot.gpu.numa), []).append(slot)
        found.setdefault((Level.NODE, slot.node.id, None), []).append(slot)
    of_rack: dict[str, list[Slot]] = {}
    for slot in every:
        if slot.node.rack is not None:
            of_rack.setdefault(slot.node.rack, []).append(slot)
    labels = {
        Level.NVLINK: "NVLink group {} of node {}",
        Level.NUMA: "NUMA node {} of node {}",
        Level.NODE: "node {1}",
    }
    within = [
        Domain(level, labels[level].format(part, node), tuple(members))
        for (level, node, part), members in found.items()
    ]
    racks = [
        Domain(Level.RACK, f"several nodes of rack {rack} (no single node holds the whole gang)", tuple(members))
        for rack, members in of_rack.items()
        if len({slot.node_index for slot in members}) > 1
    ]
    where = "no rack holds the whole gang" if racks else "no single node holds the whole gang"
    everything = Domain(Level.CLUSTER, f"several nodes ({where})", every)
    return sorted([*within, *racks, everything], key=lambda domain: domain.level)


def closeness(taken: Sequence[Slot]) -> Level:
    """The closest level at which some GPUs are together."""
    first = taken[0]
    if any(slot.node_index != first.node_index for slot in taken):
        racks = {slot.node.rack for slot in taken}
        return Level.RACK if len(racks) == 1 and None not in racks else Level.CLUSTER
    if first.gpu.nvlink_group is not None and all(slot.gpu.nvlink_group == first.gpu.nvlink_group for slot in taken):
        return Level.NVLINK
    if first.gpu.numa is not None and all(slot.gpu.numa == first.gpu.numa for slot in taken):
        return Level.NUMA
    return Level.NODE


def gangs(parallel: Parallel) -> list[tuple[int, ...]]:
    """Ranks that exchange activations in every layer: the tp ranks of one (pp, dp), with ep > 1 a whole stage."""
    size = parallel.dp * parallel.tp if parallel.ep > 1 else parallel.tp
    return [tuple(range(first, first + size)) for first in range(0, parallel.world, size)]


def few_nodes(free: Sequence[Slot], needs: Sequence[int]) -> list[Slot]:
    """Free slots in an order that touches few nodes when they are taken from the front.

    Nodes with most useful GPUs come first, but the last one needed is the one with the fewest that are enough.
    """
    by_node: dict[NodeId, list[Slot]] = {}
    for slot in free:
        by_node.setdefault(slot.node.id, []).append(slot)
    useful = {node: sum(slot.gpu.free_bytes >= needs[-1] for slot in members) for node, members in by_node.items()}
    order: list[Slot] = []
    missing = len(needs)
    while by_node:
        enough = [node for node in by_node if useful[node] >= missing > 0]
        node = min(enough, key=useful.__getitem__) if enough else max(by_node, key=useful.__getitem__)
        missing -= useful[node]
        order += by_node.pop(node)
    return order
