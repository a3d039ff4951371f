"""The nursery: starts the other actors of a fleet that lives as long as its driver, and does nothing else (0027)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

__all__ = ["Nursery"]


class Nursery:
    """One per fleet of lifetime ``job``, started by its driver.

    Ray ends an actor with the process that started it. So a planner that ends takes nobody with it if it did not start
    the others, and a driver that ends takes all: it started the nursery, and the nursery everybody else. It holds no
    state that matters, runs no code that could fail, and stands on the driver's node.

    Args:
        lineage: Unique to it; the actors that it starts know it.
        planner: Starts the fleet's planner, or finds it; made by the driver, so its settings are the driver's.
    """

    def __init__(self, lineage: str, planner: Callable[[str], Any]) -> None:
        self._lineage = lineage
        self._planner = planner
        self._handles: list[Any] = []

    def planner(self, dead: Any | None) -> Any:
        """A handle of the fleet's planner, which is started if it does not run.

        Args:
            dead: The handle of one that was lost: this process would find it under the planner's name.
        """
        if dead is not None:
            ray.kill(dead, no_restart=True)
        handle = self._planner(self._lineage)
        self._handles.append(handle)
        return handle

    def start(self, make: Callable[[], Any]) -> Any:
        """Starts an actor; its handle."""
        handle = make()
        # Ray ends an actor when the handle that it was started with is forgotten.
        self._handles.append(handle)
        return handle
