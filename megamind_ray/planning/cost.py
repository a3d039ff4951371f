"""What moving bytes takes of which resource: the cost model of routing, bounds and simulator (docs/design/0015).

A **resource** is something with a rate that all work shares: a disk, a link, the memory or the processors of a node. A
**step** is work on bytes: it takes some units of some resources for each byte, starts after a latency, and is never
faster than one thread can do it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megamind_ray.core.timeline import SpanKind
from megamind_ray.core.topology import Gpu, Host, Node, Topology

__all__ = ["CostModel", "Resource", "ResourceKind", "Step", "Uses", "in_sequence"]

# Of disks and networks that the topology says nothing about, so that a plan for it can be compared with another one.
_UNKNOWN_BYTES_PER_S = 1e9
# Processor time of a byte that is read past the page cache: pinning pages, requests, interrupts. 0.15 to 0.18 s for
# each GB of a virtual disk.
_READ_S_PER_BYTE = 0.15e-9
# Processors that a put, or a call that hands over a block, keeps busy while it lasts: Ray's own processes work too.
# 1.5 to 1.65 on two cores without other work (docs/design/0015).
_RAY_CORES = 1.5
Uses = tuple[tuple[int, float], ...]


class ResourceKind(StrEnum):
    """What a resource is; the value is its name for people."""

    STORAGE = "shared storage"
    REQUESTS = "requests to shared storage"
    DISK = "disks"
    NIC_IN = "network in"
    NIC_OUT = "network out"
    RACK_IN = "rack uplink in"
    RACK_OUT = "rack uplink out"
    WIRE_IN = "data plane in"
    WIRE_OUT = "data plane out"
    MEMORY = "host memory"
    CPU = "processors"
    SWITCH = "PCIe switch"
    DEVICE = "host to device"
    INTERPRETER = "Python of the node agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Something that all work shares.

    Attributes:
        kind: What it is.
        where: Node, rack or GPU (``n0:3``); empty for shared storage.
        capacity: Units per second: bytes; of processors seconds of work (the number of cores); requests.
    """

    kind: ResourceKind
    where: str
    capacity: float

    def __str__(self) -> str:
        return f"{self.kind} of {self.where}" if self.where else str(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Work on bytes.

    Attributes:
        kind: What is done.
        latency_s: Before the first byte; takes no resource.
        uses: (index of a resource, units of it for each byte).
        cap_bytes_per_s: What one thread can do.
    """

    kind: SpanKind
    latency_s: float
    uses: Uses
    cap_bytes_per_s: float = math.inf

    def alone_s(self, nbytes: int, resources: tuple[Resource, ...]) -> float:
        """Seconds where nobody else uses the resources."""
        rate = min([self.cap_bytes_per_s, *(resources[index].capacity / units for index, units in self.uses if units)])
        return self.latency_s + nbytes / rate


class CostModel:
    """The resources of a topology, and what the steps of a load take of them.

    Nodes and GPUs are positions in ``topology.nodes`` and ``node.gpus``.

    Args:
        topology: The hardware.
        remote: Whether the checkpoint is behind a network; else nodes with disks read their own.

    Attributes:
        topology: The hardware.
        resources: All of them; steps name them by index.
    """

    def __init__(self, topology: Topology, *, remote: bool = False) -> None:
        self.topology = topology
        self._remote = remote
        self._rack = {rack.name for rack in topology.racks}
        self.resources = tuple(self._list_resources())
        self._index = {(resource.kind, resource.where): index for index, resource in enumerate(self.resources)}

    def _list_resources(self) -> Iterator[Resource]:
        storage, wire = self.topology.storage, self.topology.links.wire_bytes_per_s
        if storage is not None:
            yield Resource(kind=ResourceKind.STORAGE, where="", capacity=storage.bytes_per_s)
            if storage.requests_per_s is not None:
                yield Resource(kind=ResourceKind.REQUESTS, where="", capacity=storage.requests_per_s)
        for rack in self.topology.racks:
            yield Resource(kind=ResourceKind.RACK_IN, where=rack.name, capacity=rack.uplink_bytes_per_s)
            yield Resource(kind=ResourceKind.RACK_OUT, where=rack.name, capacity=rack.uplink_bytes_per_s)
        for node in self.topology.nodes:
            network = node.nic_bytes_per_s or _UNKNOWN_BYTES_PER_S
            rates = {
                ResourceKind.DISK: node.disk_bytes_per_s or _UNKNOWN_BYTES_PER_S,
                ResourceKind.NIC_IN: network,
                ResourceKind.NIC_OUT: network,
                ResourceKind.MEMORY: node.host.memory_bytes_per_s,
                ResourceKind.CPU: float(node.host.cores),
                ResourceKind.INTERPRETER: 1.0,
            }
            if wire is not None:
                rates |= {ResourceKind.WIRE_IN: wire, ResourceKind.WIRE_OUT: wire}
            for kind, capacity in rates.items():
                yield Resource(kind=kind, where=node.id, capacity=capacity)
            for position, switch in enumerate(node.switches):
                yield Resource(kind=ResourceKind.SWITCH, where=f"{node.id}/{position}", capacity=switch.bytes_per_s)
            for where, rate in {_device_name(node, gpu): gpu.pcie_bytes_per_s for gpu in node.gpus}.items():
                yield Resource(kind=ResourceKind.DEVICE, where=where, capacity=rate)

    def read(self, node: int, request_bytes: float = math.inf) -> Step:
        """Bytes of storage into host memory of a node: from its disks, or over its network from shared storage.

        Args:
            node: Where.
            request_bytes: Size of a request, where the storage answers so many in a second at most.
        """
        at, storage = self.topology.nodes[node], self.topology.storage
        if at.disks and not self._remote:
            local = (
                (self._at(ResourceKind.DISK, at), 1.0),
                (self._at(ResourceKind.MEMORY, at), 1.0),
                (self._at(ResourceKind.CPU, at), _READ_S_PER_BYTE),
            )
            return Step(kind="read", latency_s=max(disk.latency_s for disk in at.disks), uses=local)
        uses = [
            (self._at(ResourceKind.NIC_IN, at), 1.0),
            (self._at(ResourceKind.MEMORY, at), 3.0),  # into the kernel, out of it, to its place
            (self._at(ResourceKind.CPU, at), 1 / at.host.network_bytes_per_s),
        ]
        uses += self._into_rack(at)
        cap = at.host.network_bytes_per_s
        if storage is None:
            return Step(kind="read", latency_s=_latency(at), uses=tuple(uses), cap_bytes_per_s=cap)
        uses.append((self._index[ResourceKind.STORAGE, ""], 1.0))
        if storage.requests_per_s is not None:
            uses.append((self._index[ResourceKind.REQUESTS, ""], 1 / request_bytes))
        cap = min(cap, storage.request_bytes_per_s or math.inf)
        return Step(kind="read", latency_s=storage.latency_s, uses=tuple(uses), cap_bytes_per_s=cap)

    def _into_rack(self, node: Node) -> Uses:
        """The uplinks between storage and a node: of its own rack, and of the storage's."""
        storage_rack = None if self.topology.storage is None else self.topology.storage.rack
        if node.rack == storage_rack:
            return ()
        ways = ((ResourceKind.RACK_IN, node.rack), (ResourceKind.RACK_OUT, storage_rack))
        return tuple((self._index[kind, str(name)], 1.0) for kind, name in ways if name in self._rack)

    def verify(self, node: int) -> Step:
        """A checksum over bytes in host memory."""
        return self._work(node, "verify", self.topology.nodes[node].host.checksum_bytes_per_s, memory=1.0)

    def cut(self, node: int, run_bytes: float = math.inf, *, packed: bool = False) -> Step:
        """Strided runs packed into a block, and summed.

        Args:
            node: Where.
            run_bytes: Mean length of a run.
            packed: The block lies in its extent as it is, and is only summed.
        """
        host = self.topology.nodes[node].host
        if packed:
            return self._work(node, "cut", host.checksum_bytes_per_s, memory=1.0)
        rate = 1 / (1 / host.copy_bytes_per_s + 1 / host.checksum_bytes_per_s + host.run_s / run_bytes)
        return self._work(node, "cut", rate, memory=3.0)

    def put(self, node: int, block_bytes: float = math.inf) -> Step:
        """A block into the node's object store.

        What a put takes beside its bytes is work of the agent's process, one put after the other whatever the threads.

        Args:
            node: Where.
            block_bytes: Size of a block, over which that is spread.
        """
        at = self.topology.nodes[node]
        beside = at.host.put_s / block_bytes
        copy_s = 1 / at.host.copy_bytes_per_s
        uses = (
            (self._at(ResourceKind.CPU, at), _processor_s(at.host, copy_s, 2.0) + beside * _RAY_CORES),
            (self._at(ResourceKind.MEMORY, at), 2.0),
            (self._at(ResourceKind.INTERPRETER, at), beside),
        )
        return Step(kind="put", latency_s=0.0, uses=uses, cap_bytes_per_s=1 / (copy_s + beside))

    def call(self, node: int) -> Step:
        """A call to the node's agent and its answer: work of two processes, in seconds instead of bytes."""
        at = self.topology.nodes[node]
        uses = ((self._at(ResourceKind.CPU, at), _RAY_CORES), (self._at(ResourceKind.INTERPRETER, at), 0.5))
        return Step(kind="wait", latency_s=0.0, uses=uses, cap_bytes_per_s=1.0)

    def wire(self, source: int, target: int) -> Step:
        """A block from one node's object store into another one's."""
        nodes = self.topology.nodes[source], self.topology.nodes[target]
        uses = [(self._at(ResourceKind.NIC_OUT, nodes[0]), 1.0), (self._at(ResourceKind.NIC_IN, nodes[1]), 1.0)]
        if self.topology.links.wire_bytes_per_s is not None:
            uses += [(self._at(ResourceKind.WIRE_OUT, nodes[0]), 1.0), (self._at(ResourceKind.WIRE_IN, nodes[1]), 1.0)]
        if nodes[0].rack != nodes[1].rack:
            for kind, node in zip((ResourceKind.RACK_OUT, ResourceKind.RACK_IN), nodes, strict=True):
                if node.rack in self._rack:
                    uses.append((self._index[kind, str(node.rack)], 1.0))
        for node in nodes:
            uses += [
                (self._at(ResourceKind.MEMORY, node), 2.0),
                (self._at(ResourceKind.CPU, node), 1 / node.host.network_bytes_per_s),
            ]
        cap = min(node.host.network_bytes_per_s for node in nodes)
        return Step(kind="wire", latency_s=sum(map(_latency, nodes)), uses=tuple(uses), cap_bytes_per_s=cap)

    def copy(self, node: int, gpu: int) -> Step:
        """Verified bytes of host memory into the arena of a GPU."""
        at = self.topology.nodes[node]
        device = (self._index[ResourceKind.DEVICE, _device_name(at, at.gpus[gpu])], 1.0)
        if at.gpus[gpu].kind == "cpu":  # a thread writes into memory that it touches for the first time, and sums it
            rate = 1 / (1 / at.host.touch_bytes_per_s + 1 / at.host.checksum_bytes_per_s)
            step = self._work(node, "copy", rate, memory=_clearing(at, at.gpus[gpu]) + 1.0)
            return Step(kind="copy", latency_s=0.0, uses=(*step.uses, device), cap_bytes_per_s=rate)
        cap = at.host.checksum_bytes_per_s
        uses = (*self._to_device(node, gpu), (self._at(ResourceKind.CPU, at), 1 / cap))
        return Step(kind="copy", latency_s=0.0, uses=uses, cap_bytes_per_s=cap)

    def place(self, node: int, gpu: int) -> Step:
        """Bytes that a rank read by itself into the arena of its GPU; they were checked as they were read."""
        at = self.topology.nodes[node]
        device = (self._index[ResourceKind.DEVICE, _device_name(at, at.gpus[gpu])], 1.0)
        if at.gpus[gpu].kind == "cpu":  # read in place: what is left is the first touch
            step = self._work(node, "copy", at.host.touch_bytes_per_s, memory=_clearing(at, at.gpus[gpu]) - 1.0)
            return Step(kind="copy", latency_s=0.0, uses=(*step.uses, device), cap_bytes_per_s=step.cap_bytes_per_s)
        return Step(kind="copy", latency_s=0.0, uses=self._to_device(node, gpu))

    def _to_device(self, node: int, gpu: int) -> Uses:
        at = self.topology.nodes[node]
        uses = [(self._index[ResourceKind.DEVICE, _device_name(at, at.gpus[gpu])], 1.0)]
        uses.append((self._at(ResourceKind.MEMORY, at), 2.0))
        for position, switch in enumerate(at.switches):
            if at.gpus[gpu].index in switch.gpus:
                uses.append((self._index[ResourceKind.SWITCH, f"{at.id}/{position}"], 1.0))
        return tuple(uses)

    def _work(self, node: int, kind: SpanKind, rate: float, *, memory: float) -> Step:
        at = self.topology.nodes[node]
        uses = (
            (self._at(ResourceKind.CPU, at), _processor_s(at.host, 1 / rate, memory)),
            (self._at(ResourceKind.MEMORY, at), memory),
        )
        return Step(kind=kind, latency_s=0.0, uses=uses, cap_bytes_per_s=rate)

    def _at(self, kind: ResourceKind, node: Node) -> int:
        return self._index[kind, node.id]


def in_sequence(*steps: Step) -> Step:
    """Steps that one thread does one after the other with the same bytes, as one; its kind is that of the first."""
    uses: dict[int, float] = {}
    for step in steps:
        for index, units in step.uses:
            uses[index] = uses.get(index, 0.0) + units
    slowness = sum(1 / step.cap_bytes_per_s for step in steps)
    return Step(
        kind=steps[0].kind,
        latency_s=sum(step.latency_s for step in steps),
        uses=tuple(uses.items()),
        cap_bytes_per_s=1 / slowness if slowness else math.inf,
    )


def _processor_s(host: Host, alone_s: float, memory: float) -> float:
    """Processor time of a byte where others work too: a thread that waits for memory keeps its processor.

    With all processors at work, or twice as many as it takes to fill the memory's rate where there are more, a byte
    takes as long as its share of that rate. On a larger host others are left to spare.

    Args:
        host: Where.
        alone_s: Seconds that one thread alone takes.
        memory: Bytes that are read and written for it.
    """
    filling = host.memory_bytes_per_s / (2 * host.copy_bytes_per_s)
    return max(alone_s, memory * min(host.cores, 2 * filling) / host.memory_bytes_per_s)


def _device_name(node: Node, gpu: Gpu) -> str:
    """Arenas in host memory are filled by the node's own threads, all through one resource."""
    return f"{node.id}:memory" if gpu.kind == "cpu" else f"{node.id}:{gpu.index}"


def _clearing(node: Node, gpu: Gpu) -> float:
    """Bytes of memory's rate that a byte takes which is copied to fresh pages: all threads together fill no more."""
    return max(2.0, node.host.memory_bytes_per_s / gpu.pcie_bytes_per_s)


def _latency(node: Node) -> float:
    return max((nic.latency_s for nic in node.nics), default=0.0)
