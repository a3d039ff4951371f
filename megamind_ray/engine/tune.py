"""Finding the settings with which this machine reads fastest (docs/design/0014)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from megamind_ray.core.location import parse_location
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.profile import Measured
from megamind_ray.device.memory import host_memory
from megamind_ray.engine.tune_device import CopyTuning, tune_copies
from megamind_ray.engine.tune_reads import COLD, ReadMeter, default_values, read_knobs
from megamind_ray.engine.tune_result import TuneRequest, TuneResult, shown_value
from megamind_ray.engine.tune_sample import MIN_SAMPLE_BYTES, take_sample, temporary_checkpoint
from megamind_ray.engine.tune_search import Clock, Search, Trial, Values, compare, search, spread
from megamind_ray.engine.tune_stale import remove_stale
from megamind_ray.errors import MegamindError
from megamind_ray.io import open_manifest
from megamind_ray.io.mounts import mount_of
from megamind_ray.units import MIB, format_bytes, format_duration

__all__ = ["tune"]

# What is done when such a share of the time has gone: writing a temporary checkpoint, copies to a GPU if there is one,
# the search. The rest compares its result with the defaults.
_WRITE_SHARE: Final = 0.15
_COPIES_SHARE: Final = 0.25
_SEARCH_SHARE: Final = 0.75
# Reads that a search takes in all, when it comes to the end of its list; the sample is sized for them.
_PLANNED_READS: Final = 120
_FIRST_SAMPLE_BYTES: Final = 64 * MIB
_MEMORY_SHARE: Final = 0.25
_BUSY_SPREAD: Final = 0.1

OnProgress = Callable[[float, str], None]


def tune(request: TuneRequest, *, on_progress: OnProgress = lambda _done, _what: None) -> TuneResult:
    """Measures, and decides.

    Args:
        request: What to measure.
        on_progress: Told the share of the time that has gone, and what is measured now.

    Raises:
        RequestError: No checkpoint, one that is too small, or a folder that cannot be written to.
        CapacityError: The temporary checkpoint does not fit on its disk, or a sample not in memory.
        SourceError, IntegrityError: The checkpoint cannot be read with the defaults.
    """
    run = _Run(request, time.monotonic, on_progress)
    with run.checkpoint() as path:
        manifest = open_manifest(path, io=request.config.io, retry=request.config.retry)
        return run.measure(manifest, path)


class _Run:
    """One tuning: its clock, and what it has to say at the end."""

    def __init__(self, request: TuneRequest, clock: Clock, on_progress: OnProgress) -> None:
        self._request = request
        self._clock = clock
        self._on_progress = on_progress
        self._begin_s = clock()
        self._notes: list[str] = []

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[str]:
        """The path of what is read."""
        request = self._request
        if request.uri is not None:
            yield request.uri
            return
        self._notes += remove_stale(request.folder)
        with temporary_checkpoint(
            request.folder,
            self._room_bytes(request.max_bytes),
            deadline_s=self._at(_WRITE_SHARE),
            clock=self._clock,
            on_bytes=lambda done: self._show(f"writing a temporary checkpoint ({format_bytes(done)})"),
        ) as path:
            yield str(path)

    def measure(self, manifest: Manifest, path: str) -> TuneResult:
        defaults = default_values()
        copies = self._copies()
        meter = self._meter(manifest, defaults)
        conditions = self._conditions(meter)
        found = self._search(meter, defaults, conditions, has_sidecar=manifest.reference is not None)
        comparison = None
        if found.best != defaults:
            self._show("comparing the result with the defaults")
            comparison = compare(
                defaults, found.best, conditions, meter.measure, deadline_s=self._at(1), clock=self._clock
            )
        return TuneResult(
            measured=self._measured(manifest, path),
            sample_bytes=meter.sample.nbytes,
            conditions=conditions,
            seconds=self._clock() - self._begin_s,
            defaults=defaults,
            found=found.best,
            comparison=comparison,
            trials=found.trials,
            copies=copies,
            notes=tuple(self._notes),
        )

    def _copies(self) -> CopyTuning | None:
        """Of a GPU that others use, the disk is measured all the same."""
        try:
            copies = tune_copies(
                deadline_s=self._at(_COPIES_SHARE),
                clock=self._clock,
                on_trial=lambda knob, value: self._show(f"copies to the GPU: {knob.name} = {value}"),
            )
        except MegamindError as error:
            self._notes.append(f"copies to the GPU were not measured: {error.message}")
            return None
        self._notes.append(_copies_note(copies))
        return copies

    def _meter(self, manifest: Manifest, defaults: Values) -> ReadMeter:
        """A sample as large as the time allows: the larger, the more it is like a load."""
        self._show("finding out how fast it is")
        rooms = self._rooms(manifest)
        largest = max(MIN_SAMPLE_BYTES, min(rooms.values()))
        first = ReadMeter(take_sample(manifest, min(largest, _FIRST_SAMPLE_BYTES)), self._request.config)
        condition = first.conditions()[-1]
        fastest_s = min(first.measure(defaults, condition) for _ in range(2))
        left_s = max(0.0, self._at(1) - self._clock())
        affordable = int(first.sample.nbytes / fastest_s * left_s / _PLANNED_READS) // MIB * MIB
        rooms["--seconds"] = min(affordable, rooms.get("--seconds", affordable))
        chosen = max(first.sample.nbytes, min(largest, affordable))
        sample = first.sample if chosen == first.sample.nbytes else take_sample(manifest, chosen)
        return ReadMeter(sample, self._request.config, min(rooms, key=lambda name: rooms[name]))

    def _rooms(self, manifest: Manifest) -> dict[str, int]:
        """Bytes of a sample that each limit but the time allows; the first of equal ones is named."""
        request = self._request
        rooms = {"--bytes": request.max_bytes, "memory": self._room_bytes(request.max_bytes)}
        # A temporary checkpoint is as large as the others say, unless the time for writing it was over.
        rooms["the checkpoint" if request.uri is not None else "--seconds"] = manifest.nbytes
        return rooms

    def _conditions(self, meter: ReadMeter) -> tuple[str, ...]:
        conditions = meter.conditions()
        if COLD not in conditions:
            self._notes.append(
                "only warm reads were measured: this file system keeps its pages in memory, or does not tell"
            )
        elif len(conditions) == 1:
            self._notes.append("only cold reads were measured: the page cache has no room for the sample")
        return conditions

    def _search(self, meter: ReadMeter, defaults: Values, conditions: tuple[str, ...], *, has_sidecar: bool) -> Search:
        if has_sidecar:
            self._notes.append("io.chunk_bytes was not measured: recorded checksums bring a chunk size of their own")
        found = search(
            read_knobs(has_sidecar=has_sidecar),
            defaults,
            conditions,
            meter.measure,
            deadline_s=self._at(_SEARCH_SHARE),
            clock=self._clock,
            on_trial=lambda knob, value: self._show(f"{knob.name} = {shown_value(knob.name, value)}"),
        )
        if not all(trial.is_measured for trial in found.trials):
            self._notes.append(_unmeasured_note(found.trials, meter, self._request.seconds))
        for condition in conditions:
            noise = spread(found.trials, condition)
            if noise > _BUSY_SPREAD:
                self._notes.append(
                    f"a busy machine: {condition} reads with the same settings took {noise:.0%} more or less, so small "
                    "gains cannot be told; measure again when it is idle"
                )
        return found

    def _measured(self, manifest: Manifest, path: str) -> Measured:
        where = Path(manifest.root) if self._request.uri is not None else self._request.folder.absolute()
        mount = mount_of(Path(parse_location(path).uri))
        return Measured(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            path=str(where),
            file_system=mount.kind if mount else "",
            device=mount.source if mount else "",
        )

    def _room_bytes(self, wanted_bytes: int) -> int:
        """As much of it as leaves others their memory."""
        return max(MIN_SAMPLE_BYTES, min(wanted_bytes, int(host_memory().free_bytes * _MEMORY_SHARE)))

    def _at(self, share: float) -> float:
        return self._begin_s + share * self._request.seconds

    def _show(self, what: str) -> None:
        self._on_progress(min(1.0, (self._clock() - self._begin_s) / self._request.seconds), what)


def _unmeasured_note(trials: Sequence[Trial], meter: ReadMeter, seconds: float) -> str:
    """How many candidates nothing is known of, and which limits to raise."""
    late = sum(trial.verdict in ("not tried", "undecided") for trial in trials)
    skipped = sum(trial.verdict == "skipped" for trial in trials)
    reasons = []
    if late:
        reasons.append(f"{late} for want of time, --seconds was {format_duration(seconds)}")
    if skipped:
        reasons.append(
            f"{skipped} were skipped, each says why; reads were of {format_bytes(meter.sample.nbytes)}, and what kept "
            f"them from being larger was {meter.limit}"
        )
    return f"{late + skipped} of {len(trials)} candidates were not measured: {'; '.join(reasons)}"


def _copies_note(copies: CopyTuning | None) -> str:
    if copies is None:
        return "no GPU here: copies to one were not measured"
    best = copies.found.best
    return (
        f"copies to {copies.device} are fastest with {best['streams']} streams and copies of "
        f"{shown_value('copy_bytes', best['copy_bytes'])}; the engine has no setting for that, the profile neither"
    )
