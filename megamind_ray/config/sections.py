"""All settings: one tree of frozen sections, each of which refuses values that cannot be meant."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from megamind_ray.core.location import parse_location
from megamind_ray.errors import RequestError
from megamind_ray.units import GIB, KIB, MIB, format_bytes

__all__ = [
    "Config",
    "DeadlineConfig",
    "DirectMode",
    "IoConfig",
    "LoadConfig",
    "PlacementConfig",
    "PlanConfig",
    "PoolConfig",
    "RetryConfig",
    "RoutingConfig",
    "StragglerConfig",
    "WireConfig",
    "WireUse",
]

DirectMode = Literal["auto", "always", "never"]
WireUse = Literal["auto", "ray", "nixl"]

# Waits are shorter: not every clock takes more, and none takes what is not finite.
_DAY_S = 86400
# More gain 2% on the fastest disks that were simulated, and each has a staging buffer of an extent.
_MOST_AGENT_THREADS = 32


def _require(ok: bool, field_name: str, value: object, remedy: str) -> None:
    if not ok:
        raise RequestError(f"config {field_name} = {value!r}: {remedy}")


def _absolute_mirror(base: str) -> str:
    try:
        return parse_location(base).uri
    except RequestError as error:
        raise RequestError(f"config io.mirrors: {error.message}") from error


def _absolute_file(path: str, field_name: str) -> str:
    """For a file that is read later, wherever the process is by then."""
    try:
        location = parse_location(path)
    except RequestError as error:
        raise RequestError(f"config {field_name}: {error.message}") from error
    _require(location.is_local, field_name, path, "give the path of a file")
    return location.uri


@dataclass(frozen=True, kw_only=True, slots=True)
class IoConfig:
    """Reading from storage.

    Attributes:
        chunk_bytes: Unit of checksum and retry; a sidecar's value goes before it.
        extent_bytes: Longest contiguous read, but for what goes through a pool.
        pool_extent_bytes: The same for what goes through a pool. 0: ``extent_bytes``, or up to four times as much where
            a node's storage is so fast, and its ranks are so many, that short ones would keep its agent from reading
            (docs/design/0021).
        max_gap_bytes: Gaps between demanded ranges up to this size are read over.
        remote_gap_bytes: The same for storage behind a network, where one more request costs more than these bytes.
        read_threads: Reads of local files in flight per process.
        agent_threads: Extents of local files that a node agent works on at a time: one thread reads, cuts and puts an
            extent. 0: half of the node's cores, at least ``read_threads`` and at most 32 (docs/design/0015).
        remote_threads: Requests in flight per process to storage behind a network.
        direct: Whether local files are read past the page cache (``O_DIRECT``): ``auto`` where their bytes are not in
            it, ``always``, or ``never``.
        mirrors: Folders or URIs with the same files; asked, in this order, where the checkpoint's own storage fails.
            Kept as absolute paths, of the working directory of who made the configuration: workers have others.
    """

    chunk_bytes: int = 8 * MIB
    extent_bytes: int = 32 * MIB
    pool_extent_bytes: int = 0
    max_gap_bytes: int = 4 * KIB
    remote_gap_bytes: int = MIB
    read_threads: int = 8
    agent_threads: int = 0
    remote_threads: int = 16
    direct: DirectMode = "auto"
    mirrors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(
            64 * KIB <= self.chunk_bytes <= GIB and self.chunk_bytes % (4 * KIB) == 0,
            "io.chunk_bytes",
            self.chunk_bytes,
            "take a multiple of 4 KiB from 64 KiB to 1 GiB (8-12 MiB is good)",
        )
        _require(
            self.extent_bytes >= self.chunk_bytes,
            "io.extent_bytes",
            self.extent_bytes,
            f"must be at least io.chunk_bytes = {format_bytes(self.chunk_bytes)}",
        )
        _require(
            self.pool_extent_bytes == 0 or self.pool_extent_bytes >= self.chunk_bytes,
            "io.pool_extent_bytes",
            self.pool_extent_bytes,
            f"take 0, or at least io.chunk_bytes = {format_bytes(self.chunk_bytes)}",
        )
        _require(0 <= self.max_gap_bytes <= self.chunk_bytes, "io.max_gap_bytes", self.max_gap_bytes, "0 to a chunk")
        _require(self.remote_gap_bytes >= 0, "io.remote_gap_bytes", self.remote_gap_bytes, "take 0 or more bytes")
        for name in ("read_threads", "remote_threads"):
            _require(1 <= getattr(self, name) <= 256, f"io.{name}", getattr(self, name), "take 1 to 256 threads")
        _require(0 <= self.agent_threads <= 256, "io.agent_threads", self.agent_threads, "take 0 to 256 threads")
        modes = get_args(DirectMode)
        _require(self.direct in modes, "io.direct", self.direct, f"take {', '.join(modes)}")
        _require(all(self.mirrors), "io.mirrors", self.mirrors, "name a folder or URI in each")
        object.__setattr__(self, "mirrors", tuple(map(_absolute_mirror, self.mirrors)))

    def is_remote(self, root: str) -> bool:
        """Whether ``root``, which is ``Manifest.root``, is behind a network."""
        return "://" in root and not root.startswith("file:")

    def reads_in_flight(self, root: str) -> int:
        """How many reads of a checkpoint one process has in flight; ``root`` is ``Manifest.root``."""
        return self.remote_threads if self.is_remote(root) else self.read_threads

    def for_agent(self, cores: int, longest_bytes: int = 0) -> IoConfig:
        """As a node agent reads: ``read_threads`` is what its node is good for, and each has room for an extent.

        Args:
            cores: Of the node.
            longest_bytes: The longest extent that it is to read.
        """
        found = self.agent_threads or max(self.read_threads, min(cores // 2, _MOST_AGENT_THREADS))
        return replace(self, read_threads=found, extent_bytes=max(self.extent_bytes, longest_bytes))

    def gap_bytes(self, root: str) -> int:
        """Gaps up to this size are read over; ``root`` is ``Manifest.root``."""
        return min(self.remote_gap_bytes, self.chunk_bytes) if self.is_remote(root) else self.max_gap_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryConfig:
    """Retries of one chunk on one node: exponential back-off with jitter.

    Attributes:
        attempts: Reads of one chunk from one source, the first included.
        first_wait_s: Longest wait before the second attempt; doubled for each further one.
        max_wait_s: Longest wait before any attempt.
        request_s: A request to storage behind a network that brings nothing for so long has failed.
        quarantine_share: A source of which this share of reads fails is not asked again while there is another.
        quarantine_reads: Reads before that share is looked at.
    """

    attempts: int = 4
    first_wait_s: float = 0.1
    max_wait_s: float = 5.0
    request_s: float = 30.0
    quarantine_share: float = 0.25
    quarantine_reads: int = 16

    def __post_init__(self) -> None:
        _require(1 <= self.attempts <= 20, "retry.attempts", self.attempts, "take 1 to 20")
        _require(
            0 <= self.max_wait_s < _DAY_S, "retry.max_wait_s", self.max_wait_s, "take 0 s or more, less than a day"
        )
        _require(
            0 <= self.first_wait_s <= self.max_wait_s,
            "retry.first_wait_s",
            self.first_wait_s,
            "must be from 0 to retry.max_wait_s",
        )
        _require(0 < self.request_s < _DAY_S, "retry.request_s", self.request_s, "take more than 0 s, less than a day")
        _require(
            0 < self.quarantine_share <= 1, "retry.quarantine_share", self.quarantine_share, "take more than 0, up to 1"
        )
        _require(self.quarantine_reads >= 1, "retry.quarantine_reads", self.quarantine_reads, "take 1 or more reads")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Use of the object store.

    Attributes:
        max_fraction: Share of a node's object store that blocks may take, replicas included.
        keep_fraction: Share of that which kept blocks may take; the rest stays for streaming.
    """

    max_fraction: float = 0.75
    keep_fraction: float = 0.8

    def __post_init__(self) -> None:
        _require(
            0 < self.max_fraction <= 0.75, "pool.max_fraction", self.max_fraction, "take more than 0, at most 0.75"
        )
        _require(0 <= self.keep_fraction <= 0.95, "pool.keep_fraction", self.keep_fraction, "take 0 to 0.95")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Limits of the parallel plan.

    Attributes:
        max_replicated_share: A plan that replicates more of the checkpoint's bytes for want of a rule is refused.
        alignment_bytes: Alignment of each view in the arena.
        topology: File with the racks and rates of the cluster, as ``megamind topology --cluster`` writes it, read where
            the load is asked for; nodes are matched by name or address. Empty: nothing is known beside what nodes say
            of themselves, and all links count as alike.
    """

    max_replicated_share: float = 0.30
    alignment_bytes: int = 256
    topology: str = ""

    def __post_init__(self) -> None:
        _require(
            0 <= self.max_replicated_share <= 1,
            "plan.max_replicated_share",
            self.max_replicated_share,
            "take a share from 0 to 1",
        )
        _require(
            16 <= self.alignment_bytes <= 4 * KIB and self.alignment_bytes.bit_count() == 1,
            "plan.alignment_bytes",
            self.alignment_bytes,
            "take a power of two from 16 to 4096",
        )
        if self.topology:
            object.__setattr__(self, "topology", _absolute_file(self.topology, "plan.topology"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementConfig:
    """Which policy puts coordinates on GPUs.

    Attributes:
        policy: ``best_fit``, or to compare with it ``first_fit``, ``round_robin``, ``largest_first``,
            ``topology_blind`` and, on small clusters, ``exact`` (docs/design/0020).
    """

    policy: str = "best_fit"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """Which policy gives extents to readers and routes.

    Attributes:
        policy: ``balanced``.
        force_pool: Send every byte through the pool, also those that one rank alone needs.
        min_direct_bytes: An extent of one rank is read by that rank itself from this size on.
    """

    policy: str = "balanced"
    force_pool: bool = False
    min_direct_bytes: int = 1 * MIB

    def __post_init__(self) -> None:
        _require(self.min_direct_bytes >= 0, "routing.min_direct_bytes", self.min_direct_bytes, "take 0 or more bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """Behaviour under faults.

    Attributes:
        max_worker_restarts: Replacements of one rank in one load.
    """

    max_worker_restarts: int = 2

    def __post_init__(self) -> None:
        _require(self.max_worker_restarts >= 0, "load.max_worker_restarts", self.max_worker_restarts, "take 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerConfig:
    """When a node that reads much more slowly than the others gives some of its reading away (docs/design/0029).

    Attributes:
        replan: Whether it ever does.
        ratio: A node is slow if reading as a whole takes so many times as long as it would if what is left were shared
            out among all by their paces.
        window_s: Nothing is concluded from less time.
        gain_s: Nothing is moved for less.
        max_moves: Times that reading is moved in one load.
    """

    replan: bool = True
    ratio: float = 1.5
    window_s: float = 2.0
    gain_s: float = 1.0
    max_moves: int = 4

    def __post_init__(self) -> None:
        _require(1.1 <= self.ratio <= 1000, "straggler.ratio", self.ratio, "take 1.1 to 1000")
        _require(0.1 <= self.window_s < _DAY_S, "straggler.window_s", self.window_s, "take 0.1 s to less than a day")
        _require(0 <= self.gain_s < _DAY_S, "straggler.gain_s", self.gain_s, "take 0 s or more, less than a day")
        _require(0 <= self.max_moves <= 100, "straggler.max_moves", self.max_moves, "take 0 to 100")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineConfig:
    """Every wait has one (docs/design/0001).

    Attributes:
        poll_s: One long poll for blocks.
        call_s: A control call: progress, cancel, release.
        actor_start_s: Start of a worker or an agent.
        silence_s: A node without any sign of life, in a load: then it is given up (docs/design/0026).
        stall_s: A load without any progress.
        close_s: Stopping and giving everything back.
        planner_s: Having a planner again where one was lost (docs/design/0027).
    """

    poll_s: float = 5.0
    call_s: float = 30.0
    actor_start_s: float = 120.0
    silence_s: float = 8.0
    stall_s: float = 120.0
    close_s: float = 20.0
    planner_s: float = 120.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            _require(0 < value < _DAY_S, f"deadlines.{item.name}", value, "take more than 0 s and less than a day")


@dataclass(frozen=True, kw_only=True, slots=True)
class WireConfig:
    """What carries blocks from node to node (docs/design/0030).

    Attributes:
        use: ``ray``: its object store. ``nixl``: NIXL over UCX, which the extra ``rdma`` brings. ``auto``: the latter
            where all nodes have it and it was measured faster, else the former.
        faster: How many times faster it must have been.
        measure_s: For measuring both between two nodes.
        measure_bytes: Most that each of the two moves for that.
        buffer_bytes: Host memory of each node that NIXL receives blocks into; registered once, reused.
    """

    use: WireUse = "auto"
    faster: float = 1.2
    measure_s: float = 2.0
    measure_bytes: int = 256 * MIB
    buffer_bytes: int = 512 * MIB

    def __post_init__(self) -> None:
        uses = get_args(WireUse)
        _require(self.use in uses, "wire.use", self.use, f"take {', '.join(uses)}")
        _require(1 <= self.faster <= 100, "wire.faster", self.faster, "take a factor from 1 to 100")
        _require(0 < self.measure_s <= 60, "wire.measure_s", self.measure_s, "take more than 0 s, up to 60 s")
        for name in ("measure_bytes", "buffer_bytes"):
            _require(getattr(self, name) >= MIB, f"wire.{name}", getattr(self, name), "take 1 MiB or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings."""

    io: IoConfig = field(default_factory=IoConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    wire: WireConfig = field(default_factory=WireConfig)
