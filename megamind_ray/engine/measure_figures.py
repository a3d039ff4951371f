"""Figures of a machine: each the median of a few samples, which stay with it (docs/design/0016)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from megamind_ray.errors import ClusterError
from megamind_ray.io.stop import StopSignal
from megamind_ray.units import format_duration, format_rate

__all__ = ["Clock", "Figure", "Sampler", "Unit"]

Clock = Callable[[], float]
Unit = Literal["bytes/s", "s"]

_MIN_SAMPLES: Final = 3
_MAX_SAMPLES: Final = 7
# Where the largest and the smallest lie so close together (as a share of the median), more would tell nothing new.
_CALM: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Something that was measured.

    Attributes:
        name: What, in words.
        unit: Of all samples.
        samples: In the order in which they were taken; three or more.
    """

    name: str
    unit: Unit
    samples: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median, to three digits: more are noise."""
        return float(f"{median(self.samples):.3g}")

    @property
    def scatter(self) -> float:
        """How far the largest and the smallest sample lie apart, as a share of the median."""
        return _scatter(self.samples)

    def __str__(self) -> str:
        low, high = (_shown(sample, self.unit) for sample in (min(self.samples), max(self.samples)))
        return f"{self.name}: {_shown(self.value, self.unit)} ({len(self.samples)} samples, {low} to {high})"


def _shown(value: float, unit: Unit) -> str:
    if unit == "bytes/s":
        return format_rate(value)
    return format_duration(value) if value >= 1e-3 else f"{value * 1e6:.3g} us"


def _scatter(samples: Sequence[float]) -> float:
    return (max(samples) - min(samples)) / median(samples)


class Sampler:
    """Takes figures until its time is over, and keeps what it took.

    Args:
        deadline_s: When the time is over, as the clock counts. A figure that was begun is taken to its end.
        num_planned: Figures that are to come: one that scatters takes more samples only in its part of the time.
        clock: Monotonic.
        stop: Ends everything early.
        on_figure: Told the name of each figure when it is begun.

    Attributes:
        figures: All that were taken.
        notes: What was not, and why.
    """

    def __init__(
        self,
        *,
        deadline_s: float,
        num_planned: int = 1,
        clock: Clock = time.monotonic,
        stop: StopSignal | None = None,
        on_figure: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self._deadline_s = deadline_s
        self._num_planned = num_planned
        self._clock = clock
        self._stop = stop
        self._on_figure = on_figure
        self.figures: list[Figure] = []
        self.notes: list[str] = []

    @property
    def left_s(self) -> float:
        """How much time is left."""
        return max(0.0, self._deadline_s - self._clock())

    def take(self, name: str, unit: Unit, sample: Callable[[], float]) -> float | None:
        """Samples a figure: three times, and up to seven where it scatters and there is time.

        Args:
            name: What, in words.
            unit: Of what ``sample`` gives.
            sample: Measures once; more than 0.

        Returns:
            Its value; None where the time was over before it was begun.

        Raises:
            ClusterError: It was stopped.
        """
        if not self.left_s:
            self.notes.append(f"{name}: not measured for want of time")
            return None
        self._on_figure(name)
        part_s = self.left_s / max(1, self._num_planned - len(self.figures))
        until_s = self._clock() + part_s
        samples: list[float] = []
        while self._needs_more(samples, until_s):
            self.raise_if_stopped()
            samples.append(sample())
        figure = Figure(name=name, unit=unit, samples=tuple(samples))
        self.figures.append(figure)
        return figure.value

    def raise_if_stopped(self) -> None:
        """Ends the measuring where somebody asked for it.

        Raises:
            ClusterError: Somebody did.
        """
        if self._stop is not None and self._stop.is_set():
            raise ClusterError("measuring was stopped before all was done")

    def _needs_more(self, samples: Sequence[float], until_s: float) -> bool:
        if len(samples) < _MIN_SAMPLES:
            return True
        return len(samples) < _MAX_SAMPLES and _scatter(samples) > _CALM and self._clock() < until_s
