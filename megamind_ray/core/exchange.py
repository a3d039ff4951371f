"""How much agents, workers and the planner hand over at a time. The actors and the simulator go by the same figures."""

from __future__ import annotations

from typing import Final

__all__ = ["PLANNER_LOOK_S", "RANK_BATCH", "RELAY_BATCH", "RELAY_FETCHES", "RELAY_SHARE", "ROOM_IN_POOL"]

RANK_BATCH: Final = 8
"""Blocks that a rank takes per exchange: a call costs about 2 ms, a block of 8 MiB about as much."""

RELAY_BATCH: Final = 1
"""Blocks that a node takes per exchange from another one: a call costs little beside their bytes."""

RELAY_FETCHES: Final = 2
"""Exchanges with one other node that a node has under way, each with its blocks: one's bytes are on the wire while
another's are put. More share the wire, and a block that comes more slowly is handed on later."""

RELAY_SHARE: Final = 0.5
"""Part of a pool's credit that only blocks of other nodes may take, where there are other nodes: two nodes full of
blocks for each other would wait for ever otherwise."""

ROOM_IN_POOL: Final = 4
"""So many of the longest extents a pool has room for, unless it is smaller than that many chunks: in the middle of a
line a quarter of its credit is for blocks from each side (``core.line.credit_limits``)."""

PLANNER_LOOK_S: Final = 0.25
"""How often the planner looks for failures; progress itself does not wait for it."""
