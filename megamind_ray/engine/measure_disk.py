"""How fast the disk behind a folder is: large direct reads of a temporary file by several threads, and small ones."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from megamind_ray.core.topology import Disk
from megamind_ray.device.arena import host_buffer
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.measure_figures import Clock, Sampler
from megamind_ray.engine.team import run_team
from megamind_ray.engine.tune_sample import temporary_checkpoint
from megamind_ray.engine.tune_stale import remove_stale
from megamind_ray.io.local_source import DIRECT_ALIGNMENT_BYTES, LocalSource
from megamind_ray.io.mounts import mount_of
from megamind_ray.units import MIB

__all__ = ["DiskMeter", "measure_disk"]

_READ_BYTES: Final = 8 * MIB
_NUM_THREADS: Final = 16
_SAMPLE_S: Final = 0.4
_SMALL_READS: Final = 32
# Of the time that is left.
_WRITE_SHARE: Final = 0.3
_IN_MEMORY: Final = ("tmpfs", "ramfs")


class DiskMeter:
    """Reads a file past the page cache, and says how fast.

    Args:
        path: A file of 8 MiB or more.
        num_threads: How many read at a time.
        clock: Monotonic.
        sample_s: How long reads are begun for one sample of the rate.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_threads: int = _NUM_THREADS,
        clock: Clock = time.monotonic,
        sample_s: float = _SAMPLE_S,
    ) -> None:
        self._source = LocalSource(path, direct="always")
        self._num_threads = num_threads
        self._clock = clock
        self._sample_s = sample_s
        self._num_places = self._source.size_bytes // _READ_BYTES
        assert self._num_places, self._source.size_bytes
        self._random = random.Random(0)
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(num_threads):
            buffer = host_buffer(_READ_BYTES)
            buffer.fill(0)  # its pages are taken before the time counts
            self._buffers.put(buffer)

    def close(self) -> None:
        """Closes the file."""
        self._source.close()

    def rate(self) -> float:
        """Bytes per second of large reads, as many at a time as there are threads."""
        begin_s = self._clock()
        places: list[int] = []

        def until_over() -> Iterator[int]:
            while not places or self._clock() < begin_s + self._sample_s:
                places.append(len(places) % self._num_places)
                yield places[-1]

        run_team(until_over(), self._read_place, num_threads=self._num_threads, name="measure-disk")
        return len(places) * _READ_BYTES / max(1e-9, self._clock() - begin_s)

    def latency(self) -> float:
        """Seconds of one small read, alone; the mean of some, from all over the file."""
        buffer = self._buffers.get()
        try:
            view = buffer.data[:DIRECT_ALIGNMENT_BYTES]
            begin_s = self._clock()
            for _ in range(_SMALL_READS):
                place = self._random.randrange(self._num_places * _READ_BYTES // DIRECT_ALIGNMENT_BYTES)
                self._source.read_into(place * DIRECT_ALIGNMENT_BYTES, view, past_cache=True)
            return max(1e-9, (self._clock() - begin_s) / _SMALL_READS)
        finally:
            self._buffers.put(buffer)

    def _read_place(self, place: int) -> None:
        buffer = self._buffers.get()
        try:
            self._source.read_into(place * _READ_BYTES, buffer.data, past_cache=True)
        finally:
            self._buffers.put(buffer)


def measure_disk(folder: Path, sampler: Sampler, *, max_bytes: int, clock: Clock = time.monotonic) -> Disk | None:
    """Measures the disk behind a folder with a temporary file there, which is gone at the end, whatever the end is.

    Args:
        folder: Where the file is written.
        sampler: Takes the figures; its notes say what a reader should know of them.
        max_bytes: Size of the file; less where the disk is slow.
        clock: Monotonic.

    Returns:
        The disk; None where there was no time.

    Raises:
        RequestError: The folder cannot be written to.
        CapacityError: The file does not fit.
        ClusterError: It was stopped.
    """
    if not sampler.left_s:
        sampler.notes.append(f"disk of {folder}: not measured for want of time")
        return None
    sampler.notes += remove_stale(folder)

    def watch(_written: int) -> None:
        sampler.raise_if_stopped()

    deadline_s = clock() + _WRITE_SHARE * sampler.left_s
    with temporary_checkpoint(folder, max_bytes, deadline_s=deadline_s, clock=clock, on_bytes=watch) as path:
        mount = mount_of(path)
        name = os.path.basename(mount.source) if mount else ""  # noqa: PTH119 - a source need not be a path
        name = name or str(folder)
        with _metered(path, clock) as meter:
            rate = sampler.take(f"disk {name}, large reads", "bytes/s", meter.rate)
            latency = sampler.take(f"disk {name}, a small read", "s", meter.latency)
        sampler.notes += _remarks(path, name, mount.kind if mount else "")
    if rate is None:
        return None
    nominal = Disk(name=name, bytes_per_s=rate)
    return nominal if latency is None else Disk(name=name, bytes_per_s=rate, latency_s=latency)


@contextmanager
def _metered(path: Path, clock: Clock) -> Iterator[DiskMeter]:
    meter = DiskMeter(path, clock=clock)
    try:
        yield meter
    finally:
        meter.close()


def _remarks(path: Path, name: str, kind: str) -> list[str]:
    if kind in _IN_MEMORY:
        return [f"disk {name}: {kind} is memory, no disk; name a folder on one with --dir"]
    if not _opens_direct(path):
        return [f"disk {name}: {kind or 'its file system'} knows no direct reads; these passed the page cache"]
    return []


def _opens_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
    except OSError:
        return False
    return True
