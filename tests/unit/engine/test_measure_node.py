"""A machine measured as a whole, and the topology made of it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Disk, Gpu, Host, Nic, Node, Topology
from megamind_ray.engine import measure, measure_topology
from megamind_ray.engine.measure import MeasureRequest, NodeMeasurement, measure_node
from megamind_ray.engine.measure_device import measure_devices
from megamind_ray.engine.measure_figures import Figure, Sampler
from megamind_ray.engine.measure_memory import MemoryMeter
from megamind_ray.engine.measure_topology import (
    machine_gpus,
    machine_topology,
    measured_topology,
    measurement_comments,
)
from megamind_ray.errors import ClusterError, RequestError
from megamind_ray.planning import dump_topology, parse_topology
from megamind_ray.units import GIB, MIB

FOUND = NodeMeasurement(
    hostname="box",
    date="2020-02-20T20:20:20+00:00",
    host=Host(cores=4),
    disks=(Disk(name="nvme0", bytes_per_s=2e9),),
    nics=(Nic(name="eth0", bytes_per_s=1e9),),
    fill_bytes_per_s=4e9,
    device_bytes_per_s=((1, 20e9),),
    figures=(Figure(name="one thread copies", unit="bytes/s", samples=(9e9, 10e9, 11e9)),),
    notes=("put, call, take: not measured without a cluster, defaults",),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures with a few MiB."""
    monkeypatch.setattr(measure, "MemoryMeter", lambda threads: MemoryMeter(threads, num_bytes=4 * MIB))
    monkeypatch.setattr(measure, "loopback_rate", lambda: 3e9)


@pytest.mark.usefixtures("small")
def test_a_machine_is_measured_figure_by_figure(tmp_path: Path) -> None:
    told: list[str] = []

    found = measure_node(
        MeasureRequest(folder=tmp_path, seconds=3600, max_bytes=8 * MIB), put=len, on_figure=told.append
    )

    assert [figure.name for figure in found.figures] == told
    assert len(found.figures) == 10
    assert all(len(figure.samples) >= 3 for figure in found.figures)
    by_name = {figure.name: figure.value for figure in found.figures}
    assert found.host.copy_bytes_per_s == by_name["one thread copies"]
    assert found.host.touch_bytes_per_s == by_name["one thread copies to fresh memory"]
    assert found.host.checksum_bytes_per_s == by_name["one thread sums"]
    assert found.host.memory_bytes_per_s == by_name[f"{found.host.cores} threads read and write"]
    assert found.host.run_s == by_name["a run of a strided copy"]
    assert found.host.put_s == by_name["a put, beside its bytes"]
    assert found.host.network_bytes_per_s == 3e9
    assert found.host.call_s == Host().call_s
    assert found.fill_bytes_per_s == by_name[f"{found.host.cores} threads fill fresh memory"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small")
def test_without_time_a_host_keeps_its_defaults_and_says_so(tmp_path: Path) -> None:
    ticks = iter((0.0, *(1e9,) * 1000))

    found = measure_node(MeasureRequest(folder=tmp_path), clock=lambda: next(ticks))

    assert found.host == Host(cores=found.host.cores)
    assert (found.figures, found.disks, found.fill_bytes_per_s) == ((), (), None)
    assert "one thread copies: not measured for want of time" in found.notes
    assert f"disk of {tmp_path}: not measured for want of time" in found.notes


@pytest.mark.usefixtures("small")
def test_without_a_folder_no_disk_is_measured_and_that_is_told() -> None:
    found = measure_node(MeasureRequest(), clock=lambda: 0.0)

    assert found.disks == ()
    assert "no disk was measured; name the folder that models are in with --dir" in found.notes


@pytest.mark.usefixtures("small")
def test_a_machine_without_loopback_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> float:
        raise OSError("no such interface")

    monkeypatch.setattr(measure, "loopback_rate", fails)

    found = measure_node(MeasureRequest(), clock=lambda: 0.0)

    assert found.host.network_bytes_per_s == Host().network_bytes_per_s
    assert "one thread over TCP: not measured (no such interface), default" in found.notes


@pytest.mark.usefixtures("small")
def test_who_stopped_it_before_it_began_is_obeyed(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()

    with pytest.raises(ClusterError, match="measuring was stopped"):
        measure_node(MeasureRequest(folder=tmp_path), stop=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"seconds": 0.5}, "--seconds 0.5: take 1 second to an hour"),
        ({"seconds": float("nan")}, "--seconds nan: take"),
        ({"max_bytes": MIB}, r"--bytes 1.00 MiB: too little to measure a disk with, take 8.00 MiB or more"),
    ],
)
def test_a_request_that_measures_nothing_is_refused(wrong: Mapping[str, float], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        MeasureRequest(**wrong)  # type: ignore[arg-type]


def test_a_measurement_survives_the_way_from_an_agent() -> None:
    assert pickle.loads(pickle.dumps(FOUND)) == FOUND


class _Copies:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def measure(self, _values: object, _condition: str, /) -> float:
        return self._seconds


def test_gpus_are_measured_one_by_one_and_one_that_fails_is_told() -> None:
    def open_copies(index: int) -> _Copies:
        if index == 1:
            raise RequestError("cuda:1: only 5 bytes are free")
        return _Copies(0.5 + index)

    sampler = Sampler(deadline_s=1.0, clock=lambda: 0.0)
    found = measure_devices([0, 1, 2], sampler, open_copies=open_copies)

    assert found == {0: 1.07e9, 2: 2.15e8}
    assert sampler.notes == ["host to cuda:1: not measured: cuda:1: only 5 bytes are free"]


def test_to_stop_is_no_failure_of_a_gpu() -> None:
    stop = threading.Event()
    stop.set()

    with pytest.raises(ClusterError, match="measuring was stopped"):
        measure_devices([0], Sampler(deadline_s=1.0, clock=lambda: 0.0, stop=stop), open_copies=lambda _: _Copies(1.0))


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_topology, "_num_cuda", lambda: 0)


@pytest.mark.usefixtures("no_gpus")
def test_a_machine_without_gpus_has_logical_ones_that_share_half_of_its_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megamind_ray.device.memory import DeviceMemory

    monkeypatch.setattr(measure_topology, "host_memory", lambda: DeviceMemory(64 * GIB, 48 * GIB))

    assert [gpu.memory_bytes for gpu in machine_gpus()] == [24 * GIB]
    gpus = machine_gpus(3)
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert {(gpu.kind, gpu.memory_bytes, gpu.free_bytes) for gpu in gpus} == {("cpu", 8 * GIB, 8 * GIB)}


def test_logical_gpus_beside_real_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_topology, "_num_cuda", lambda: 2)
    monkeypatch.setattr(measure_topology, "device_budget_bytes", lambda _device: GIB)

    with pytest.raises(RequestError, match="--gpus 1: is for machines without GPUs, and this one has 2"):
        machine_gpus(1)
    assert machine_gpus() == tuple(Gpu(index=index, memory_bytes=GIB, free_bytes=GIB) for index in range(2))


def test_a_machine_is_a_topology_that_a_file_holds() -> None:
    topology = machine_topology(FOUND, (Gpu(index=0, memory_bytes=GIB, free_bytes=GIB, kind="cpu"),))

    (node,) = topology.nodes
    assert node.id == "box"
    assert (node.host, node.disks, node.nics) == (FOUND.host, FOUND.disks, FOUND.nics)
    assert node.gpus[0].pcie_bytes_per_s == 4e9
    assert 0 < node.pool_bytes < node.memory_bytes
    assert parse_topology(dump_topology(topology), origin="dump") == topology


def test_what_was_not_measured_keeps_its_figures_and_is_told() -> None:
    gpus = tuple(Gpu(index=index, memory_bytes=GIB, free_bytes=GIB) for index in range(2))
    node = Node(id=NodeId("a"), gpus=gpus, memory_bytes=GIB, pool_bytes=0, disks=(Disk(name="old", bytes_per_s=1e9),))
    before = Topology(nodes=(node, replace(node, id=NodeId("b"))))

    after = measured_topology(before, {NodeId("a"): replace(FOUND, disks=())})

    assert after.nodes[1] == before.nodes[1]
    assert [gpu.pcie_bytes_per_s for gpu in after.nodes[0].gpus] == [25e9, 20e9]
    assert after.nodes[0].disks == node.disks
    assert after.nodes[0].host == FOUND.host
    assert after.source.startswith("measured by megamind topology on box, 2020-02-20T20:20:20+00:00: medians of 3")
    assert after.source.endswith("defaults, not measured: host to device, put, call, take, links")


def test_the_comments_have_every_figure_with_its_scatter_and_every_note() -> None:
    assert list(measurement_comments({NodeId("a"): FOUND})) == [
        "box, 2020-02-20T20:20:20+00:00: medians",
        "  one thread copies: 10.00 GB/s (3 samples, 9.00 GB/s to 11.00 GB/s)",
        "  note: put, call, take: not measured without a cluster, defaults",
    ]


def test_samples_that_lie_far_apart_are_told_as_a_busy_machine() -> None:
    calm = Figure(name="one thread sums", unit="bytes/s", samples=(10e9, 10e9, 12e9))
    wide = Figure(name="one thread copies", unit="bytes/s", samples=(5e9, 10e9, 12e9))

    assert measure._busy_note([calm, calm]) == []
    (note,) = measure._busy_note([calm, wide])
    assert note.startswith("a busy machine: samples of 1 of 2 figures lie more than 30% of their median apart")
