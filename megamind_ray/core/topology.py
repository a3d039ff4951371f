"""The hardware as data: nodes, GPUs, disks, NICs, links (docs/design/0003)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from megamind_ray.core.ids import NodeId
from megamind_ray.errors import RequestError

__all__ = ["SCHEMA", "Disk", "Gpu", "GpuKind", "Host", "Links", "Nic", "Node", "Rack", "Storage", "Switch", "Topology"]

SCHEMA = "megamind.topology/1"
GpuKind = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node.

    Attributes:
        index: Number on its node.
        memory_bytes: What weights may take at most.
        free_bytes: What is free now.
        numa: NUMA node that it hangs on, where known.
        nvlink_group: GPUs of a node with equal values reach each other by NVLink; None: not at all.
        pcie_bytes_per_s: Host to device; for ``kind="cpu"`` the rate at which all threads of the node fill an arena.
        kind: ``cpu`` for a rank whose device is host memory.
    """

    index: int
    memory_bytes: int
    free_bytes: int
    numa: int | None = None
    nvlink_group: int | None = None
    pcie_bytes_per_s: float = 25e9
    kind: GpuKind = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk of a node that holds, or may hold, the checkpoint.

    Attributes:
        name: For people.
        bytes_per_s: Large reads, many at a time.
        latency_s: From a request to its first byte.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network interface of a node, full duplex.

    Attributes:
        name: For people.
        bytes_per_s: Each way.
        latency_s: One way.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A PCIe switch: its GPUs share one way to the host."""

    gpus: tuple[int, ...]
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rack:
    """Nodes behind one uplink, full duplex."""

    name: str
    uplink_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What moving bytes costs the processors and the memory of a node. The defaults are a recent server's.

    Attributes:
        cores: Threads that can work at a time.
        memory_bytes_per_s: Reads plus writes of all threads together.
        copy_bytes_per_s: One thread, used memory to used memory; bytes copied.
        touch_bytes_per_s: One thread, used memory to memory that was never touched.
        checksum_bytes_per_s: One thread.
        network_bytes_per_s: One thread that sends or receives over TCP.
        run_s: For each run of a strided slice, beside its bytes.
        put_s: Putting a block in the object store, beside its bytes.
        call_s: A call between two actors whose answer hands over a block.
        take_s: Each further block of such an answer.
    """

    cores: int = 32
    memory_bytes_per_s: float = 200e9
    copy_bytes_per_s: float = 10e9
    touch_bytes_per_s: float = 3e9
    checksum_bytes_per_s: float = 16e9
    network_bytes_per_s: float = 4e9
    run_s: float = 1e-7
    put_s: float = 0.001
    call_s: float = 0.002
    take_s: float = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Rates that hold everywhere.

    Attributes:
        nvlink_bytes_per_s: Between GPUs of a node.
        wire_bytes_per_s: What the data plane brings into or out of a node at most, whatever its NICs can; None: not
            known, the NICs are the limit.
        ray_bytes_per_s, nixl_bytes_per_s: What each wire brings from one node to another (docs/design/0030); None: not
            measured.
    """

    nvlink_bytes_per_s: float = 300e9
    wire_bytes_per_s: float | None = None
    ray_bytes_per_s: float | None = None
    nixl_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Storage that all nodes reach over their NICs.

    Attributes:
        bytes_per_s: All clients together.
        shared: Always true for now.
        latency_s: From a request to its first byte.
        request_bytes_per_s: One request alone; None: not limited.
        requests_per_s: All clients together; None: not limited.
        rack: Rack that it stands in; None: outside of all, so that whoever reads in a rack does so over its uplink.
    """

    bytes_per_s: float
    shared: bool = True
    latency_s: float = 0.02
    request_bytes_per_s: float | None = None
    requests_per_s: float | None = None
    rack: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host.

    Attributes:
        id: Name in the topology file, or Ray's node id.
        gpus: In the order of their index.
        memory_bytes: Host memory.
        pool_bytes: Object store.
        pool_taken_bytes: What blocks of other loads hold in it.
        disks: Local disks.
        nics: Network interfaces.
        address: IP address, where the node is real.
        rack: Rack, where known.
        switches: PCIe switches whose uplink several GPUs share; a GPU in none has its link for itself.
        host: Processors and memory.
        is_leaving: It is to leave its fleet: no load is planned with it. Topology files do not say it.
    """

    id: NodeId
    gpus: tuple[Gpu, ...]
    memory_bytes: int
    pool_bytes: int
    pool_taken_bytes: int = 0
    disks: tuple[Disk, ...] = ()
    nics: tuple[Nic, ...] = ()
    address: str = ""
    rack: str | None = None
    switches: tuple[Switch, ...] = ()
    host: Host = Host()
    is_leaving: bool = False

    @property
    def disk_bytes_per_s(self) -> float:
        return sum(disk.bytes_per_s for disk in self.disks)

    @property
    def nic_bytes_per_s(self) -> float:
        return sum(nic.bytes_per_s for nic in self.nics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A snapshot of the hardware that a plan is made for.

    Attributes:
        nodes: The hosts.
        name: For people.
        links: Rates that hold everywhere.
        storage: Storage that all nodes reach, where there is one.
        racks: Uplinks; a rack that nodes name and that is not here has no limit of its own.
        source: Where the figures are from: a data sheet, a measurement and its date.

    Raises:
        RequestError: Two nodes have one name, or two GPUs of a node one index, or a switch has a GPU that is not there.
    """

    nodes: tuple[Node, ...]
    name: str = ""
    links: Links = Links()
    storage: Storage | None = None
    racks: tuple[Rack, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for node_id, count in Counter(node.id for node in self.nodes).items():
            if count > 1:
                raise RequestError(f"topology {self.name!r}: two nodes are named {node_id!r}; give each its own name")
        for node in self.nodes:
            indices = [gpu.index for gpu in node.gpus]
            if len(set(indices)) != len(indices):
                raise RequestError(f"topology {self.name!r}: node {node.id!r} has GPUs with equal indices {indices}")
            switched = [index for switch in node.switches for index in switch.gpus]
            if len(set(switched)) != len(switched) or not set(switched) <= set(indices):
                raise RequestError(
                    f"topology {self.name!r}: the switches of node {node.id!r} have the GPUs {switched}; name each of "
                    f"its GPUs {indices} at most once"
                )

    @property
    def num_gpus(self) -> int:
        return sum(len(node.gpus) for node in self.nodes)

    def node(self, node_id: str) -> Node:
        """The node with this id.

        Raises:
            KeyError: There is none.
        """
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)
