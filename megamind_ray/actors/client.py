"""A client's side of the fleet: what ``api.cluster`` says, as actor calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from time import monotonic, sleep
from typing import Any, Final

import ray
from ray import cloudpickle

from megamind_ray import __version__
from megamind_ray.actors.boundary import ActorLostError, raise_if_lost, settle, user_results, wait_for
from megamind_ray.actors.connection import current_job
from megamind_ray.actors.messages import DrainRequest, Lifetime, LoadRequest, ModelInfo, PlannerFacts
from megamind_ray.actors.runtime import end_fleet, fleet_actors, forget_planner, running_planner, start_planner
from megamind_ray.config import Config
from megamind_ray.core.departure import DrainReport
from megamind_ray.core.ids import ModelName, NodeId
from megamind_ray.core.progress import Progress
from megamind_ray.core.recording import LoadRecord
from megamind_ray.core.report import LoadReport
from megamind_ray.core.topology import Topology
from megamind_ray.errors import ClusterError, MegamindError, RecordError, RequestError
from megamind_ray.planning import RuleSource
from megamind_ray.units import format_bytes

__all__ = ["FleetClient"]

_POLL_S: Final = 0.3
_GONE_S: Final = 5.0  # how long a fleet that ends may still be found by name
_GONE_EVERY_S: Final = 0.2


class FleetClient:
    """Talks to one planner.

    Attributes:
        facts: What the planner said of itself.
        owned: Whether this client started the fleet.
    """

    def __init__(self, planner: Any, facts: PlannerFacts, config: Config, *, owned: bool) -> None:
        self._planner = planner
        self._config = config
        self._job = current_job()
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
            RequestError: It is of another release, was started with other settings, or there is none to greet.
            ClusterError: It does not answer, or is gone and has left actors behind.
        """
        owner = uuid.uuid4().hex
        until_s = monotonic() + _GONE_S
        while True:
            planner = running_planner(fleet)
            if planner is None and not start:
                raise RequestError(
                    f"no fleet {fleet!r} runs in this cluster; start one with `megamind load --detach` or connect(), "
                    "or name another with --fleet"
                )
            try:
                if planner is None:
                    _refuse_leftovers(fleet)
                    planner = start_planner(
                        fleet,
                        lifetime=lifetime,
                        config=config,
                        device_memory_bytes=device_memory_bytes,
                        owner=owner,
                        fallback_rules=fallback_rules,
                    )
                facts: PlannerFacts = wait_for(
                    planner.hello.remote(__version__),
                    timeout_s=config.deadlines.actor_start_s,
                    what=f"greeting the planner of fleet {fleet!r}",
                )
                break
            except ActorLostError:
                # A fleet that ends just now, or whose planner was killed: Ray forgets names a moment later.
                if monotonic() > until_s:
                    raise
                if planner is not None:
                    forget_planner(planner)
                sleep(_GONE_EVERY_S)
        owned = facts.owner == owner
        if not owned:
            _refuse_other_settings(facts, lifetime, device_memory_bytes)
        return cls(planner, facts, config, owned=owned)

    def load(
        self,
        request: LoadRequest,
        on_progress: Callable[[Progress], None] | None,
        on_record: Callable[[LoadRecord, LoadReport | None], None] | None = None,
    ) -> LoadReport:
        """Has a checkpoint loaded and waits for it.

        An exception in the waiting thread, a keyboard interrupt above all, cancels the load and is raised when it
        has ended.

        Args:
            request: What to load.
            on_progress: Called about three times a second on this thread.
            on_record: Called with what was recorded, where ``request.record`` asks for it, and the report; without one
                where the load failed, just before its error is raised, of which what this raises becomes a note.

        Raises:
            MegamindError: As ``Planner.load``.
            RecordError: It was done, and what was recorded cannot be had or was not taken.
        """
        self._require_connection()
        ticket = uuid.uuid4().hex
        ref = self._planner.load.remote(ticket, request)
        try:
            while not ray.wait([ref], timeout=_POLL_S)[0]:
                # Also where nobody wants to see it: a planner that no longer answers shows by this.
                progress = self._ask(partial(self._planner.progress.remote, ticket), "asking for progress")
                if on_progress is not None:
                    on_progress(progress)
            report: LoadReport = self._ask(lambda: ref, f"loading {request.uri}")
        except BaseException as error:
            self._call_off(ticket, ref)
            if on_record is not None:
                try:
                    self._hand_over(ticket, on_record, None)
                except Exception as incomplete:  # noqa: BLE001 - the load's own error is what the caller is to see
                    error.add_note(f"its record is not complete: {incomplete}")
            raise
        if on_record is not None:
            try:
                self._hand_over(ticket, on_record, report)
            except MegamindError as error:
                raise RecordError(error.message, model=report.model) from error
            except BaseException:
                self._call_off(ticket, ref)
                raise
        return report

    def run(self, name: ModelName, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Runs a function in every rank's actor; the results by rank.

        The wait has no bound of its own, since the function is the caller's; it ends if a worker dies.

        Raises:
            Exception: What the function raised in the lowest rank that failed.
            RequestError: The function or its arguments cannot be pickled.
            ClusterError: A worker died.
        """
        what = f"running in model {name!r}"
        try:
            payload = cloudpickle.dumps((fn, args))
        except Exception as error:
            raise RequestError(
                f"{what}: the function or its arguments cannot be sent to the workers ({error}); make what cannot be "
                "pickled (locks, files, connections) inside the function"
            ) from error
        refs: list[Any] = self._ask(partial(self._planner.run.remote, name, payload), what)
        waiting = list(refs)
        while waiting:
            self._require_connection()
            ended, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            # The others may wait for the lost rank in a collective call, for as long as torch lets them.
            raise_if_lost(ended, timeout_s=self._config.deadlines.call_s, what=what)
        return user_results(refs, timeout_s=self._config.deadlines.call_s, what=what)

    def models(self) -> tuple[ModelInfo, ...]:
        models: tuple[ModelInfo, ...] = self._ask(self._planner.models.remote, "listing models")
        return models

    def report(self, name: ModelName) -> LoadReport:
        report: LoadReport = self._ask(partial(self._planner.report.remote, name), f"asking for model {name!r}")
        return report

    def unload(self, name: ModelName) -> None:
        self._ask_patiently(partial(self._planner.unload.remote, name), f"unloading {name!r}")

    def drain(self, request: DrainRequest, on_progress: Callable[[Progress], None] | None) -> DrainReport:
        """Has a node marked and emptied, and waits for it.

        An exception in the waiting thread, a keyboard interrupt above all, calls the drain off and is raised when it
        has ended; the node stays marked.

        Raises:
            MegamindError: As ``Departures.mark`` and ``Departures.drain``.
        """
        what = f"draining node {request.node}"
        ticket = uuid.uuid4().hex
        self._ask(partial(self._planner.mark_leaving.remote, ticket, request), what)
        ref = self._planner.drain.remote(ticket)
        try:
            while not ray.wait([ref], timeout=_POLL_S)[0]:
                progress = self._ask(partial(self._planner.progress.remote, ticket), "asking for progress")
                if on_progress is not None:
                    on_progress(progress)
            report: DrainReport = self._ask(lambda: ref, what)
        except BaseException:
            if current_job() == self._job and not ray.wait([ref], timeout=0)[0]:
                cancel = self._planner.cancel.remote(ticket, "the caller gave up waiting")
                settle([cancel, ref], timeout_s=self._config.deadlines.close_s, what="calling a drain off")
            raise
        return report

    def leaving(self) -> tuple[NodeId, ...]:
        facts: PlannerFacts = self._ask(partial(self._planner.hello.remote, __version__), "asking which nodes leave")
        return facts.leaving

    def undrain(self, node: str) -> NodeId:
        back: NodeId = self._ask_patiently(partial(self._planner.undrain.remote, node), f"taking node {node} back")
        return back

    def topology(self) -> Topology:
        topology: Topology = self._ask_patiently(self._planner.topology.remote, "asking for the topology")
        return topology

    def close(self) -> None:
        """Ends the fleet if it is this client's and its lifetime is the job's."""
        if not self.owned or self.facts.lifetime != "job" or current_job() != self._job:
            return
        settle(
            [self._planner.shut_down.remote()], timeout_s=self._config.deadlines.close_s, what="taking the fleet down"
        )
        end_fleet(self.facts.fleet)

    def _call_off(self, ticket: str, ref: Any) -> None:
        """Cancels a load; one that came to its end all the same is unloaded, as nobody would know of it."""
        if current_job() != self._job:
            return
        close_s = self._config.deadlines.close_s
        if not ray.wait([ref], timeout=0)[0]:
            cancel = self._planner.cancel.remote(ticket, "the caller gave up waiting")
            settle([cancel, ref], timeout_s=close_s, what="cancelling the load")
        (answer,) = settle([ref], timeout_s=0, what="cancelling the load")
        if isinstance(answer, LoadReport):
            settle([self._planner.unload.remote(answer.model)], timeout_s=close_s, what="unloading a cancelled load")

    def _hand_over(
        self, ticket: str, on_record: Callable[[LoadRecord, LoadReport | None], None], report: LoadReport | None
    ) -> None:
        what = "fetching what was recorded of the load"
        record: LoadRecord | None = self._ask(partial(self._planner.record.remote, ticket), what)
        if record is not None:
            on_record(record, report)

    def _ask(self, ask: Callable[[], Any], what: str) -> Any:
        """The answer to a call that the planner answers at once."""
        self._require_connection()
        try:
            return wait_for(ask(), timeout_s=self._config.deadlines.call_s, what=what)
        except ActorLostError as error:
            raise ClusterError(
                f"{what}: the planner of fleet {self.facts.fleet!r} is gone, and the fleet's models with it; connect "
                f"again. `megamind down --fleet {self.facts.fleet}` clears what is left of a detached fleet"
            ) from error

    def _ask_patiently(self, ask: Callable[[], Any], what: str) -> Any:
        """The answer to a call that queues behind loads: no bound but that the planner goes on answering others."""
        self._require_connection()
        ref = ask()
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            self._ask(partial(self._planner.hello.remote, __version__), what)
        return self._ask(lambda: ref, what)

    def _require_connection(self) -> None:
        """Without this Ray would start a cluster of its own for the next call, and look for the planner there.

        Raises:
            ClusterError: This process has left the cluster, or joined another.
        """
        if current_job() != self._job:
            raise ClusterError(
                f"this process left the Ray cluster of fleet {self.facts.fleet!r} (ray.shutdown()); connect again"
            )


def _refuse_leftovers(fleet: str) -> None:
    left = fleet_actors(fleet)
    if left:
        raise ActorLostError(
            f"the planner of fleet {fleet!r} is gone, but {len(left)} of its actors still hold their GPUs and models; "
            f"end them with `megamind down --fleet {fleet}`, then connect again"
        )


def _refuse_other_settings(facts: PlannerFacts, lifetime: Lifetime, device_memory_bytes: int | None) -> None:
    down = f"`megamind down --fleet {facts.fleet}`"
    if lifetime == "detached" and facts.lifetime == "job":
        raise RequestError(
            f"fleet {facts.fleet!r} runs and ends with the process that started it, so nothing in it can be detached; "
            "take another fleet name, or wait for that process to end"
        )
    if device_memory_bytes is not None and device_memory_bytes != facts.device_memory_bytes:
        has = "what was free" if facts.device_memory_bytes is None else format_bytes(facts.device_memory_bytes)
        raise RequestError(
            f"device_memory={format_bytes(device_memory_bytes)}: fleet {facts.fleet!r} runs already, with {has} per "
            f"GPU; leave it out, take another fleet name, or end that fleet first ({down})"
        )
