"""A load that a client waits for, from the queue to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, perf_counter, time
from typing import Final

from megamind_ray.actors.load_driver import LoadDriver
from megamind_ray.core.progress import Phase
from megamind_ray.core.recorder import NO_RECORD, Recorder, RecordSettings
from megamind_ray.core.recording import RawRecord
from megamind_ray.core.timeline import SpanKind
from megamind_ray.core.tracks import PLANNER_TRACK
from megamind_ray.errors import ClusterError

__all__ = ["Ticket"]

# In all other phases the planner sees to it that others work, and waits for them.
_KINDS: Final[Mapping[str, SpanKind]] = {"manifest": "manifest", "plan": "plan"}


class Ticket:
    """Where a load stands.

    Attributes:
        phase: What is done now.
        seconds: What each phase took.
        driver: Moves the bytes, once there is a plan.
        cancelled: Why the client gave up, if it did.
        record: How the load is recorded, if it is.
    """

    def __init__(self) -> None:
        self.phase: Phase = "queued"
        self.seconds: dict[str, float] = {}
        self.driver: LoadDriver | None = None
        self.cancelled: str | None = None
        self.record: RecordSettings | None = None
        self._recorder: Recorder = NO_RECORD

    def start_recording(self) -> None:
        """Records the load from now on: this is its start."""
        self.record = RecordSettings(started_at_s=time())
        self._recorder = self.record.recorder(wall=time, steps=perf_counter)

    def resume_recording(self, settings: RecordSettings) -> None:
        """Goes on recording a load that an earlier planner began; what that one recorded itself is lost."""
        self.record = settings
        self._recorder = settings.recorder(wall=time, steps=perf_counter)

    def recorded(self) -> RawRecord | None:
        """What was recorded, when the load is over; None where it was not to be."""
        if self.record is None:
            return None
        phases = self._recorder.page()
        return RawRecord(parts=(phases,)) if self.driver is None else self.driver.record.record(phases)

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """Measures a phase, and stops before it if the client gave up."""
        self.raise_if_cancelled()
        self.phase = phase
        begin, begin_s = monotonic(), self._recorder.now()
        try:
            yield
        finally:
            self.seconds[phase] = monotonic() - begin
            self._recorder.span(PLANNER_TRACK, _KINDS.get(phase, "wait"), begin_s, label=phase)

    def raise_if_cancelled(self) -> None:
        if self.cancelled is not None:
            raise ClusterError(f"the load was cancelled: {self.cancelled}")
