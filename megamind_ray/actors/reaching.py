"""How a client reaches a fleet's planner: finds it, starts it, and has it again when it was lost (0027)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from typing import Any, Final

from megamind_ray import __version__
from megamind_ray.actors.boundary import ActorAwayError, ActorLostError, NoAnswerError, wait_for
from megamind_ray.actors.fencing import SupersededError
from megamind_ray.actors.journal import Charter
from megamind_ray.actors.messages import PlannerFacts
from megamind_ray.actors.runtime import is_orphaned, restart_planner, running_planner, start_planner
from megamind_ray.errors import ClusterError, RequestError

__all__ = ["PlannerLostError", "Reach"]

_AGAIN_S: Final = 0.2
_SIGN_S: Final = 5.0  # a planner that did not answer a question in time, nor greets within this, is silent
_MAX_LOST: Final = 3  # planners that one call may outlive: one that is lost again and again is ended by what it does


class PlannerLostError(ClusterError):
    """The planner that was asked is gone or silent. What it was asked may have been done or not.

    Attributes:
        planner: Its handle.
        is_silent: It may live.
    """

    def __init__(self, message: str, *, planner: Any, is_silent: bool) -> None:
        super().__init__(message)
        self.planner = planner
        self.is_silent = is_silent


class Reach:
    """A client's way to one planner after the other. Used by any thread of the client.

    Attributes:
        facts: What the latest one said of itself.
        num_lost: How many were lost so far.

    Args:
        charter: What a fleet that does not run is started with.
        start: Whether one is to be started that does not run.

    Raises:
        RequestError: It is of another release, or there is none and none is to be started.
        ClusterError: It does not answer.
    """

    def __init__(self, charter: Charter, *, start: bool) -> None:
        self._charter = charter
        self._what = f"fleet {charter.fleet!r}: greeting its planner"
        self._lock = threading.Lock()
        self.num_lost = 0
        until_s = monotonic() + charter.config.deadlines.planner_s
        planner = running_planner(charter.fleet)
        if planner is None and not start and not is_orphaned(charter.fleet):
            raise RequestError(
                f"no fleet {charter.fleet!r} runs in this cluster; start one with `megamind load --detach` or "
                "connect(), or name another with --fleet"
            )
        self._planner, self.facts = self._greet(planner, partial(start_planner, charter), until_s)

    def ask(self, ask: Callable[[Any], Any], what: str) -> Any:
        """The answer to a question that a planner answers at once.

        Args:
            ask: Makes the call with the planner's handle; gives its ref.
            what: For messages.

        Raises:
            PlannerLostError: The planner is gone, or silent for ``deadlines.call_s``.
            MegamindError: What it answers.
        """
        planner = self._planner
        try:
            return wait_for(ask(planner), timeout_s=self._charter.config.deadlines.call_s, what=what)
        except (ActorLostError, NoAnswerError, SupersededError) as error:
            raise PlannerLostError(
                f"{what}: the planner of fleet {self._charter.fleet!r} was lost: {error.message}",
                planner=planner,
                is_silent=isinstance(error, NoAnswerError),
            ) from error

    def submit(self, ask: Callable[[Any], Any]) -> Any:
        """Makes a call that takes long; gives its ref, of which ``ask`` gets the answer."""
        return ask(self._planner)

    def again(self, error: PlannerLostError) -> bool:
        """Has a planner again after one was lost: the one that Ray starts, or a new one.

        Returns:
            Whether it is another one; else it was only silent, and does what it was asked.

        Raises:
            ClusterError: There is none within ``deadlines.planner_s``, or the fleet has ended; it says what to do.
        """
        fleet = self._charter.fleet
        with self._lock:
            if error.planner is not self._planner:
                return True  # another thread has one already
            self.num_lost += 1
            before = self.facts.incarnation
            until_s = monotonic() + self._charter.config.deadlines.planner_s
            restart = partial(restart_planner, replace(self._charter, lifetime=self.facts.lifetime))
            try:
                planner = self._living(error, restart)
                self._planner, self.facts = self._greet(planner, restart, until_s)
            except ClusterError as still:
                raise ClusterError(
                    f"{error.message}; no planner could be had again: {still.message}. `ray status` shows nodes and "
                    f"what is free; `megamind down --fleet {fleet}` ends what is left of a detached fleet"
                ) from error
            return self.facts.incarnation != before

    def insist(self, ask: Callable[[Any], Any], what: str) -> Any:
        """As ``ask``, for what may be asked twice: a planner that is lost meanwhile costs time.

        Raises:
            ClusterError: No planner can be had.
            MegamindError: What it answers.
        """
        for _ in range(_MAX_LOST):
            try:
                return self.ask(ask, what)
            except PlannerLostError as error:
                self.again(error)
        return self.ask(ask, what)

    def _living(self, error: PlannerLostError, restart: Callable[..., Any]) -> Any | None:
        """Of a planner that was lost, or seems so, the handle of whoever may answer instead."""
        if not error.is_silent:
            return running_planner(self._charter.fleet)
        try:
            # One that takes over what there is answers no other question.
            wait_for(error.planner.hello.remote(__version__), timeout_s=_SIGN_S, what=self._what)
        except NoAnswerError:
            return restart(dead=error.planner)
        except ActorLostError:  # what kept it silent has ended it by now
            return running_planner(self._charter.fleet)
        return error.planner

    def _greet(self, planner: Any | None, start: Callable[..., Any], until_s: float) -> tuple[Any, PlannerFacts]:
        """Waits until a planner has taken over what there is.

        Args:
            planner: The one that is to answer; None where there is none.
            start: Starts one; is given the handle of one that is gone for good.
            until_s: When to give up.
        """
        while True:
            left_s = max(0.0, until_s - monotonic())
            try:
                planner = start() if planner is None else planner
                facts: PlannerFacts = wait_for(planner.hello.remote(__version__), timeout_s=left_s, what=self._what)
                if facts.is_ready:
                    return planner, facts
            except ActorAwayError:
                pass  # Ray starts it again
            except ActorLostError:
                # Of a fleet that ends, or it is gone for good: Ray forgets names a moment later.
                if monotonic() > until_s:
                    raise
                planner = self._started_anew(start, planner)
            if monotonic() > until_s:
                raise ClusterError(f"{self._what}: it is not ready")
            sleep(_AGAIN_S)

    def _started_anew(self, start: Callable[..., Any], dead: Any | None) -> Any | None:
        try:
            return start(dead=dead)
        except ActorLostError:
            return None  # the nursery of a fleet that ends
