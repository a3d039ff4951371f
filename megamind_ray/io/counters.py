"""How many bytes were asked of storage, counted at the read call itself."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

__all__ = ["ReadCounters", "ReadKind", "ReadTotals"]


class ReadKind(Enum):
    """Why bytes are read.

    ``PAYLOAD`` is the first attempt at a range of weights, ``RETRIED`` every further one, ``HEADER`` all that describes
    weights (headers, indexes, configurations, sidecars).
    """

    PAYLOAD = "payload"
    RETRIED = "retried"
    HEADER = "header"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTotals:
    """The counters at one moment, consistent with each other."""

    payload_bytes: int = 0
    retried_bytes: int = 0
    header_bytes: int = 0
    num_reads: int = 0


class ReadCounters:
    """Counts reads; any thread may call it.

    Args:
        within: Counters of a whole that these are a part of; they count the same reads.
    """

    def __init__(self, within: ReadCounters | None = None) -> None:
        self._within = within
        self._lock = threading.Lock()
        self._num_bytes = dict.fromkeys(ReadKind, 0)
        self._num_reads = 0

    def add(self, kind: ReadKind, num_bytes: int) -> None:
        """Counts one read."""
        with self._lock:
            self._num_bytes[kind] += num_bytes
            self._num_reads += 1
        if self._within is not None:
            self._within.add(kind, num_bytes)

    def totals(self) -> ReadTotals:
        """All counters, taken together."""
        with self._lock:
            return ReadTotals(
                payload_bytes=self._num_bytes[ReadKind.PAYLOAD],
                retried_bytes=self._num_bytes[ReadKind.RETRIED],
                header_bytes=self._num_bytes[ReadKind.HEADER],
                num_reads=self._num_reads,
            )

    @property
    def payload_bytes(self) -> int:
        return self.totals().payload_bytes

    @property
    def retried_bytes(self) -> int:
        return self.totals().retried_bytes

    @property
    def header_bytes(self) -> int:
        return self.totals().header_bytes

    @property
    def num_reads(self) -> int:
        return self.totals().num_reads
