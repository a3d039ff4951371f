"""Finding the settings with which this machine reads fastest (docs/design/0014)."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from megamind_ray.config import Config
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.profile import Measured, Profile
from megamind_ray.device.memory import host_memory
from megamind_ray.engine.tune_profile import mount_of, profile_of
from megamind_ray.engine.tune_reads import COLD, ReadMeter, default_values, read_knobs
from megamind_ray.engine.tune_sample import MIN_SAMPLE_BYTES, take_sample, temporary_checkpoint
from megamind_ray.engine.tune_search import Clock, Comparison, Pair, Search, Trial, Values, compare, search
from megamind_ray.errors import RequestError
from megamind_ray.io import open_manifest
from megamind_ray.io.location import parse_location
from megamind_ray.units import GIB, MIB, format_bytes, format_duration

__all__ = ["TuneRequest", "TuneResult", "shown_value", "tune"]

# Shares of the time: writing a temporary checkpoint, then the search; the rest compares its result with the defaults.
_WRITE_SHARE: Final = 0.15
_SEARCH_SHARE: Final = 0.75
# Reads that a search takes in all, when it comes to the end of its list; the sample is sized for them.
_PLANNED_READS: Final = 120
_FIRST_SAMPLE_BYTES: Final = 64 * MIB
_MEMORY_SHARE: Final = 0.25

OnProgress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What to measure, and how long.

    Attributes:
        uri: A checkpoint on this machine; None: a temporary one.
        folder: Where the temporary one is written.
        seconds: For everything together. What has begun is ended, and the comparison has a few pairs in any case.
        max_bytes: Of one read; also the memory it takes, and the size of the temporary checkpoint.
        config: All settings that are not measured.
    """

    uri: str | None = None
    folder: Path = Path()
    seconds: float = 60.0
    max_bytes: int = 2 * GIB
    config: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        if not 1 <= self.seconds <= 86400:
            raise RequestError(f"--seconds {self.seconds:g}: take 1 second to a day")
        if self.max_bytes < MIN_SAMPLE_BYTES:
            raise RequestError(
                f"--bytes {format_bytes(self.max_bytes)}: too little to measure with, take "
                f"{format_bytes(MIN_SAMPLE_BYTES)} or more"
            )
        if self.uri is not None and not parse_location(self.uri).is_local:
            raise RequestError(
                f"{self.uri}: only files of this machine are measured; give a path, or none for a temporary checkpoint"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What was measured and found.

    Attributes:
        measured: Where.
        sample_bytes: Of each read.
        conditions: Cold, warm or both.
        seconds: In all.
        defaults: By setting.
        found: What the search ended with.
        comparison: Of these with the defaults, in fresh rounds; None where they are the same.
        trials: All candidates.
        notes: What could not be measured, and why.
    """

    measured: Measured
    sample_bytes: int
    conditions: tuple[str, ...]
    seconds: float
    defaults: Values
    found: Values
    comparison: Comparison | None
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]

    @property
    def tuned(self) -> Values:
        """What is to be used: what was found if it held, else the defaults."""
        return self.found if self.comparison is not None and self.comparison.better else self.defaults

    def changes(self) -> dict[str, object]:
        """The settings that differ from the defaults."""
        return {name: value for name, value in self.tuned.items() if value != self.defaults[name]}

    def profile(self) -> Profile:
        """What later runs load."""
        return profile_of(self.tuned, self.defaults, self.trials, self.measured)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; every sample is in it, in seconds: ``[old, new]``."""
        comparison = self.comparison
        return {
            "schema": 1,
            "measured": dataclasses.asdict(self.measured),
            "sample_bytes": self.sample_bytes,
            "conditions": list(self.conditions),
            "seconds": self.seconds,
            "defaults": dict(self.defaults),
            "found": dict(self.found),
            "tuned": dict(self.tuned),
            "changes": self.changes(),
            "trials": [
                {
                    "setting": trial.knob,
                    "value": trial.value,
                    "instead_of": trial.instead_of,
                    "verdict": trial.verdict,
                    "reason": trial.reason,
                    "samples_s": _samples(trial.pairs),
                }
                for trial in self.trials
            ],
            "comparison": None
            if comparison is None
            else {
                "better": comparison.better,
                "reason": comparison.reason,
                "samples_s": _samples(comparison.pairs),
            },
            "notes": list(self.notes),
        }


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
            notes=tuple(self._notes),
        )

    def _meter(self, manifest: Manifest, defaults: Values) -> ReadMeter:
        """A sample as large as the time allows: the larger, the more it is like a load."""
        self._show("finding out how fast it is")
        largest = self._room_bytes(min(self._request.max_bytes, manifest.nbytes))
        meter = ReadMeter(take_sample(manifest, min(largest, _FIRST_SAMPLE_BYTES)), self._request.config)
        condition = meter.conditions()[-1]
        fastest_s = min(meter.measure(defaults, condition) for _ in range(2))
        left_s = max(0.0, self._at(1) - self._clock())
        affordable = int(meter.sample.nbytes / fastest_s * left_s / _PLANNED_READS) // MIB * MIB
        chosen = max(meter.sample.nbytes, min(largest, affordable))
        if chosen > meter.sample.nbytes:
            meter = ReadMeter(take_sample(manifest, chosen), self._request.config)
        return meter

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
        left = sum(trial.verdict == "not tried" for trial in found.trials)
        if left:
            seconds = format_duration(self._request.seconds)
            self._notes.append(f"{left} candidates were not tried in {seconds}; --seconds gives more time")
        return found

    def _measured(self, manifest: Manifest, path: str) -> Measured:
        where = Path(manifest.root) if self._request.uri is not None else self._request.folder.absolute()
        file_system, device = mount_of(Path(parse_location(path).uri))
        return Measured(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            path=str(where),
            file_system=file_system,
            device=device,
        )

    def _room_bytes(self, wanted_bytes: int) -> int:
        """As much of it as leaves others their memory."""
        return max(MIN_SAMPLE_BYTES, min(wanted_bytes, int(host_memory().free_bytes * _MEMORY_SHARE)))

    def _at(self, share: float) -> float:
        return self._begin_s + share * self._request.seconds

    def _show(self, what: str) -> None:
        self._on_progress(min(1.0, (self._clock() - self._begin_s) / self._request.seconds), what)


def shown_value(name: str, value: object) -> str:
    """The value of a setting as people write it."""
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _samples(pairs: Any) -> dict[str, list[list[float]]]:
    some: dict[str, tuple[Pair, ...]] = pairs
    return {condition: [[pair.old_s, pair.new_s] for pair in rounds] for condition, rounds in some.items()}
