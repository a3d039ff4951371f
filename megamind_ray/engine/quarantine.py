"""When a source of chunks has failed so often that another one is asked first."""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["Quarantine", "Tally"]

# Counts are halved when a source has so many times the reads that a verdict needs: what it did long ago fades, and a
# source that dies after a million good reads is noticed within a few dozen.
_MEMORY = 4


@dataclass(slots=True)
class Tally:
    """Recent reads of one source.

    Attributes:
        num_reads: Reads, the failed ones included.
        num_failed: Of those, the ones that gave wrong bytes or an error.
    """

    num_reads: float = 0.0
    num_failed: float = 0.0


class Quarantine:
    """Events in (a read worked, a read failed), a decision out (whether to avoid the source). Thread-safe.

    A source stays in quarantine once it is: who keeps the counts lives as long as one load.

    Args:
        share: From which share of failed reads on.
        min_reads: Reads before that share is looked at.
    """

    def __init__(self, *, share: float, min_reads: int) -> None:
        self._share = share
        self._min_reads = min_reads
        self._lock = threading.Lock()
        self._tallies: dict[str, Tally] = {}
        self._held: set[str] = set()

    def count(self, source: str, *, failed: bool) -> Tally | None:
        """Counts one read.

        Returns:
            What led to it where this very read puts the source in quarantine, else None.
        """
        with self._lock:
            tally = self._tallies.setdefault(source, Tally())
            tally.num_reads += 1
            tally.num_failed += failed
            if (
                source not in self._held
                and tally.num_reads >= self._min_reads
                and tally.num_failed >= self._share * tally.num_reads
            ):
                self._held.add(source)
                return Tally(tally.num_reads, tally.num_failed)
            if tally.num_reads >= _MEMORY * self._min_reads:
                tally.num_reads /= 2
                tally.num_failed /= 2
            return None

    def holds(self, source: str) -> bool:
        """Whether the source is in quarantine."""
        with self._lock:
            return source in self._held
