"""What actors say to each other. Frozen, small; weights travel as refs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from megamind_ray.config import Config
from megamind_ray.core.ids import BlockId, ExtentId, Generation, LoadId, ModelName, NodeId, Rank
from megamind_ray.core.parallel import Coords, Parallel, Rule
from megamind_ray.core.report import Fault, Kept, RankReport
from megamind_ray.core.stragglers import ReadProgress
from megamind_ray.core.topology import Topology
from megamind_ray.core.wires import RAY, WireChoice
from megamind_ray.errors import MegamindError

__all__ = [
    "AgentFacts",
    "AgentStatus",
    "BlockHandle",
    "Consumer",
    "Crc32Array",
    "Delivery",
    "DrainRequest",
    "ExtentFailure",
    "Lifetime",
    "LoadRequest",
    "ModelInfo",
    "Offer",
    "Place",
    "PlannerFacts",
    "Pulse",
    "RankResult",
    "Reroute",
    "RunCall",
    "Verification",
    "WorkerFacts",
    "WorkerStatus",
    "node_consumer",
    "rank_consumer",
    "weakest",
]

Lifetime = Literal["job", "detached"]
# Weakest verification of the chunks read so far; "none" where none was read.
Verification = Literal["reference", "transit", "off", "none"]
Crc32Array = npt.NDArray[np.uint32]
# What a data plane's ``put`` returns; only the same data plane can look inside.
BlockHandle: TypeAlias = Any
# Who takes blocks from an agent: a rank of its node, or the agent of another node.
Consumer: TypeAlias = tuple[Literal["rank", "node"], int | str]


def rank_consumer(rank: int) -> Consumer:
    return ("rank", rank)


def node_consumer(node: str) -> Consumer:
    return ("node", node)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What a client asks the planner for.

    Attributes:
        known: What ``config.plan.topology`` names, read by the client: the planner's node need not have the file.
        wire: What carries blocks from node to node; the planner's word.
    """

    uri: str
    parallel: Parallel
    name: ModelName | None
    keep: bool
    config: Config
    rules: tuple[Rule, ...] = ()
    allow_replication: bool = False
    sidecar: str | bool | None = None
    record: bool = False
    known: Topology | None = None
    wire: WireChoice = RAY


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequest:
    """What a client asks for when a node is to leave.

    Attributes:
        node: What the caller calls it.
        force: Unload models with ranks there, and give up what has no room elsewhere.
        wait_s: How long a load that is under way may take; 0: the drain is refused.
    """

    node: str
    force: bool
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerFacts:
    """Answer to a client's greeting.

    Attributes:
        version: Release of the planner.
        fleet: Its fleet.
        lifetime: Of the fleet.
        owner: What the client that started it called itself; others must not end it.
        device_memory_bytes: Arena budget of each worker; None: what was free.
        incarnation: Unique to the planner's process.
        is_ready: Whether it has taken over what there is; until then all but the release may change.
        leaving: Nodes that are to leave, or have left and are still in the cluster.
    """

    version: str
    fleet: str
    lifetime: Lifetime
    owner: str
    device_memory_bytes: int | None
    incarnation: str
    is_ready: bool
    leaving: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """A node, seen from inside.

    Attributes:
        node: Ray's node id.
        address: IP address.
        memory_bytes: Host memory.
        pool_bytes: Object store, as the raylet has it.
        pool_dir: Folder of the shared-memory file behind it.
        pool_dir_bytes: Size of that file system.
        pool_dir_free_bytes: Free there.
        pool_resident_bytes: Pages of the object store that already have memory.
    """

    node: NodeId
    address: str
    memory_bytes: int
    pool_bytes: int
    pool_dir: str
    pool_dir_bytes: int
    pool_dir_free_bytes: int
    pool_resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A GPU worker, seen from inside.

    Attributes:
        node: Ray's node id.
        gpu: Index of its GPU on the node.
        pid: Process id.
        device: ``cuda`` or ``cpu``.
        memory_bytes: Budget of its arena.
        free_bytes: Free in it.
        numa, nvlink_group: Where the GPU hangs, if NVML tells.
        description: The device in words.
    """

    node: NodeId
    gpu: int
    pid: int
    device: str
    memory_bytes: int
    free_bytes: int
    numa: int | None = None
    nvlink_group: int | None = None
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A block that an agent hands to a consumer.

    Attributes:
        serial: What the consumer acks.
        block: Plan id.
        extent: Plan id of the extent that it was cut from.
        ranks: For which ranks.
        nbytes: Size.
        crc32s: Checksum of each segment, in plan order.
        handle: How to get the bytes.
    """

    serial: int
    block: BlockId
    extent: ExtentId
    ranks: tuple[Rank, ...]
    nbytes: int
    crc32s: Crc32Array
    handle: BlockHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a block lies in memory that its node has registered with NIXL.

    Attributes:
        endpoint: Whose memory.
        parts: Address and size of each part of the block, in order; each is in one registered region.
        metadata: Of each region, what others need to read there, by the region's number.
    """

    endpoint: str
    parts: tuple[tuple[int, int], ...]
    metadata: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A handle for another node, which may read the bytes where they lie.

    Attributes:
        handle: As for Ray's object store: it keeps the block alive, and is the way that is left where NIXL fails.
        place: Where the bytes are.
    """

    handle: BlockHandle
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Whom a node tells that it lives, while a load goes on.

    Attributes:
        address, port: Where datagrams go to.
        token: What they begin with: nobody else can speak for a node.
        every_s: How often.
    """

    address: str
    port: int
    token: bytes
    every_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reroute:
    """A node was given up: where blocks go from now on.

    Attributes:
        lost: The node.
        homes: Of the ranks that moved, their new nodes.
        line: The nodes that remain, in the order in which they hand blocks on.
        sources: Nodes that the receiver takes blocks from, beside those that it takes from already.
    """

    lost: NodeId
    homes: Mapping[Rank, NodeId]
    line: tuple[NodeId, ...]
    sources: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentFailure:
    """An extent that an agent or a worker gave up on."""

    extent: ExtentId
    node: NodeId
    error: MegamindError
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """Counters of a load on one node, cumulative.

    Attributes:
        bytes_read: Payload at the read calls, first attempts.
        bytes_retried: Read again.
        reads: How far it is with the extents that it was given.
        bytes_sent: Block bytes handed to other nodes.
        bytes_nixl: Block bytes that NIXL brought here.
        failures: All so far; the planner remembers how many it has seen.
        faults: What was mended on the spot, all so far.
        peak_credit_bytes: Most that was reserved at a time.
        verified: Weakest verification of any chunk so far.
        kept: Blocks that stay in the pool.
        error: Why the node cannot go on, if it cannot.
    """

    bytes_read: int = 0
    bytes_retried: int = 0
    reads: ReadProgress = field(default_factory=ReadProgress)
    bytes_sent: int = 0
    bytes_nixl: int = 0
    failures: tuple[ExtentFailure, ...] = ()
    faults: tuple[Fault, ...] = ()
    peak_credit_bytes: int = 0
    verified: Verification = "none"
    kept: Kept = field(default_factory=Kept)
    error: MegamindError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """How far a rank is, and what it could not read itself."""

    bytes_done: int = 0
    failures: tuple[ExtentFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What a worker returns for a rank that arrived whole.

    Attributes:
        report: Its line in the load's report.
        bytes_read: Payload of its direct reads, first attempts.
        bytes_retried: Read again.
        verified: Weakest verification of its direct chunks.
        faults: What was mended on the spot.
    """

    report: RankReport
    bytes_read: int = 0
    bytes_retried: int = 0
    verified: Verification = "none"
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCall:
    """A function to run in a rank's actor.

    Attributes:
        model, load, rank, coords, parallel: Which rank of what.
        payload: Cloudpickled (fn, args): only workers unpickle user code.
        rendezvous: Unique to the load: under this name its ranks meet to make a device mesh.
    """

    model: ModelName
    load: LoadId
    rank: Rank
    coords: Coords
    parallel: Parallel
    payload: bytes
    rendezvous: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A loaded model, for listings.

    Attributes:
        kept_bytes: In the pools, replicas included; ``kept_by`` node.
        ranks: Rank, node, GPU and generation.
    """

    name: ModelName
    load: LoadId
    uri: str
    parallel: Parallel
    num_bytes: int
    kept_bytes: int
    loaded_at: str
    ranks: tuple[tuple[Rank, NodeId, int, Generation], ...] = ()
    kept_by: Mapping[NodeId, int] = field(default_factory=dict)


def weakest(levels: Collection[Verification]) -> Verification:
    """How well all was checked, where that differs: as its weakest part."""
    order: tuple[Verification, ...] = ("off", "transit", "reference")
    return next((level for level in order if level in levels), "none")
