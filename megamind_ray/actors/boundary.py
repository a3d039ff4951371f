"""The one place where this package waits for Ray. Every wait has a deadline, every Ray error becomes one of ours."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from time import monotonic
from typing import Any, Final, Generic, TypeVar

import ray

from megamind_ray.actors.fencing import SupersededError
from megamind_ray.errors import ClusterError, MegamindError

__all__ = [
    "ActorAwayError",
    "ActorLostError",
    "NoAnswerError",
    "Watch",
    "cause_of",
    "raise_if_lost",
    "settle",
    "stand_down_by",
    "user_results",
    "wait_for",
    "wait_for_all",
]

_LOOK_S: Final = 0.5
_stand_down: Callable[[], None] | None = None

Key = TypeVar("Key", bound=Hashable)


class ActorLostError(ClusterError):
    """The actor behind a call is gone, or its node is, or it is silent: asking again makes no sense."""


class ActorAwayError(ActorLostError):
    """The actor's process ended, and Ray starts it again."""


class NoAnswerError(ClusterError):
    """A call was not answered in time; whether its actor lives is not known."""


def wait_for(ref: Any, *, timeout_s: float, what: str, unless: Callable[[], bool] | None = None) -> Any:
    """The result of one actor call.

    Args:
        ref: Of the call.
        timeout_s: Longest wait.
        what: For messages.
        unless: Looked at twice a second: once it says so, the answer is not waited for any more.

    Raises:
        MegamindError: What the actor raised, if it is one of ours.
        ClusterError: The actor died, did not answer in time, or failed in a way of its own.
    """
    until_s = monotonic() + timeout_s
    while unless is not None and not ray.wait([ref], timeout=_LOOK_S)[0]:
        if unless():
            raise ClusterError(f"{what}: it was given up")
        if monotonic() > until_s:
            raise NoAnswerError(f"{what}: no answer within {timeout_s:g} s")
    return wait_for_all([ref], timeout_s=timeout_s, what=what)[0]


def wait_for_all(refs: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
    """The results of several calls, as ``wait_for``."""
    try:
        results: list[Any] = ray.get(list(refs), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise NoAnswerError(
            f"{what}: no answer within {timeout_s:g} s; see `ray status` and the actor's log"
        ) from error
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
            settled.append(NoAnswerError(f"{what}: no answer within {timeout_s:g} s"))
            continue
        try:
            settled.append(ray.get(ref, timeout=timeout_s))  # it is there already: this does not wait
        except ray.exceptions.RayError as error:
            settled.append(cause_of(error, what))
    return settled


def raise_if_lost(ended: Sequence[Any], *, timeout_s: float, what: str) -> None:
    """Raises if one of these calls, which have all ended, ended with its actor.

    Raises:
        ActorLostError: An actor died.
    """
    for answer in settle(ended, timeout_s=timeout_s, what=what):
        if isinstance(answer, ActorLostError):
            raise answer


def user_results(refs: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
    """The results of calls that ran user code and have all ended.

    Raises:
        Exception: What the user's code raised.
        ClusterError: A result cannot be had.
    """
    try:
        results: list[Any] = ray.get(list(refs), timeout=timeout_s)
    except ray.exceptions.RayTaskError:
        raise  # Ray makes it an instance of the class that the code raised, where that can be pickled
    except ray.exceptions.RayError as error:
        raise cause_of(error, what) from error
    return results


class Watch(Generic[Key]):
    """Asks actors the same thing again and again, and does not wait for the slow ones: each has one question open.

    Args:
        patience_s: An actor that answers later than this is lost.
        what: For messages.
        clock: Monotonic.
    """

    def __init__(self, *, patience_s: float, what: str, clock: Callable[[], float] = monotonic) -> None:
        self._patience_s = patience_s
        self._what = what
        self._clock = clock
        self._open: dict[Key, tuple[Any, float]] = {}

    def look(self, asks: Mapping[Key, Callable[[], Any]], *, timeout_s: float) -> dict[Key, Any]:
        """Asks whom it may and takes what answers there are.

        Args:
            asks: How to ask each; whoever was asked before and is not in here any more is forgotten.
            timeout_s: Longest wait for answers.

        Returns:
            Result or error, of those only that answered or are lost.
        """
        self._open = {key: question for key, question in self._open.items() if key in asks}
        for key, ask in asks.items():
            if key not in self._open:
                self._open[key] = (ask(), self._clock())
        asked = {ref: key for key, (ref, _) in self._open.items()}
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)[0] if asked else []
        answers = dict(
            zip((asked[ref] for ref in ready), settle(ready, timeout_s=timeout_s, what=self._what), strict=True)
        )
        now = self._clock()
        for key, (_, asked_s) in self._open.items():
            if key not in answers and now - asked_s > self._patience_s:
                answers[key] = ActorLostError(f"{self._what}: no answer within {self._patience_s:g} s")
        for key in answers:
            del self._open[key]
        return answers


def stand_down_by(action: Callable[[], None]) -> None:
    """What this process, a planner's, does at once when it is told that it has a successor.

    Whatever it thinks by then is out of date: an actor that refuses its orders would look like one that is lost.
    """
    global _stand_down
    _stand_down = action


def cause_of(error: BaseException, what: str) -> MegamindError:
    """The error of ours inside a Ray error; else an ``ActorLostError`` or a ``ClusterError`` that tells the rest."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ActorLostError):
        # It was lost to the actor that we asked, which answers, so it is not the one that is lost.
        return ClusterError(f"{what}: {cause}")
    if isinstance(cause, SupersededError) and _stand_down is not None:
        _stand_down()
    if isinstance(cause, MegamindError):
        return cause
    if isinstance(error, ray.exceptions.RayTaskError):
        return ClusterError(f"{what}: {type(cause or error).__name__}: {error}")
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, ray.exceptions.OwnerDiedError):
        return ClusterError(
            f"{what}: the process that made the call is gone, and what came of it with that; call again"
        )
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return ActorAwayError(f"{what}: {first_line}")
    # The latter is that of an actor that Ray would start again, on a node that is gone.
    if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.ActorUnschedulableError):
        return ActorLostError(f"{what}: {first_line}")
    return ClusterError(f"{what}: {first_line}")
