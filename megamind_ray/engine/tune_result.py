"""What ``megamind tune`` is asked for, and what it found."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamind_ray.config import Config
from megamind_ray.core.location import parse_location
from megamind_ray.core.profile import Measured, Profile
from megamind_ray.engine.tune_device import CopyTuning
from megamind_ray.engine.tune_profile import profile_of
from megamind_ray.engine.tune_sample import MIN_SAMPLE_BYTES
from megamind_ray.engine.tune_search import Comparison, Pairs, Trial, Values
from megamind_ray.errors import RequestError
from megamind_ray.units import GIB, format_bytes

__all__ = ["TuneRequest", "TuneResult", "shown_value"]


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
        copies: To a GPU; None where there is none.
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
    copies: CopyTuning | None
    notes: tuple[str, ...]

    @property
    def tuned(self) -> Values:
        """What is to be used: what was found if it held, else the defaults."""
        return self.found if self.comparison is not None and self.comparison.better else self.defaults

    @property
    def num_measured(self) -> int:
        """Candidates of which it is known what they are worth."""
        return sum(trial.is_measured for trial in self.trials)

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
            "num_candidates": len(self.trials),
            "num_measured": self.num_measured,
            "trials": [_trial(trial) for trial in self.trials],
            "comparison": None
            if comparison is None
            else {
                "better": comparison.better,
                "reason": comparison.reason,
                "samples_s": _samples(comparison.pairs),
            },
            "copies": None
            if self.copies is None
            else {
                "device": self.copies.device,
                "best": dict(self.copies.found.best),
                "trials": [_trial(trial) for trial in self.copies.found.trials],
            },
            "notes": list(self.notes),
        }


def shown_value(name: str, value: object) -> str:
    """The value of a setting as people write it."""
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "setting": trial.knob,
        "value": trial.value,
        "instead_of": trial.instead_of,
        "verdict": trial.verdict,
        "reason": trial.reason,
        "samples_s": _samples(trial.pairs),
    }


def _samples(pairs: Pairs) -> dict[str, list[list[float]]]:
    return {condition: [[pair.old_s, pair.new_s] for pair in some] for condition, some in pairs.items()}
