"""Concurrency groups: which methods of an actor share threads (sizes are in ``actors.runtime``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import ray

__all__ = ["Group", "in_group"]

Group = Literal["control", "exchange", "moves", "run"]


Method = TypeVar("Method", bound=Callable[..., Any])


def in_group(group: Group) -> Callable[[Method], Method]:
    """Runs a method on the threads of a group; the class stays a plain class until ``actors.runtime``."""
    return cast(Callable[[Method], Method], ray.method(concurrency_group=group))
