"""The hardware as data: nodes, GPUs, disks, NICs, links (docs/design/0003)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megamind_ray.core.ids import NodeId
from megamind_ray.errors import RequestError

__all__ = ["SCHEMA", "Disk", "Gpu", "Links", "Nic", "Node", "Storage", "Topology"]

SCHEMA = "megamind.topology/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node.

    Attributes:
        index: Number on its node.
        memory_bytes: What weights may take at most.
        free_bytes: What is free now.
        numa: NUMA node that it hangs on, where known.
        nvlink_group: GPUs of a node with equal values reach each other by NVLink; None: not at all.
        pcie_bytes_per_s: Host to device.
    """

    index: int
    memory_bytes: int
    free_bytes: int
    numa: int | None = None
    nvlink_group: int | None = None
    pcie_bytes_per_s: float = 25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk of a node that holds, or may hold, the checkpoint."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network interface of a node, full duplex."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Rates between GPUs of a node."""

    nvlink_bytes_per_s: float = 300e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Storage that all nodes reach over their NICs."""

    bytes_per_s: float
    shared: bool = True


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

    @property
    def disk_bytes_per_s(self) -> float:
        return sum(disk.bytes_per_s for disk in self.disks)

    @property
    def nic_bytes_per_s(self) -> float:
        return sum(nic.bytes_per_s for nic in self.nics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A snapshot of the hardware that a plan is made for.

    Raises:
        RequestError: Two nodes have one name, or two GPUs of a node one index.
    """

    nodes: tuple[Node, ...]
    name: str = ""
    links: Links = Links()
    storage: Storage | None = None

    def __post_init__(self) -> None:
        for node_id, count in Counter(node.id for node in self.nodes).items():
            if count > 1:
                raise RequestError(f"topology {self.name!r}: two nodes are named {node_id!r}; give each its own name")
        for node in self.nodes:
            indices = [gpu.index for gpu in node.gpus]
            if len(set(indices)) != len(indices):
                raise RequestError(f"topology {self.name!r}: node {node.id!r} has GPUs with equal indices {indices}")

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
