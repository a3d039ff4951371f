"""The node agent: owns the blocks of its node, and what it takes to make and hand them out."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter, time
from typing import Any, Final

import numpy as np
import ray

from megamind_ray import __version__
from megamind_ray.actors.agent_load import AgentLoad
from megamind_ray.actors.block_pool import PoolClosedError
from megamind_ray.actors.boundary import wait_for
from megamind_ray.actors.collector import spare_imports
from megamind_ray.actors.dataplane import DataPlane
from megamind_ray.actors.fencing import Epoch, Fence
from megamind_ray.actors.groups import by_order, in_group
from megamind_ray.actors.heartbeat import Heartbeat
from megamind_ray.actors.holdings import AgentHoldings
from megamind_ray.actors.journal import JournalCopy, KeptJournal
from megamind_ray.actors.kept_blocks import BlockKey, CopyResult, Heirloom, Holdings, KeptBlocks
from megamind_ray.actors.messages import AgentFacts, AgentStatus, BlockHandle, Consumer, Delivery, Pulse, Reroute
from megamind_ray.actors.nixl_wire import NixlWire
from megamind_ray.actors.node_wires import AgentSource, NodeWires, WireMeasureRequest, WireTimes
from megamind_ray.actors.pool_check import find_pool_file
from megamind_ray.actors.ray_peer import RayPeer
from megamind_ray.config import Config, WireConfig
from megamind_ray.core.ids import ExtentId, Generation, LoadId, NodeId, Rank
from megamind_ray.core.manifest import FileInfo
from megamind_ray.core.program import AgentProgram
from megamind_ray.core.recorder import NO_RECORD, Recorded, Recorder, RecordSettings
from megamind_ray.core.wires import WireName
from megamind_ray.device.memory import host_memory
from megamind_ray.engine.measure import MeasureRequest, NodeMeasurement, measure_node
from megamind_ray.errors import ClusterError, RequestError
from megamind_ray.io.opening import why_unreadable

__all__ = ["NodeAgent"]

_HANDED_BYTES: Final = 1 << 20
_MAX_ENDED: Final = 4  # loads that ended here whose last status is kept: a planner's successor may ask again


class NodeAgent:
    """One per node. Holds the refs of the blocks that it put; when it dies, they are gone, and the planner knows."""

    def __init__(self, plane: DataPlane | None = None) -> None:
        self._wires = NodeWires(plane)
        self._plane = self._wires.store
        self._lock = threading.Lock()
        self._planes: dict[LoadId, DataPlane] = {}
        self._loads: dict[LoadId, AgentLoad] = {}
        self._beats: dict[LoadId, Heartbeat] = {}
        self._kept = KeptBlocks(self._plane)
        self._ended: dict[LoadId, AgentStatus] = {}
        self._journal = JournalCopy()
        self.fence = Fence()
        self._measuring = threading.Lock()
        self._stop_measuring = threading.Event()
        self._to_hand: list[BlockHandle] = []
        # Of the latest load: it is asked for when the load is over.
        self._recorded: tuple[LoadId, Recorder] | None = None
        if plane is None:  # a process of its own
            spare_imports()

    @by_order("control")
    def facts(self) -> AgentFacts:
        """The node as it is now."""
        context = ray.get_runtime_context()
        node = NodeId(context.get_node_id())
        pool = find_pool_file(os.getppid())  # the raylet starts all workers of its node
        row = next(row for row in ray.nodes() if row["NodeID"] == node)
        return AgentFacts(
            node=node,
            address=row["NodeManagerAddress"],
            memory_bytes=host_memory().total_bytes,
            pool_bytes=int(row["Resources"].get("object_store_memory", 0)),
            pool_dir=pool.folder if pool else "",
            pool_dir_bytes=pool.folder_bytes if pool else 0,
            pool_dir_free_bytes=pool.folder_free_bytes if pool else 0,
            pool_resident_bytes=pool.resident_bytes if pool else 0,
        )

    @in_group("control")
    def epoch(self) -> Epoch:
        """The latest planner that it has heard of."""
        return self.fence.epoch

    @by_order("control")
    def serve(self) -> AgentHoldings:
        """Obeys a planner from now on, and none before it; says what it has."""
        facts, kept = self.facts(), self._journal.kept
        blocks = self._kept.holdings().blocks
        with self._lock:
            return AgentHoldings(
                release=__version__,
                facts=facts,
                loads=frozenset(self._loads),
                kept_bytes={load: sum(one.nbytes for one in held) for load, held in blocks.items()},
                stamp=kept.stamp,
                has_transfer=kept.transfer is not None,
                abandoned=self._journal.abandoned,
            )

    @by_order("control")
    def keep_journal(self, written: KeptJournal, transfer: bytes | None) -> None:
        """Keeps what the planner's successor must know; ``transfer`` by itself, since it comes as an object."""
        self._journal.keep(written if transfer is None else replace(written, transfer=transfer))

    @by_order("control")
    def kept_journal(self) -> KeptJournal:
        """What it keeps."""
        return self._journal.kept

    @in_group("control")
    def abandon(self, ticket: str) -> LoadId | None:
        """Ends a load whose client has given up waiting for a planner; None where none is under way, by the journal."""
        load = self._journal.abandon(ticket)
        if load is not None:
            self.close_load(load, False)
        return load

    @by_order("control")
    def leave(self) -> None:
        """Is about to be ended: by order, so that a planner that was succeeded ends nobody."""
        self.fence.leave()

    @by_order("control")
    def lacks(self, root: str, files: Sequence[FileInfo]) -> str:
        """Why this node cannot read a checkpoint's files as they were planned; empty where it can."""
        return why_unreadable(root, files)

    @by_order("control")
    def open_load(
        self,
        program: AgentProgram,
        peers: Mapping[NodeId, Any],
        config: Config,
        record: RecordSettings | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """Gets ready for a load with its settings: from now on its ranks may ask for blocks, and it says that it lives.

        Where it is open already, a planner's successor asks: it is told from now on, and the load goes on as it is. One
        that has ended stays so.

        Args:
            program: What to do.
            peers: Agents of the other nodes in the load.
            config: Settings.
            record: How to record it.
            pulse: Whom to tell that this node lives.
        """
        with self._lock:
            if program.load in self._ended:
                return
            if program.load in self._loads:
                self._beat(program, pulse)
                return
        recorder = NO_RECORD if record is None else record.recorder(wall=time, steps=perf_counter)
        plane = self._wires.plane(config, where=program.node)
        load = AgentLoad(
            program,
            config,
            plane=plane,
            peers={node: RayPeer(node, handle, config) for node, handle in peers.items()},
            recorder=recorder,
        )
        with self._lock:
            self._recorded = (program.load, recorder)
            self._loads[program.load] = load
            self._planes[program.load] = plane
            self._beat(program, pulse)

    @by_order("control")
    def start_reads(self, load: LoadId) -> None:
        """Begins to read and to relay. Harmless where it has, or the load has ended here."""
        with self._lock:
            if load in self._ended:
                return
        self._load(load).start()

    @in_group("exchange")
    def exchange(
        self,
        load: LoadId,
        consumer: Consumer,
        generation: Generation,
        acked: Sequence[int],
        rejected: Sequence[Delivery],
        limit: int,
        timeout_s: float,
    ) -> tuple[Delivery, ...] | None:
        """Hands out blocks (see ``AgentLoad.exchange``); None when the load has ended here."""
        with self._lock:
            one = self._loads.get(load)
        if one is None:
            return None
        try:
            return one.exchange(consumer, generation, acked=acked, rejected=rejected, limit=limit, timeout_s=timeout_s)
        except PoolClosedError:
            return None

    @by_order("control")
    def retire_rank(self, load: LoadId, rank: Rank, generation: Generation) -> None:
        """Closes the mailbox of a rank that has all its blocks."""
        self._load(load).retire_rank(rank, generation)

    @by_order("control")
    def reset_rank(self, load: LoadId, rank: Rank, generation: Generation) -> None:
        """Gives the successor of a lost worker an empty mailbox."""
        self._load(load).reset_rank(rank, generation)

    @by_order("control")
    def read_again(self, fragment: AgentProgram, ranks: Sequence[Rank]) -> None:
        """Reads extents once more, for these ranks."""
        self._load(fragment.load).read_again(fragment, ranks)

    @by_order("control")
    def read_instead(self, fragment: AgentProgram) -> None:
        """Reads extents that another node was to read."""
        self._load(fragment.load).read_instead(fragment)

    @by_order("control")
    def take_back(self, load: LoadId, keep_bytes: int) -> tuple[ExtentId, ...]:
        """What this node will not read any more (see ``AgentLoad.take_back``)."""
        return self._load(load).take_back(keep_bytes)

    @by_order("control")
    def relay_from(self, load: LoadId, peers: Sequence[NodeId], passes_on: bool = False) -> None:
        """Takes in blocks that other nodes have for ranks of this one; ``passes_on``: and of those further on."""
        for peer in peers:
            self._load(load).relay_from(peer, passes_on=passes_on)

    @by_order("control")
    def reroute(self, load: LoadId, route: Reroute, peers: Mapping[NodeId, Any], config: Config) -> None:
        """A node was given up: blocks go past it (see ``AgentLoad.reroute``).

        Args:
            load: Which.
            route: How blocks go.
            peers: Agents of nodes that have a part in the load from now on.
            config: Of the load.
        """
        self._load(load).reroute(route, {node: RayPeer(node, handle, config) for node, handle in peers.items()})

    @by_order("control")
    def status(self, load: LoadId) -> AgentStatus:
        """How the load goes on this node, or went."""
        with self._lock:
            ended = self._ended.get(load)
        return self._with_wire(load, self._load(load).status()) if ended is None else ended

    @by_order("control")
    def close_load(self, load: LoadId, keep: bool) -> AgentStatus:
        """Ends a load here: readers stop, blocks go, except those to be kept. Harmless if it was never opened.

        Asked again, by a planner's successor, it gives the same answer; blocks that were kept stay until ``unload``.
        """
        with self._lock:
            if load in self._ended:
                return self._ended[load]
            one = self._loads.pop(load, None)
            beat = self._beats.pop(load, None)
        if beat is not None:
            beat.end()
        if one is None:
            return AgentStatus()
        status = self._with_wire(load, one.status())
        kept = one.close()
        with self._lock:
            plane = self._planes.pop(load)
        for block in kept.values():
            block.handle = plane.settle(block.handle)
        if keep and kept:
            self._kept.add(load, kept)
        with self._lock:
            self._ended[load] = status
            while len(self._ended) > _MAX_ENDED:
                del self._ended[next(iter(self._ended))]
        return status

    @by_order("control")
    def recorded(self, load: LoadId, first: int) -> Recorded:
        """Ends the recording of a load, the latest one, and gives a page of it from row ``first`` on."""
        with self._lock:
            latest = self._recorded
        return latest[1].page(first) if latest is not None and latest[0] == load else Recorded()

    @by_order("control")
    def unload(self, load: LoadId) -> None:
        """Drops the kept blocks of a model."""
        self._kept.drop(load)

    @by_order("control")
    def holdings(self) -> Holdings:
        """All that this node keeps of loaded models."""
        return self._kept.holdings()

    @in_group("control")
    def hand_kept(self, keys: Sequence[BlockKey], timeout_s: float) -> tuple[Heirloom, ...]:
        """Blocks for another node that takes them over (see ``KeptBlocks.hand``)."""
        return self._kept.hand(keys, timeout_s=timeout_s)

    @by_order("exchange")
    def copy_kept(self, keys: Sequence[BlockKey], source: Any, call_s: float) -> CopyResult:
        """Takes over blocks that another node keeps (see ``KeptBlocks.copy``).

        Args:
            keys: Which.
            source: That node's agent.
            call_s: For each answer of it, and for each block.
        """

        def hand(wanted: Sequence[BlockKey]) -> Sequence[Heirloom]:
            given: tuple[Heirloom, ...] = wait_for(
                source.hand_kept.remote(wanted, call_s), timeout_s=call_s, what="taking over the blocks of another node"
            )
            return given

        return self._kept.copy(keys, hand, timeout_s=call_s)

    @by_order("control")
    def hand(self, num_blocks: int) -> tuple[BlockHandle, ...]:
        """Hands blocks over as an exchange does: what that costs is measured with it. 0 lets them go."""
        block = np.zeros(_HANDED_BYTES, np.uint8)
        missing = num_blocks - len(self._to_hand)
        self._to_hand = [*self._to_hand, *(self._plane.put(block) for _ in range(missing))] if num_blocks else []
        return tuple(self._to_hand[:num_blocks])

    @by_order("control")
    def measure(self, request: MeasureRequest) -> NodeMeasurement:
        """Measures this node's processors, memory and disk, and what a put into its object store costs.

        Raises:
            RequestError: It is being measured already, or the folder cannot be written to.
            CapacityError: The temporary file does not fit.
            ClusterError: It was stopped.
        """
        if not self._measuring.acquire(blocking=False):
            raise RequestError("this node is being measured already; wait until that is done, then measure again")
        try:
            self._stop_measuring.clear()
            return measure_node(request, put=self._plane.put, stop=self._stop_measuring)
        finally:
            self._measuring.release()

    @by_order("control")
    def lacks_nixl(self, config: WireConfig) -> str:
        """Why this node cannot use NIXL; empty where it can."""
        return self._wires.lacking(config)

    @by_order("control")
    def lay_out(self, wire: WireName, num_blocks: int, nbytes: int, config: Config) -> tuple[BlockHandle, ...]:
        """Blocks for another node to measure a wire with (see ``NodeWires.lay_out``); 0 lets them go."""
        return self._wires.lay_out(wire, num_blocks, nbytes, config)

    @by_order("control")
    def measure_wires(self, source: Any, request: WireMeasureRequest, config: Config) -> tuple[WireTimes, ...]:
        """Takes in blocks of another node's agent by each wire, and says how long that took.

        Raises:
            ClusterError: A block did not come.
        """
        return self._wires.measure(AgentSource(source, config, request.timeout_s), request, config)

    @by_order("control")
    def stop_measuring(self) -> None:
        """Ends a measurement early; its temporary file goes with it. Harmless where there is none."""
        self._stop_measuring.set()

    def _with_wire(self, load: LoadId, status: AgentStatus) -> AgentStatus:
        """With what NIXL did in it, where that is the load's wire."""
        with self._lock:
            plane = self._planes.get(load)
        if not isinstance(plane, NixlWire):
            return status
        return replace(status, bytes_nixl=plane.bytes_read, faults=(*status.faults, *plane.faults))

    def _beat(self, program: AgentProgram, pulse: Pulse | None) -> None:
        """Under the lock."""
        if pulse is None:
            return
        before = self._beats.pop(program.load, None)
        if before is not None:
            before.end()
        self._beats[program.load] = Heartbeat(pulse, program.node)

    def _load(self, load: LoadId) -> AgentLoad:
        with self._lock:
            one = self._loads.get(load)
        if one is None:
            raise ClusterError(f"load {load} is not open on this node; the planner has lost track, load again")
        return one
