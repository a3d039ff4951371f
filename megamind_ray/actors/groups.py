"""How methods of an actor are called: on which threads (sizes are in ``actors.runtime``), and by whose order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import ray

from megamind_ray.actors.fencing import Epoch, Fence

__all__ = ["Group", "by_order", "in_group"]

Group = Literal["control", "exchange", "moves", "run"]


Method = TypeVar("Method", bound=Callable[..., Any])


def in_group(group: Group) -> Callable[[Method], Method]:
    """Runs a method on the threads of a group; the class stays a plain class until ``actors.runtime``."""
    return cast(Callable[[Method], Method], ray.method(concurrency_group=group))


def by_order(group: Group) -> Callable[[Method], Method]:
    """As ``in_group``, for what a planner orders or asks: it may say its epoch, and one that was succeeded is refused.

    The actor has a ``fence``.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def obey(self: Any, *args: Any, epoch: Epoch | None = None, **kwargs: Any) -> Any:
            fence: Fence = self.fence
            fence.require(epoch)
            return method(self, *args, **kwargs)

        # Ray holds calls to what a method takes, and would look at the one inside.
        del obey.__wrapped__
        takes = inspect.signature(method)
        said = inspect.Parameter("epoch", inspect.Parameter.KEYWORD_ONLY, default=None)
        obey.__signature__ = takes.replace(parameters=[*takes.parameters.values(), said])  # type: ignore[attr-defined]
        return in_group(group)(cast(Method, obey))

    return decorate
