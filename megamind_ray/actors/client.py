"""A client's side of the fleet: what ``api.cluster`` says, as actor calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray import cloudpickle

from megamind_ray import __version__
from megamind_ray.actors.boundary import ActorLostError, cause_of, settle, wait_for
from megamind_ray.actors.messages import Lifetime, LoadRequest, ModelInfo, PlannerFacts
from megamind_ray.actors.runtime import end_fleet, running_planner, start_planner
from megamind_ray.config import Config
from megamind_ray.core.ids import ModelName
from megamind_ray.core.progress import Progress
from megamind_ray.core.report import LoadReport
from megamind_ray.core.topology import Topology
from megamind_ray.errors import ClusterError, RequestError
from megamind_ray.planning import RuleSource

__all__ = ["FleetClient"]

_POLL_S = 0.3


class FleetClient:
    """Talks to one planner.

    Attributes:
        facts: What the planner said of itself.
        owned: Whether this client started the fleet.
    """

    def __init__(self, planner: Any, facts: PlannerFacts, config: Config, *, owned: bool) -> None:
        self._planner = planner
        self._config = config
        self.facts = facts
        self.owned = owned

    @classmethod
    def open(
        cls,
        fleet: str,
        *,
        lifetime: Lifetime,
        config: Config,
        device_memory_bytes: int | None,
        start: bool = True,
        fallback_rules: RuleSource | None = None,
    ) -> FleetClient:
        """Greets the fleet's planner, and starts one if there is none and ``start`` is set.

        A new planner asks ``fallback_rules`` about families that planning has no rules for.

        Raises:
            RequestError: It is of another release, or there is none to greet.
            ClusterError: It does not answer.
        """
        owner = uuid.uuid4().hex
        planner = running_planner(fleet)
        if planner is None and not start:
            raise RequestError(
                f"no fleet {fleet!r} runs in this cluster; start one with `megamind load --detach` or connect(), or "
                "name another with --fleet"
            )
        if planner is None:
            planner = start_planner(
                fleet,
                lifetime=lifetime,
                config=config,
                device_memory_bytes=device_memory_bytes,
                owner=owner,
                fallback_rules=fallback_rules,
            )
        facts = wait_for(
            planner.hello.remote(__version__),
            timeout_s=config.deadlines.actor_start_s,
            what=f"greeting the planner of fleet {fleet!r}",
        )
        return cls(planner, facts, config, owned=facts.owner == owner)

    def load(self, request: LoadRequest, on_progress: Callable[[Progress], None] | None) -> LoadReport:
        """Has a checkpoint loaded and waits for it.

        An exception in the waiting thread, a keyboard interrupt above all, cancels the load and is raised when it
        has ended.
        """
        ticket = uuid.uuid4().hex
        ref = self._planner.load.remote(ticket, request)
        try:
            while not ray.wait([ref], timeout=_POLL_S)[0]:
                if on_progress is not None:
                    on_progress(self._ask(self._planner.progress.remote(ticket), "asking for progress"))
        except BaseException:
            self._cancel(ticket, ref)
            raise
        report: LoadReport = wait_for(ref, timeout_s=self._config.deadlines.call_s, what=f"loading {request.uri}")
        return report

    def run(self, name: ModelName, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Runs a function in every rank's actor; the results by rank.

        The wait has no bound of its own, since the function is the caller's; it ends if a worker dies.

        Raises:
            Exception: What the function raised in the lowest rank that failed.
            ClusterError: A worker died.
        """
        payload = cloudpickle.dumps((fn, args))
        refs: list[Any] = self._ask(self._planner.run.remote(name, payload), f"running in model {name!r}")
        waiting = list(refs)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
        try:
            results: list[Any] = ray.get(refs, timeout=self._config.deadlines.call_s)
        except ray.exceptions.RayActorError as error:
            raise cause_of(error, f"running in model {name!r}") from error
        return results

    def models(self) -> tuple[ModelInfo, ...]:
        models: tuple[ModelInfo, ...] = self._ask(self._planner.models.remote(), "listing models")
        return models

    def report(self, name: ModelName) -> LoadReport:
        report: LoadReport = self._ask(self._planner.report.remote(name), f"asking for model {name!r}")
        return report

    def unload(self, name: ModelName) -> None:
        self._ask(self._planner.unload.remote(name), f"unloading {name!r}", long=True)

    def topology(self) -> Topology:
        topology: Topology = self._ask(self._planner.topology.remote(), "asking for the topology", long=True)
        return topology

    def close(self) -> None:
        """Ends the fleet if it is this client's and its lifetime is the job's."""
        if not self.owned or self.facts.lifetime != "job" or not ray.is_initialized():
            return
        settle(
            [self._planner.shut_down.remote()], timeout_s=self._config.deadlines.close_s, what="taking the fleet down"
        )
        end_fleet(self.facts.fleet)

    def _cancel(self, ticket: str, ref: Any) -> None:
        if ray.is_initialized():
            cancel = self._planner.cancel.remote(ticket, "the caller gave up waiting")
            settle([cancel, ref], timeout_s=self._config.deadlines.close_s, what="cancelling the load")

    def _ask(self, ref: Any, what: str, *, long: bool = False) -> Any:
        """``long`` is for calls that queue behind a load or start actors."""
        deadlines = self._config.deadlines
        try:
            return wait_for(ref, timeout_s=deadlines.actor_start_s if long else deadlines.call_s, what=what)
        except ActorLostError as error:
            raise ClusterError(
                f"{what}: the planner of fleet {self.facts.fleet!r} is gone, and the fleet's models with it. "
                f"`megamind down --fleet {self.facts.fleet}` clears what is left, then load again"
            ) from error
