"""Whose orders count: every planner of a fleet has an epoch, and who has heard of a later one refuses (0027)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from megamind_ray.errors import ClusterError

__all__ = ["Commanded", "Epoch", "Fence", "SupersededError", "bare", "commanded"]


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """The term of one planner. Of two with the same number, which began at once, the name decides.

    Attributes:
        number: One more than the highest that anybody of the fleet had heard of.
        planner: Unique to the planner's process.
    """

    number: int = 0
    planner: str = ""


class SupersededError(ClusterError):
    """The planner has a successor: nobody obeys it any more, and it must end."""


class Fence:
    """What an actor knows of epochs. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_leaving = False
        self.epoch: Epoch = Epoch()

    def require(self, epoch: Epoch | None) -> None:
        """Lets an order pass, and from then on none of an earlier epoch; what has none is no planner's.

        Raises:
            SupersededError: A later planner has given orders already.
            ClusterError: The actor was told to leave.
        """
        if epoch is None:
            return
        with self._lock:
            if epoch < self.epoch:
                raise SupersededError(
                    f"an order of planner {epoch.planner[:8]} (epoch {epoch.number}) is refused: planner "
                    f"{self.epoch.planner[:8]} (epoch {self.epoch.number}) has taken over"
                )
            self.epoch = epoch
            if self._is_leaving:
                raise ClusterError("this actor was told to leave, and is about to be ended")

    def leave(self) -> None:
        """No order passes any more: whoever said so ends the process, and so does every planner that finds it."""
        with self._lock:
            self._is_leaving = True


class Commanded:
    """An actor as one planner commands it: every call carries the planner's epoch.

    Whoever it is passed on to gets the bare handle, since it gives no orders.

    Args:
        handle: Of the actor.
        epoch: Of the planner.
    """

    def __init__(self, handle: Any, epoch: Epoch) -> None:
        self._handle = handle
        self._epoch = epoch

    def __getattr__(self, method: str) -> _Order:
        if method.startswith("__"):  # what pickle and copy ask for
            raise AttributeError(method)
        return _Order(getattr(self._handle, method), self._epoch)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._handle,)


class _Order:
    def __init__(self, method: Any, epoch: Epoch) -> None:
        self._method = method
        self._epoch: Final = epoch

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._method.remote(*args, epoch=self._epoch, **kwargs)


def commanded(handle: Any, epoch: Epoch) -> Commanded:
    """A handle, bare or of another epoch, as a planner of this epoch has it."""
    return Commanded(bare(handle), epoch)


def bare(handle: Any) -> Any:
    """The actor handle behind a commanded one; any other as it is."""
    return handle._handle if isinstance(handle, Commanded) else handle


def _itself(handle: Any) -> Any:
    return handle
