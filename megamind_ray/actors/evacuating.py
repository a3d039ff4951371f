"""Carries out an evacuation: nodes that stay copy blocks from the one that leaves, a few of them at a time (0028)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Final

import ray

from megamind_ray.actors.boundary import ActorLostError, settle
from megamind_ray.actors.kept_blocks import CopyResult
from megamind_ray.config import DeadlineConfig
from megamind_ray.core.evacuation import Evacuation
from megamind_ray.core.ids import LoadId, NodeId
from megamind_ray.core.report import Kept

__all__ = ["carry_out"]

# A slow link is shared by what is asked for at a time, and each block has a deadline.
_AT_A_TIME: Final = 4
_BATCH_BYTES: Final = 32 << 20
_LOOK_S: Final = 0.25
_ATTEMPTS: Final = 3


def carry_out(
    evacuation: Evacuation,
    source: Any,
    agents: Mapping[NodeId, Any],
    deadlines: DeadlineConfig,
    *,
    look: Callable[[], None],
    on_kept: Callable[[NodeId, LoadId, Kept], None],
    on_lost: Callable[[NodeId], None],
) -> None:
    """Copies all that has a place to go to. What is lost or homeless in the end the evacuation says; nothing is let go.

    Args:
        evacuation: Decides.
        source: Agent of the node that leaves.
        agents: Of those that stay.
        deadlines: ``call_s`` is for each block, and each question.
        look: Called several times a second; what it raises ends the copying.
        on_kept: Told how much of a load a node keeps by now.
        on_lost: Told of a node that is gone.
    """
    copying = _Copying(evacuation, source, agents, deadlines, on_kept, on_lost)
    try:
        while not evacuation.is_done:
            look()
            copying.step()
    except BaseException:
        copying.finish()
        raise


class _Copying:
    def __init__(
        self,
        evacuation: Evacuation,
        source: Any,
        agents: Mapping[NodeId, Any],
        deadlines: DeadlineConfig,
        on_kept: Callable[[NodeId, LoadId, Kept], None],
        on_lost: Callable[[NodeId], None],
    ) -> None:
        self._evacuation = evacuation
        self._source, self._agents = source, agents
        self._deadlines = deadlines
        self._on_kept, self._on_lost = on_kept, on_lost
        self._open: dict[Any, tuple[NodeId, float]] = {}
        self._failures: Counter[NodeId] = Counter()

    def step(self) -> None:
        """Begins what may begin, and waits a moment for what is under way."""
        for node in self._evacuation.waiting[: max(0, _AT_A_TIME - len(self._open))]:
            self._begin(node)
        ready, _ = ray.wait(list(self._open), num_returns=1, timeout=_LOOK_S)
        for ref in ready:
            node, _ = self._open.pop(ref)
            (answer,) = settle([ref], timeout_s=self._deadlines.call_s, what=f"copying blocks to node {node}")
            self._take(node, answer)
        now_s = monotonic()
        for ref, (node, until_s) in list(self._open.items()):
            if now_s > until_s:
                del self._open[ref]
                self._lose(node)

    def finish(self) -> None:
        """Waits for what is under way, so that the planner knows of it."""
        what = "ending the copying of blocks"
        answers = settle(list(self._open), timeout_s=self._deadlines.close_s, what=what)
        for (node, _), answer in zip(self._open.values(), answers, strict=True):
            if isinstance(answer, CopyResult):
                self._take(node, answer)

    def _begin(self, node: NodeId) -> None:
        batch = self._evacuation.begin(node, max_bytes=_BATCH_BYTES)
        call_s = self._deadlines.call_s
        ref = self._agents[node].copy_kept.remote([(one.load, one.block) for one in batch], self._source, call_s)
        # Longer than all its own waits.
        self._open[ref] = (node, monotonic() + (len(batch) + 2) * call_s)

    def _take(self, node: NodeId, answer: Any) -> None:
        if isinstance(answer, CopyResult):
            self._evacuation.arrived(node)
            for load, kept in answer.kept.items():
                self._on_kept(node, load, kept)
        elif isinstance(answer, ActorLostError):
            self._lose(node)
        else:
            self._find_out(node)

    def _lose(self, node: NodeId) -> None:
        self._on_lost(node)
        self._evacuation.lose(node)

    def _find_out(self, node: NodeId) -> None:
        """A copy came to nothing though its node answers: the one that leaves is gone, or this one cannot take it."""
        (answer,) = settle(
            [self._source.facts.remote()], timeout_s=self._deadlines.call_s, what="asking the node that leaves"
        )
        if isinstance(answer, Exception):
            self._evacuation.lose_source()
        self._failures[node] += 1
        if self._failures[node] < _ATTEMPTS:
            self._evacuation.failed(node)
        else:
            self._evacuation.close(node)
