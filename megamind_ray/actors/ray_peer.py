"""Another node's agent behind its actor handle, as an agent that takes blocks from it sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from megamind_ray.actors.boundary import wait_for
from megamind_ray.actors.messages import Consumer, Delivery
from megamind_ray.config import Config
from megamind_ray.core.ids import Generation, LoadId, NodeId

__all__ = ["RayPeer"]


class RayPeer:
    """As ``relays.Peer``."""

    def __init__(self, node: NodeId, handle: Any, config: Config) -> None:
        self._node = node
        self._handle = handle
        self._call_s = config.deadlines.call_s
        self._is_given_up = threading.Event()

    def give_up(self) -> None:
        self._is_given_up.set()

    def exchange(
        self, load: LoadId, consumer: Consumer, acked: Sequence[int], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        answer: tuple[Delivery, ...] | None = wait_for(
            self._handle.exchange.remote(load, consumer, Generation(0), tuple(acked), (), limit, timeout_s),
            timeout_s=timeout_s + self._call_s,
            what=f"taking blocks from node {self._node}",
            unless=self._is_given_up.is_set,
        )
        return answer
