"""What agents and ranks of a simulation share: the clock, the flows of each step, the record of what was done."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from megamind_ray.config import Config
from megamind_ray.core.ids import NodeId, Rank
from megamind_ray.core.topology import Host, Topology
from megamind_ray.core.tracks import NodeTracks
from megamind_ray.planning.cost import CostModel, Step, in_sequence
from megamind_ray.sim.clock import Clock, Limit, Steps, together
from megamind_ray.sim.fluid import Fluid
from megamind_ray.sim.history import History
from megamind_ray.sim.record import Recorder
from megamind_ray.sim.routes import Routes
from megamind_ray.sim.work import Unit, Work

__all__ = ["Place", "World", "network_series"]


def network_series(node: NodeId) -> str:
    """The series of what comes in over a node's network."""
    return NodeTracks.of(node).storage_rate.removesuffix("storage") + "network in"


class Place(NamedTuple):
    """Where a rank runs: positions of its node in the topology, and of its GPU on the node."""

    node: int
    gpu: int


class World:
    """The shared part of one simulation.

    Args:
        topology: The hardware.
        work: What is to be done.
        config: Threads and deadlines.
        places: By rank.
        is_remote: Whether the checkpoint is behind a network.
        is_referenced: Whether chunks are checked as they are read.
        chunk_bytes: The chunk grid.
        max_samples: Most samples of a series.
        spares: Nodes that may come to have a part in the load.

    Attributes:
        routes: How blocks go.
        tracks: By node of the load, its tracks and series.
        meters: Names of the series of rates; columns of ``history``.
    """

    def __init__(
        self,
        topology: Topology,
        work: Work,
        config: Config,
        places: Mapping[Rank, Place],
        *,
        is_remote: bool,
        is_referenced: bool,
        chunk_bytes: int,
        max_samples: int,
        spares: Collection[NodeId] = (),
    ) -> None:
        self.topology = topology
        self.work = work
        self.routes = Routes(work)
        self.config = config
        self.places = dict(places)
        self.is_referenced = is_referenced
        self.max_samples = max_samples
        self.model = CostModel(topology, remote=is_remote)
        self.recorder = Recorder()
        self.clock = Clock()
        self.node_index = {node.id: index for index, node in enumerate(topology.nodes)}
        self.is_remote = is_remote
        self._chunk_bytes = chunk_bytes
        used = [node for node in topology.nodes if node.id in work.nodes or node.id in spares]
        self.tracks = {node.id: NodeTracks.of(node.id) for node in used}
        self.meters = [
            *(self.tracks[node.id].storage_rate for node in used),
            *(network_series(node.id) for node in used),
        ]
        resources = self.model.resources
        self._meter = {name: len(resources) + index for index, name in enumerate(self.meters)}
        self.history = History(len(self.meters), max_samples=max_samples)
        self.fluid = Fluid(
            self.clock,
            [*(resource.capacity for resource in resources), *(math.inf for _ in self.meters)],
            history=self.history,
            watched=len(resources),
        )
        self._cut_shares: dict[tuple[NodeId, int, int], float] = {}
        self._lanes: dict[tuple[str | int, ...], tuple[int, float]] = {}

    def move(self, rank: Rank, node: NodeId, gpu: int) -> None:
        """A rank runs on another GPU from now on."""
        at = self.node_index[node]
        self.places[rank] = Place(at, [one.index for one in self.topology.nodes[at].gpus].index(gpu))
        for key in [key for key in self._lanes if key[1:] in (("copy", rank), ("place", rank))]:
            del self._lanes[key]

    def host(self, node: NodeId) -> Host:
        """Processors and memory of a node."""
        return self.topology.nodes[self.node_index[node]].host

    def width(self, unit: Unit) -> int:
        """Threads that work on a unit: one; where extents were merged into fewer units than there are threads, more."""
        if unit.parts == 1:
            return 1
        reader = unit.node if unit.rank is None else unit.rank
        return min(unit.parts, max(1, self.num_threads(reader) // len(self.work.units_of[reader])))

    def num_threads(self, reader: NodeId | Rank) -> int:
        """Threads that read in a process: of a node's agent, or of a rank."""
        io = self.config.io
        if self.is_remote:
            return io.remote_threads
        return io.for_agent(self.host(reader).cores).read_threads if isinstance(reader, str) else io.read_threads

    def request_limit(self) -> Limit | None:
        """The requests that one process may have in flight; None where local files are read."""
        return Limit(self.config.io.remote_threads) if self.is_remote else None

    def read(self, unit: Unit, node: NodeId, requests: Limit | None, track: str) -> Steps:
        """Steps of a thread that reads a unit into host memory and checks it, as ``ExtentReader.staged`` does.

        Args:
            unit: What.
            node: Where.
            requests: Of the process, where storage is behind a network.
            track: Who checks it.
        """
        begin_s = self.clock.now_s
        if requests is not None:
            yield from self._read_side_by_side(unit, node, requests)
            self._span_of_read(unit, node, begin_s)
            return
        width = self.width(unit)
        lane, latency_s = self.lane("read", node, width=width)
        num_reads = unit.pieces if self.is_referenced else unit.parts
        yield self.clock.sleep(latency_s * num_reads / width)
        yield self.fluid.flow(lane, unit.nbytes)
        self._span_of_read(unit, node, begin_s)
        if self.is_referenced:
            begin_s = self.clock.now_s
            lane, _ = self.lane("verify", node, width=width)
            yield self.fluid.flow(lane, unit.nbytes)
            self.recorder.span(track, "verify", begin_s, self.clock.now_s, unit.nbytes, unit.extent)

    def _read_side_by_side(self, unit: Unit, node: NodeId, requests: Limit) -> Steps:
        """A unit's chunks, each a request that is checked by its own thread."""
        num_requests = max(1, self.width(unit) * unit.pieces // unit.parts)
        steps = [self._request(unit, node, requests, unit.nbytes / num_requests) for _ in range(num_requests)]
        yield together(steps)

    def _request(self, unit: Unit, node: NodeId, requests: Limit, nbytes: float) -> Steps:
        yield from requests.take()
        try:
            lane, latency_s = self.lane("read", node)
            yield self.clock.sleep(latency_s * unit.parts / self.width(unit))
            yield self.fluid.flow(lane, nbytes)
            if self.is_referenced:
                yield self.fluid.flow(self.lane("verify", node)[0], nbytes)
        finally:
            requests.give()

    def _span_of_read(self, unit: Unit, node: NodeId, begin_s: float) -> None:
        self.recorder.span(self.tracks[node].storage, "read", begin_s, self.clock.now_s, unit.nbytes, unit.extent)

    def lane(self, *key: str | int, width: int = 1) -> tuple[int, float]:
        """Lane and latency of a step: its kind, then node, rank, or what else it depends on (see ``step``).

        Args:
            *key: Which step.
            width: Threads that do it side by side.
        """
        found = self._lanes.get((width, *key))
        if found is None:
            step = self.step(*key)
            uses = [*step.uses, *((self._meter[name], 1.0) for name in self._meters_of(key))]
            lane = self.fluid.lane(uses, cap=width * step.cap_bytes_per_s, weight=width)
            found = self._lanes[width, *key] = (lane, step.latency_s)
        return found

    def step(self, *key: str | int) -> Step:
        """What a step takes.

        - ``read``, ``verify`` on a node; ``call`` to its agent, in seconds instead of bytes;
        - ``put`` on a node, of blocks of a size;
        - ``cut`` on a node, with runs of a length into blocks of a size: cut and put, block by block;
        - ``wire`` from a node to another one;
        - ``copy`` and ``place`` by a rank.
        """
        model, index = self.model, self.node_index
        match key:
            case ("read", str(node)):
                return model.read(index[NodeId(node)], self._chunk_bytes)
            case ("verify", str(node)):
                return model.verify(index[NodeId(node)])
            case ("call", str(node)):
                return model.call(index[NodeId(node)])
            case ("put", str(node), int(block_bytes)):
                return model.put(index[NodeId(node)], block_bytes)
            case ("cut", str(node), int(run_bytes), int(block_bytes)):
                at = index[NodeId(node)]
                return in_sequence(self._cut(at, run_bytes), model.put(at, block_bytes))
            case ("wire", str(source), str(target)):
                return model.wire(index[NodeId(source)], index[NodeId(target)])
            case ("copy", int(rank)):
                return model.copy(*self.places[Rank(rank)])
            case ("place", int(rank)):
                return model.place(*self.places[Rank(rank)])
        raise AssertionError(f"no such step: {key}")

    def cut_share(self, node: NodeId, run_bytes: int, block_bytes: int) -> float:
        """Of the time in which blocks of such a size with such runs are cut and put, the part that cutting takes."""
        key = node, run_bytes, block_bytes
        if key not in self._cut_shares:
            at = self.node_index[node]
            steps = self._cut(at, run_bytes), self.model.put(at, block_bytes)
            cut_s, put_s = (1 / step.cap_bytes_per_s for step in steps)
            self._cut_shares[key] = cut_s / (cut_s + put_s)
        return self._cut_shares[key]

    def _cut(self, node: int, run_bytes: int) -> Step:
        return self.model.cut(node, run_bytes or math.inf, packed=run_bytes == 0)

    def _meters_of(self, key: tuple[str | int, ...]) -> Sequence[str]:
        match key:
            case ("read", str(node)):
                is_local = bool(self.topology.nodes[self.node_index[NodeId(node)]].disks) and not self.is_remote
                name = NodeId(node)
                storage_rate = self.tracks[name].storage_rate
                return (storage_rate,) if is_local else (storage_rate, network_series(name))
            case ("wire", str(_), str(target)):
                return (network_series(NodeId(target)),)
        return ()
