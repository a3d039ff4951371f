"""Ray's own counters of its object stores. Private calls of Ray: this is their one place."""

from __future__ import annotations

from dataclasses import dataclass

from ray._private.internal_api import get_memory_info_reply, get_state_from_address

__all__ = ["StoreStats", "store_stats"]

_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """All nodes of a cluster together.

    Attributes:
        capacity_bytes: Size of the object stores.
        used_bytes: In use now.
        spilled_bytes: Ever written to disk for want of room.
        fallback_bytes: Allocated beside the stores now, for want of room.
    """

    capacity_bytes: int
    used_bytes: int
    spilled_bytes: int
    fallback_bytes: int


def store_stats(address: str) -> StoreStats:
    """Asks the raylets, through the cluster at ``address`` (``HOST:PORT``)."""
    reply = get_memory_info_reply(get_state_from_address(address), timeout_seconds=_TIMEOUT_S)
    stats = reply.store_stats
    return StoreStats(
        capacity_bytes=stats.object_store_bytes_avail,
        used_bytes=stats.object_store_bytes_used,
        spilled_bytes=stats.spilled_bytes_total,
        fallback_bytes=stats.object_store_bytes_fallback,
    )
