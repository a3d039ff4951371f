"""A load that a client waits for, from the queue to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from megamind_ray.actors.load_driver import LoadDriver
from megamind_ray.core.progress import Phase
from megamind_ray.errors import ClusterError

__all__ = ["Ticket"]


class Ticket:
    """Where a load stands.

    Attributes:
        phase: What is done now.
        seconds: What each phase took.
        driver: Moves the bytes, once there is a plan.
        cancelled: Why the client gave up, if it did.
    """

    def __init__(self) -> None:
        self.phase: Phase = "queued"
        self.seconds: dict[str, float] = {}
        self.driver: LoadDriver | None = None
        self.cancelled: str | None = None

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """Measures a phase, and stops before it if the client gave up."""
        self.raise_if_cancelled()
        self.phase = phase
        begin = monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = monotonic() - begin

    def raise_if_cancelled(self) -> None:
        if self.cancelled is not None:
            raise ClusterError(f"the load was cancelled: {self.cancelled}")
