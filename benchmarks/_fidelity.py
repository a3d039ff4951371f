"""Predicted against measured: real loads through Ray on this machine, and the simulator with this machine's figures.

Figures are those of ``megamind topology``: one copy alone, one call alone. Nothing is fitted to a load. Each round
measures them anew, since the speed of a virtual machine changes within minutes, and then loads each scenario once. The
disk is measured before each load on the checkpoint itself: a virtual disk gives what its host has cached twice as fast,
so a file that was just written says nothing about one that was not.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import megamind_ray as mm
from benchmarks._checkpoint import Checkpoint, write_llama
from benchmarks._host_pages import HeldMemory
from benchmarks._limit import FlatBuffer, Variant, read_flat
from benchmarks._page_cache import evict
from benchmarks._result import Measurement
from megamind_ray.config import Config, RoutingConfig, load_config
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Nic, Storage, Topology
from megamind_ray.testing.rated_server import RatedServer, Rates

__all__ = ["SCENARIOS", "Scenario", "measure_fidelity"]

# More than a load takes: with less it gets other pages, and takes up to three times as long.
_HELD_COPIES = 8
_MEDIAN_TARGET, _WORST_TARGET = 0.10, 0.25
_NUM_GPUS = 4
# Widths of 1536 and 768: heads that 4 divides.
_LARGE_BYTES, _SMALL_BYTES = 1_600_000_000, 400_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A load.

    Attributes:
        name: For people.
        parallel: The mesh.
        bytes_per_s: Of the web server that the checkpoint lies on; None: on the disk, out of the page cache.
        latency_s: Of that server.
        force_pool: Every byte goes through the pool.
        keep: Blocks stay in the pool.
    """

    name: str
    parallel: Parallel
    bytes_per_s: float | None = None
    latency_s: float = 0.0
    force_pool: bool = False
    keep: bool = False

    def config(self) -> Config:
        """Settings of the load."""
        return replace(load_config(profile=False), routing=RoutingConfig(force_pool=self.force_pool))


SCENARIOS = (
    *(Scenario(name=f"disk, tp={tp}", parallel=Parallel(tp=tp)) for tp in (1, 2, 4)),
    *(
        Scenario(name=f"disk, all through the pool, tp={tp}", parallel=Parallel(tp=tp), force_pool=True)
        for tp in (1, 2, 4)
    ),
    Scenario(name="disk, dp=2", parallel=Parallel(dp=2)),
    Scenario(name="disk, dp=4", parallel=Parallel(dp=4)),
    Scenario(name="disk, kept in the pool, tp=2", parallel=Parallel(tp=2), keep=True),
    *(
        Scenario(name=f"100 MB/s after 20 ms, tp={tp}", parallel=Parallel(tp=tp), bytes_per_s=100e6, latency_s=0.02)
        for tp in (1, 2, 4)
    ),
    Scenario(name="100 MB/s, dp=2", parallel=Parallel(dp=2), bytes_per_s=100e6),
    Scenario(name="300 MB/s, all through the pool, tp=2", parallel=Parallel(tp=2), bytes_per_s=300e6, force_pool=True),
)


def measure_fidelity(
    *, folder: Path | None = None, rounds: int = 5, quick: bool = False, scenarios: Sequence[Scenario] = SCENARIOS
) -> list[Measurement]:
    """Rows: the error of each scenario, their median and the worst.

    Args:
        folder: On the disk to read from; None: the system's for temporary files.
        rounds: Each with figures of its own; an error is the median over them.
        quick: A small checkpoint for all.
        scenarios: What to load.
    """
    errors: dict[str, list[float]] = {scenario.name: [] for scenario in scenarios}
    seconds: dict[str, list[tuple[float, float]]] = {scenario.name: [] for scenario in scenarios}
    with tempfile.TemporaryDirectory(dir=folder) as name, contextlib.ExitStack() as stack:
        large = write_llama(Path(name) / "large", total_bytes=_SMALL_BYTES if quick else _LARGE_BYTES)
        small = write_llama(Path(name) / "small", total_bytes=_SMALL_BYTES)
        disk = _Disk(large)
        cluster = stack.enter_context(mm.connect("local", num_gpus=_NUM_GPUS, device_memory=2 * _LARGE_BYTES))
        # Arenas and blocks are new to their process, and should not be new to the machine.
        held = HeldMemory(_HELD_COPIES * large.nbytes)
        stack.callback(held.let_go)
        for number in range(rounds + 1):
            topology = _measured(cluster, Path(name))
            # Another order each time, so that nobody always follows the same neighbour.
            for scenario in random.Random(number).sample(scenarios, len(scenarios)):
                checkpoint = large if scenario.bytes_per_s is None else small
                predicted_s, measured_s = _once(checkpoint, scenario, topology, disk, held)
                if number == 0:  # the pool's memory is touched for the first time, workers import what they need
                    continue
                _say(f"{scenario.name}: predicted {predicted_s:.2f} s, measured {measured_s:.2f} s")
                seconds[scenario.name].append((predicted_s, measured_s))
                errors[scenario.name].append(abs(predicted_s - measured_s) / measured_s)
    return list(_rows(errors, seconds))


def _rows(errors: dict[str, list[float]], seconds: dict[str, list[tuple[float, float]]]) -> Iterator[Measurement]:
    for name, samples in errors.items():
        yield Measurement(name=f"fidelity: {name}: error", unit="ratio", samples=samples)
        yield Measurement(name=f"fidelity: {name}: predicted", unit="s", samples=[pair[0] for pair in seconds[name]])
        yield Measurement(name=f"fidelity: {name}: measured", unit="s", samples=[pair[1] for pair in seconds[name]])
    medians = [statistics.median(samples) for samples in errors.values()]
    yield Measurement(name="fidelity: median error", unit="ratio", samples=medians, target=_MEDIAN_TARGET)
    yield Measurement(name="fidelity: worst error", unit="ratio", samples=[max(medians)], target=_WORST_TARGET)


def _measured(cluster: mm.Cluster, folder: Path) -> Topology:
    """The live topology with this machine's figures."""
    from megamind_ray.actors.measuring import measure_fleet
    from megamind_ray.engine.measure import MeasureRequest
    from megamind_ray.engine.measure_topology import measured_topology

    request = MeasureRequest(folder=folder, seconds=10.0, max_bytes=512 << 20)
    return measured_topology(cluster.topology(), measure_fleet("default", request, load_config(profile=False)))


class _Disk:
    """The disk that a checkpoint lies on, read by nobody else.

    Args:
        checkpoint: What is read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._buffer = FlatBuffer(checkpoint, huge_pages=True)
        self._buffer.touch()

    def bytes_per_s(self) -> float:
        """As fast as the threads of an agent read it, into memory that was used before; once."""
        io = load_config(profile=False).io
        variant = Variant(threads=io.read_threads, piece_bytes=io.extent_bytes, way="direct", huge_pages=True)
        evict(self._checkpoint.files)
        begin_s = time.perf_counter()
        read_flat(self._buffer, variant)
        return self._checkpoint.nbytes / (time.perf_counter() - begin_s)


def _with_disk(topology: Topology, bytes_per_s: float) -> Topology:
    (node,) = topology.nodes
    (disk,) = node.disks
    return replace(topology, nodes=(replace(node, disks=(replace(disk, bytes_per_s=bytes_per_s),)),))


def _once(
    checkpoint: Checkpoint, scenario: Scenario, topology: Topology, disk: _Disk, held: HeldMemory
) -> tuple[float, float]:
    """Predicted and measured seconds of the transfer."""
    config = scenario.config()
    with contextlib.ExitStack() as stack:
        uri = str(checkpoint.folder)
        if scenario.bytes_per_s is None:
            topology = _with_disk(topology, disk.bytes_per_s())
        else:
            rates = Rates(bytes_per_s=scenario.bytes_per_s, latency_s=scenario.latency_s)
            uri = stack.enter_context(RatedServer(checkpoint.folder, rates)).uri
            topology = _behind_a_server(topology, scenario)
        plan = mm.plan(uri, scenario.parallel, topology, keep=scenario.keep, config=config)
        predicted_s = mm.simulate(plan, topology, config=config).seconds["transfer"]
        if scenario.bytes_per_s is None:
            evict(checkpoint.files)
        cluster = stack.enter_context(mm.connect(config=config))  # to the fleet that runs, with these settings
        stack.callback(held.hold)  # when the model is unloaded
        held.let_go()
        model = cluster.load(uri, scenario.parallel, keep=scenario.keep)
        stack.callback(model.unload)
        return predicted_s, model.report.seconds["transfer"]


def _behind_a_server(topology: Topology, scenario: Scenario) -> Topology:
    """The same machine, its checkpoint on the server; loopback is as fast as its threads are."""
    assert scenario.bytes_per_s is not None
    (node,) = topology.nodes
    loopback = Nic(name="lo", bytes_per_s=node.host.network_bytes_per_s * node.host.cores)
    storage = Storage(bytes_per_s=scenario.bytes_per_s, latency_s=scenario.latency_s)
    return replace(topology, nodes=(replace(node, nics=(loopback,)),), storage=storage)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
