"""The one place where this package waits for Ray. Every wait has a deadline, every Ray error becomes one of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from megamind_ray.errors import ClusterError, MegamindError

__all__ = ["ActorLostError", "cause_of", "settle", "wait_for", "wait_for_all"]


class ActorLostError(ClusterError):
    """The actor behind a call is gone, or its node is: asking again makes no sense."""


def wait_for(ref: Any, *, timeout_s: float, what: str) -> Any:
    """The result of one actor call.

    Raises:
        MegamindError: What the actor raised, if it is one of ours.
        ClusterError: The actor died, did not answer in time, or failed in a way of its own.
    """
    return wait_for_all([ref], timeout_s=timeout_s, what=what)[0]


def wait_for_all(refs: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
    """The results of several calls, as ``wait_for``."""
    try:
        results: list[Any] = ray.get(list(refs), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(f"{what}: no answer within {timeout_s:g} s; see `ray status` and the actor's log") from error
    except ray.exceptions.RayError as error:
        raise cause_of(error, what) from error
    return results


def settle(refs: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
    """The result of each call, or the error in its place; nothing is raised."""
    if not refs:
        return []
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    settled: list[Any] = []
    for ref in refs:
        if ref not in ready:
            settled.append(ClusterError(f"{what}: no answer within {timeout_s:g} s"))
            continue
        try:
            settled.append(ray.get(ref, timeout=timeout_s))  # it is there already: this does not wait
        except ray.exceptions.RayError as error:
            settled.append(cause_of(error, what))
    return settled


def cause_of(error: BaseException, what: str) -> MegamindError:
    """The error of ours inside a Ray error; else an ``ActorLostError`` or a ``ClusterError`` that tells the rest."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, MegamindError):
        return cause
    if isinstance(error, ray.exceptions.RayTaskError):
        return ClusterError(f"{what}: {type(cause or error).__name__}: {error}")
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, ray.exceptions.RayActorError):
        return ActorLostError(f"{what}: {first_line}")
    return ClusterError(f"{what}: {first_line}")
