"""How far a load is, for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Phase", "Progress", "RankProgress"]

Phase = Literal["queued", "manifest", "workers", "plan", "transfer", "finish"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """Bytes that arrived in a rank's arena, of those it needs."""

    rank: int
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A snapshot; ``bytes_*`` are sums over ranks, 0 before the plan is made."""

    phase: Phase
    bytes_done: int = 0
    bytes_total: int = 0
    ranks: tuple[RankProgress, ...] = ()
