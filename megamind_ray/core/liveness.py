"""Which nodes give no sign of life. Times go in; no clock (docs/design/0026)."""

from __future__ import annotations

from typing import Final

from megamind_ray.core.ids import NodeId

__all__ = ["BEATS_PER_SILENCE", "Liveness"]

BEATS_PER_SILENCE: Final = 8
"""So many heartbeats a node may miss, one after the other."""

_OWN_PAUSE_S: Final = 1.0  # a longer one between two looks was a pause of who looks


class Liveness:
    """When each node last gave a sign of life: a heartbeat, or any answer.

    Answers alone come over connections that wait longer and longer before they try again after a cut. So a node is only
    called silent where heartbeats, which do not, reach the one who listens at all.

    Args:
        silence_s: Without any sign for so long, a node counts as lost.
        now_s: The time.
    """

    def __init__(self, silence_s: float, *, now_s: float) -> None:
        self._silence_s = silence_s
        self._looked_s = now_s
        self._heard_s: dict[NodeId, float] = {}
        self._hears_beats = False

    def expect(self, node: NodeId, now_s: float) -> None:
        """Signs of this node are to come from now on."""
        self._heard_s[node] = now_s

    def forget(self, node: NodeId) -> None:
        """Nothing is expected of it any more."""
        self._heard_s.pop(node, None)

    def answered(self, node: NodeId, now_s: float) -> None:
        """It answered something."""
        if node in self._heard_s:
            self._heard_s[node] = max(self._heard_s[node], now_s)

    def beat(self, node: NodeId, now_s: float) -> None:
        """A heartbeat came in."""
        if node in self._heard_s:
            self._hears_beats = True
            self.answered(node, now_s)

    def look(self, now_s: float) -> dict[NodeId, float]:
        """The nodes that are silent, with the seconds since their last sign.

        Called several times a second. Where it was not, who looks was held up by itself, and heard nobody meanwhile:
        that time does not count.
        """
        pause_s, self._looked_s = now_s - self._looked_s, now_s
        if pause_s > _OWN_PAUSE_S:
            self._heard_s = {node: min(now_s, heard_s + pause_s) for node, heard_s in self._heard_s.items()}
        if not self._hears_beats:
            return {}
        return {node: now_s - heard_s for node, heard_s in self._heard_s.items() if now_s - heard_s > self._silence_s}
