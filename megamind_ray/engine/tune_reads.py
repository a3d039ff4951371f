"""What reading a sample takes with other settings, with the page cache empty of it (cold) or full of it (warm)."""

from __future__ import annotations

import dataclasses
import mmap
import os
from typing import Final, Literal

from megamind_ray.config import Config, IoConfig
from megamind_ray.engine.slice_reads import read_slices
from megamind_ray.engine.tune_sample import Sample
from megamind_ray.engine.tune_search import Knob, Values
from megamind_ray.errors import RequestError
from megamind_ray.io.page_cache import PageCacheProbe
from megamind_ray.units import MIB, format_bytes

__all__ = ["COLD", "WARM", "ReadMeter", "default_values", "io_settings", "read_knobs"]

WARM: Final = "warm"
COLD: Final = "cold"
_CacheState = Literal["warm", "cold", "unknown"]
# Nearest to the default first: where time runs out, it was spent on what is likely.
_KNOBS: Final = (
    Knob("io.direct", ("always", "never", "auto")),
    Knob("io.read_threads", (8, 2, 16, 1, 32, 4)),
    Knob("io.chunk_bytes", tuple(size * MIB for size in (16, 4, 12, 32, 8))),
    Knob("io.extent_bytes", tuple(size * MIB for size in (16, 64, 128, 32))),
)
# Warm reads are short, so whatever else runs spoils more of them; and they are cheap.
_WARM_REPEATS: Final = 3
_PROBES: Final = 64
# The system has a few pages in hand that it drops, or takes, a little later.
_TOLERATED_SHARE: Final = 0.05
# Chunks for each thread in a sample; with fewer, most of the time some threads have nothing to do.
_MIN_CHUNKS_PER_THREAD: Final = 2
# As ``read_slices`` cuts: no extent is longer than a fourth of a thread's share.
_MIN_EXTENTS_PER_THREAD: Final = 4


def read_knobs(*, has_sidecar: bool) -> tuple[Knob, ...]:
    """What is tried. The chunks of a checkpoint with a sidecar are the sidecar's, whatever the configuration says."""
    return tuple(knob for knob in _KNOBS if not (has_sidecar and knob.name == "io.chunk_bytes"))


def default_values() -> dict[str, object]:
    """The defaults of all knobs."""
    defaults = IoConfig()
    return {knob.name: getattr(defaults, knob.name.removeprefix("io.")) for knob in _KNOBS}


def io_settings(values: Values) -> dict[str, object]:
    """Fields of ``IoConfig`` by their names alone."""
    return {name.removeprefix("io."): value for name, value in values.items()}


class ReadMeter:
    """Reads a sample, and says how long it took.

    The first measurements of a sample are not to be used: they take the memory from the system.

    Args:
        sample: What to read.
        config: All settings that are not measured.
        limit: What keeps the sample from being larger.
    """

    def __init__(self, sample: Sample, config: Config, limit: str = "the checkpoint") -> None:
        self.sample = sample
        self.limit = limit
        self._config = config
        self._state: _CacheState = "unknown"

    def conditions(self) -> tuple[str, ...]:
        """In which conditions this sample can be measured here, the cheapest first. Reads the sample once or twice."""
        self._evict()
        can_evict = self._resident_share() <= _TOLERATED_SHARE
        self._fill()
        fits = self._resident_share() >= 1 - _TOLERATED_SHARE
        return tuple(name for name, is_there in ((WARM, fits or not can_evict), (COLD, can_evict)) if is_there)

    def measure(self, values: Values, condition: str) -> float:
        """Seconds of a read; of the fastest of a few where they are warm.

        Raises:
            RequestError: The values contradict each other, or do nothing for a sample of this size.
            SourceError, IntegrityError: It cannot be read.
        """
        config = dataclasses.replace(
            self._config,
            io=dataclasses.replace(self._config.io, **io_settings(values)),  # type: ignore[arg-type]
        )
        self._require_effect(config.io)
        if condition == COLD:
            self._evict()
        elif self._state != WARM:
            self._fill()
        seconds = min(self._read(config) for _ in range(_WARM_REPEATS if condition == WARM else 1))
        self._state = "warm" if condition == WARM else "unknown"
        return seconds

    def _read(self, config: Config) -> float:
        return read_slices(self.sample.manifest, self.sample.slices, self.sample.sink, config).seconds

    def _require_effect(self, io: IoConfig) -> None:
        reference = self.sample.manifest.reference
        chunk_bytes = reference.chunk_bytes if reference else io.chunk_bytes
        defaults, need_bytes = IoConfig(), 0
        if io.read_threads > defaults.read_threads or io.chunk_bytes > defaults.chunk_bytes:
            need_bytes = _MIN_CHUNKS_PER_THREAD * io.read_threads * chunk_bytes
        if io.extent_bytes > defaults.extent_bytes:
            need_bytes = max(need_bytes, _MIN_EXTENTS_PER_THREAD * io.read_threads * io.extent_bytes)
        if need_bytes > self.sample.nbytes:
            raise RequestError(
                f"shows only in reads of {format_bytes(need_bytes)} or more, {self.limit} left room for "
                f"{format_bytes(self.sample.nbytes)}"
            )

    def _evict(self) -> None:
        """Asks the system to drop the sample's pages; it need not, and keeps those of which only a part is named."""
        for path, (begin, end) in self.sample.ranges.items():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                first, last = begin // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
                os.posix_fadvise(fd, first, last - first, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        self._state = "cold"

    def _fill(self) -> None:
        """Reads the sample through the page cache."""
        buffered = dataclasses.replace(self._config, io=dataclasses.replace(self._config.io, direct="never"))
        self._read(buffered)
        self._state = "warm"

    def _resident_share(self) -> float:
        """Share of probed pages that are in memory; 1 where the system does not tell."""
        found = []
        for path, (begin, end) in self.sample.ranges.items():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                probe = PageCacheProbe(fd, os.fstat(fd).st_size)
                step = max(1, (end - begin) // _PROBES)
                found += [probe.is_cached(offset, 1) for offset in range(begin, end, step)]
            finally:
                os.close(fd)
        return sum(found) / len(found)
