"""Measuring a machine for its topology file: links one by one, never whole loads (docs/design/0016)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from megamind_ray.core.topology import Disk, Host, Nic
from megamind_ray.device.memory import usable_cores
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.measure_device import measure_devices
from megamind_ray.engine.measure_disk import measure_disk
from megamind_ray.engine.measure_figures import Clock, Figure, Sampler
from megamind_ray.engine.measure_memory import MemoryMeter
from megamind_ray.engine.measure_network import loopback_rate, nominal_nics
from megamind_ray.engine.tune_sample import MIN_SAMPLE_BYTES
from megamind_ray.errors import RequestError
from megamind_ray.io.stop import StopSignal
from megamind_ray.units import GIB, format_bytes

__all__ = ["MeasureRequest", "NodeMeasurement", "measure_node"]

_NUM_FIGURES: Final = 10  # without those of GPUs
_BUSY_SCATTER: Final = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest:
    """What to measure, and how long.

    Attributes:
        folder: On the disk that is measured; None: no disk is.
        seconds: For everything together. A figure that was begun is taken to its end.
        max_bytes: Of the temporary file that is read.
    """

    folder: Path | None = None
    seconds: float = 20.0
    max_bytes: int = GIB

    def __post_init__(self) -> None:
        if not 1 <= self.seconds <= 3600:
            raise RequestError(f"--seconds {self.seconds:g}: take 1 second to an hour")
        if self.max_bytes < MIN_SAMPLE_BYTES:
            raise RequestError(
                f"--bytes {format_bytes(self.max_bytes)}: too little to measure a disk with, take "
                f"{format_bytes(MIN_SAMPLE_BYTES)} or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasurement:
    """What was measured on one machine.

    Attributes:
        hostname: The machine.
        date: When, ISO 8601 in UTC.
        host: Its processors and memory; what was not measured has its default.
        disks: The disk behind the folder, if one was named.
        nics: Its network interfaces, with the speed that they tell.
        fill_bytes_per_s: All threads together into fresh memory: what an arena in host memory takes.
        device_bytes_per_s: (CUDA index, host to device) of the GPUs that were measured.
        figures: All, with their samples.
        notes: What was not measured, and what a reader should know.
    """

    hostname: str
    date: str
    host: Host
    disks: tuple[Disk, ...] = ()
    nics: tuple[Nic, ...] = ()
    fill_bytes_per_s: float | None = None
    device_bytes_per_s: tuple[tuple[int, float], ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()


def measure_node(
    request: MeasureRequest,
    *,
    devices: Iterable[int] = (),
    put: Callable[[Bytes], object] | None = None,
    stop: StopSignal | None = None,
    on_figure: Callable[[str], None] = lambda _name: None,
    clock: Clock = time.monotonic,
) -> NodeMeasurement:
    """Measures the machine that it runs on.

    Args:
        request: What, and how long.
        devices: GPUs, as CUDA counts them.
        put: Puts bytes into the node's object store, where there is one; what it returns keeps them there.
        stop: Ends it early, with a ``ClusterError``.
        on_figure: Told what is measured now.
        clock: Monotonic.

    Raises:
        RequestError: The folder cannot be written to.
        CapacityError: The temporary file does not fit there.
        ClusterError: It was stopped.
    """
    gpus = tuple(devices)
    sampler = Sampler(
        deadline_s=clock() + request.seconds,
        num_planned=_NUM_FIGURES + len(gpus),
        clock=clock,
        stop=stop,
        on_figure=on_figure,
    )
    date = datetime.now(UTC).isoformat(timespec="seconds")
    # The disk first: it is what most loads wait for, and a folder that is not there is told at once.
    disk = None
    if request.folder is None:
        sampler.notes.append("no disk was measured; name the folder that models are in with --dir")
    else:
        disk = measure_disk(request.folder, sampler, max_bytes=request.max_bytes, clock=clock)
    host, fill = _measure_host(sampler, put)
    rates = measure_devices(gpus, sampler)
    sampler.notes += _busy_note(sampler.figures)
    nics, silent = nominal_nics()
    return NodeMeasurement(
        hostname=socket.gethostname(),
        date=date,
        host=host,
        disks=() if disk is None else (disk,),
        nics=nics,
        fill_bytes_per_s=fill,
        device_bytes_per_s=tuple(rates.items()),
        figures=tuple(sampler.figures),
        notes=(*sampler.notes, *silent),
    )


def _measure_host(sampler: Sampler, put: Callable[[Bytes], object] | None) -> tuple[Host, float | None]:
    """Processors and memory, and the rate at which all threads fill fresh memory."""
    cores, default = usable_cores(), Host()
    sampler.raise_if_stopped()
    with MemoryMeter(cores) as meter:
        copy = sampler.take("one thread copies", "bytes/s", meter.copy)
        touch = sampler.take("one thread copies to fresh memory", "bytes/s", meter.touch)
        checksum = sampler.take("one thread sums", "bytes/s", meter.checksum)
        memory = sampler.take(f"{cores} threads read and write", "bytes/s", meter.memory)
        fill = sampler.take(f"{cores} threads fill fresh memory", "bytes/s", meter.fill)
        run = sampler.take("a run of a strided copy", "s", meter.run)
        put_s = None
        if put is None:
            sampler.notes.append("put, call, take: not measured without a cluster, defaults")
        else:
            put_s = sampler.take("a put, beside its bytes", "s", lambda: meter.put(put))
    network = _measure_network(sampler)
    host = Host(
        cores=cores,
        memory_bytes_per_s=memory or default.memory_bytes_per_s,
        copy_bytes_per_s=copy or default.copy_bytes_per_s,
        touch_bytes_per_s=touch or default.touch_bytes_per_s,
        checksum_bytes_per_s=checksum or default.checksum_bytes_per_s,
        network_bytes_per_s=network or default.network_bytes_per_s,
        run_s=run or default.run_s,
        put_s=put_s or default.put_s,
        call_s=default.call_s,
        take_s=default.take_s,
    )
    return host, fill


def _measure_network(sampler: Sampler) -> float | None:
    try:
        return sampler.take("one thread over TCP, loopback", "bytes/s", loopback_rate)
    except OSError as error:
        sampler.notes.append(f"one thread over TCP: not measured ({error}), default")
        return None


def _busy_note(figures: Sequence[Figure]) -> list[str]:
    """Says where others were at work, too, while it was measured."""
    wide = [figure.name for figure in figures if figure.scatter > _BUSY_SCATTER]
    if not wide:
        return []
    share = f"{len(wide)} of {len(figures)} figures"
    return [
        f"a busy machine: samples of {share} lie more than {_BUSY_SCATTER:.0%} of their median apart; measure again"
    ]
