"""A client's side of the fleet: what ``api.cluster`` says, as actor calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Final

import ray
from ray import cloudpickle

from megamind_ray import __version__
from megamind_ray.actors.boundary import ActorLostError, raise_if_lost, settle, user_results
from megamind_ray.actors.connection import current_job
from megamind_ray.actors.journal import Charter
from megamind_ray.actors.messages import DrainRequest, Lifetime, LoadRequest, ModelInfo, PlannerFacts
from megamind_ray.actors.reaching import PlannerLostError, Reach
from megamind_ray.actors.runtime import abandon_load, end_fleet
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
_MAX_LOST: Final = 3  # planners that one load may outlive: what ends them all may be the load


class FleetClient:
    """Talks to the planner of one fleet, and to the next one where that is lost.

    Attributes:
        owned: Whether this client started the fleet.
    """

    def __init__(self, reach: Reach, config: Config, *, owned: bool) -> None:
        self._reach = reach
        self._config = config
        self._job = current_job()
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

        A new planner asks ``fallback_rules`` about families that planning has no rules for. Where actors of a detached
        fleet are there without a planner, a new one takes them over.

        Raises:
            RequestError: It is of another release, was started with other settings, or there is none to greet.
            ClusterError: It does not answer.
        """
        owner = uuid.uuid4().hex
        charter = Charter(
            fleet=fleet,
            lifetime=lifetime,
            config=config,
            device_memory_bytes=device_memory_bytes,
            owner=owner,
            fallback_rules=fallback_rules,
        )
        reach = Reach(charter, start=start)
        owned = reach.facts.owner == owner
        if not owned:
            _refuse_other_settings(reach.facts, lifetime, device_memory_bytes)
        return cls(reach, config, owned=owned)

    @property
    def facts(self) -> PlannerFacts:
        """What the planner said of itself."""
        return self._reach.facts

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
        call = _LoadCall(self._reach, uuid.uuid4().hex, request)
        what = f"loading {request.uri}"
        try:
            report = self._wait(call, what, on_progress)
        except BaseException as error:
            self._call_off(call, error)
            if on_record is not None:
                try:
                    self._hand_over(call.ticket, on_record, None)
                except Exception as incomplete:  # noqa: BLE001 - the load's own error is what the caller is to see
                    error.add_note(f"its record is not complete: {incomplete}")
            raise
        if on_record is not None:
            try:
                self._hand_over(call.ticket, on_record, report)
            except MegamindError as error:
                raise RecordError(error.message, model=report.model) from error
            except BaseException as error:
                self._call_off(call, error)
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
        # What a planner that is lost just now was asked may be running: it cannot be asked a second time.
        self._ask(lambda planner: planner.hello.remote(__version__, patient=True), what)
        try:
            refs: list[Any] = self._reach.ask(lambda planner: planner.run.remote(name, payload), what)
        except PlannerLostError as error:
            raise ClusterError(f"{error.message}; the function may have begun in some ranks: call it again") from error
        waiting = list(refs)
        while waiting:
            self._require_connection()
            ended, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            # The others may wait for the lost rank in a collective call, for as long as torch lets them.
            raise_if_lost(ended, timeout_s=self._config.deadlines.call_s, what=what)
        return user_results(refs, timeout_s=self._config.deadlines.call_s, what=what)

    def models(self) -> tuple[ModelInfo, ...]:
        models: tuple[ModelInfo, ...] = self._ask(lambda planner: planner.models.remote(), "listing models")
        return models

    def report(self, name: ModelName) -> LoadReport:
        report: LoadReport = self._ask(lambda planner: planner.report.remote(name), f"asking for model {name!r}")
        return report

    def unload(self, name: ModelName) -> None:
        what = f"unloading {name!r}"
        # Where the planner is lost meanwhile, whether it was done is told by the load: the name may be another model's.
        loads = {model.name: model.load for model in self.models()}
        asked: list[Any] = []

        def ask(planner: Any) -> Any:
            asked.append(planner)
            return planner.unload.remote(name, loads.get(name) if len(asked) > 1 else None)

        self._ask_patiently(ask, what)

    def drain(self, request: DrainRequest, on_progress: Callable[[Progress], None] | None) -> DrainReport:
        """Has a node marked and emptied, and waits for it.

        An exception in the waiting thread, a keyboard interrupt above all, calls the drain off and is raised when it
        has ended; the node stays marked.

        Raises:
            MegamindError: As ``Departures.mark`` and ``Departures.drain``.
        """
        what = f"draining node {request.node}"
        ticket = uuid.uuid4().hex
        ref = self._begin_drain(ticket, request, what)
        try:
            for _ in range(_MAX_LOST):
                try:
                    return self._wait_for_drain(ref, ticket, what, on_progress)
                except PlannerLostError as error:
                    if self._reach.again(error) or not error.is_silent:
                        # It may have been done: then nothing is left to do there, and the report says that.
                        ref = self._begin_drain(ticket, request, what)
            return self._wait_for_drain(ref, ticket, what, on_progress)
        except BaseException:
            if current_job() == self._job and not ray.wait([ref], timeout=0)[0]:
                cancel = self._reach.submit(lambda planner: planner.cancel.remote(ticket, "the caller gave up waiting"))
                settle([cancel, ref], timeout_s=self._config.deadlines.close_s, what="calling a drain off")
            raise

    def leaving(self) -> tuple[NodeId, ...]:
        what = "asking which nodes leave"
        facts: PlannerFacts = self._ask(lambda planner: planner.hello.remote(__version__, patient=True), what)
        return facts.leaving

    def undrain(self, node: str) -> NodeId:
        back: NodeId = self._ask_patiently(lambda planner: planner.undrain.remote(node), f"taking node {node} back")
        return back

    def topology(self) -> Topology:
        topology: Topology = self._ask_patiently(lambda planner: planner.topology.remote(), "asking for the topology")
        return topology

    def close(self) -> None:
        """Ends the fleet if it is this client's and its lifetime is the job's."""
        if not self._is_mine or current_job() != self._job:
            return
        ref = self._reach.submit(lambda planner: planner.shut_down.remote())
        settle([ref], timeout_s=self._config.deadlines.close_s, what="taking the fleet down")
        end_fleet(self.facts.fleet)

    def _wait(self, call: _LoadCall, what: str, on_progress: Callable[[Progress], None] | None) -> LoadReport:
        """Waits for a load, whatever becomes of the planner meanwhile."""
        while True:
            try:
                while not ray.wait([call.ref], timeout=_POLL_S)[0]:
                    # Also where nobody wants to see it: a planner that no longer answers shows by this.
                    self._require_connection()
                    progress: Progress = self._reach.ask(
                        lambda planner: planner.progress.remote(call.ticket), "asking for progress"
                    )
                    if on_progress is not None:
                        on_progress(progress)
                self._require_connection()
                report: LoadReport = self._reach.ask(lambda _: call.ref, what)
                return report
            except PlannerLostError as error:
                if call.num_lost == _MAX_LOST:
                    raise ClusterError(
                        f"{error.message}; that was time {_MAX_LOST + 1} during this load, which most often means "
                        "that the load is too large for the planner's node: look at the planner's log, and at the "
                        "kernel's for want of memory (`dmesg`)"
                    ) from error
                self._reach.again(error)
                call.again()

    def _begin_drain(self, ticket: str, request: DrainRequest, what: str) -> Any:
        self._ask(lambda planner: planner.mark_leaving.remote(ticket, request), what)
        return self._reach.submit(lambda planner: planner.drain.remote(ticket))

    def _wait_for_drain(
        self, ref: Any, ticket: str, what: str, on_progress: Callable[[Progress], None] | None
    ) -> DrainReport:
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            self._require_connection()
            progress: Progress = self._reach.ask(lambda planner: planner.progress.remote(ticket), "asking for progress")
            if on_progress is not None:
                on_progress(progress)
        report: DrainReport = self._reach.ask(lambda _: ref, what)
        return report

    def _call_off(self, call: _LoadCall, why: BaseException) -> None:
        """Cancels a load; one that came to its end all the same is unloaded, as nobody would know of it."""
        if current_job() != self._job:
            return
        try:
            answer = self._cancel(call)
            if isinstance(answer, LoadReport):
                self.unload(ModelName(answer.model))
        except MegamindError as error:
            why.add_note(f"it was called off without a planner: {error}")
            if self._is_mine:
                end_fleet(self.facts.fleet)
            else:
                abandon_load(self.facts.fleet, call.ticket, timeout_s=self._config.deadlines.close_s)

    def _cancel(self, call: _LoadCall) -> LoadReport | MegamindError:
        """What came of a load that is to stop."""
        close_s, what = self._config.deadlines.close_s, "cancelling the load"
        for _ in range(_MAX_LOST + 1):
            if not ray.wait([call.ref], timeout=0)[0]:
                self._reach.insist(
                    lambda planner: planner.cancel.remote(call.ticket, "the caller gave up waiting"), what
                )
            answer: LoadReport | MegamindError = settle([call.ref], timeout_s=close_s, what=what)[0]
            if not isinstance(answer, ActorLostError):
                return answer
            # Its planner was lost: the next one may have taken it up.
            self._reach.insist(lambda planner: planner.hello.remote(__version__, patient=True), what)
            call.again()
        return answer

    def _hand_over(
        self, ticket: str, on_record: Callable[[LoadRecord, LoadReport | None], None], report: LoadReport | None
    ) -> None:
        what = "fetching what was recorded of the load"
        record: LoadRecord | None = self._ask(lambda planner: planner.record.remote(ticket), what)
        if record is not None:
            on_record(record, report)
        elif self._reach.num_lost:
            raise ClusterError(f"{what}: it was lost with a planner that had just ended the load")

    def _ask(self, ask: Callable[[Any], Any], what: str) -> Any:
        """The answer to a question that a planner answers at once, and that may be asked twice."""
        self._require_connection()
        return self._reach.insist(ask, what)

    def _ask_patiently(self, ask: Callable[[Any], Any], what: str) -> Any:
        """The answer to a call that queues behind loads: no bound but that the planner goes on answering others.

        Args:
            ask: Makes the call with the planner's handle; once more where that planner is lost.
            what: For messages.
        """
        self._require_connection()
        for _ in range(_MAX_LOST):
            try:
                return self._wait_patiently(self._reach.submit(ask), what)
            except PlannerLostError as error:
                self._reach.again(error)
        return self._wait_patiently(self._reach.submit(ask), what)

    def _wait_patiently(self, ref: Any, what: str) -> Any:
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            self._require_connection()
            self._reach.ask(lambda planner: planner.hello.remote(__version__), what)
        self._require_connection()
        return self._reach.ask(lambda _: ref, what)

    @property
    def _is_mine(self) -> bool:
        """Whether the fleet ends with this client."""
        return self.owned and self.facts.lifetime == "job"

    def _require_connection(self) -> None:
        """Without this Ray would start a cluster of its own for the next call, and look for the planner there.

        Raises:
            ClusterError: This process has left the cluster, or joined another.
        """
        if current_job() != self._job:
            raise ClusterError(
                f"this process left the Ray cluster of fleet {self.facts.fleet!r} (ray.shutdown()); connect again"
            )


class _LoadCall:
    """A load that was asked for, of one planner after the other."""

    def __init__(self, reach: Reach, ticket: str, request: LoadRequest) -> None:
        self._reach, self._request = reach, request
        self.ticket = ticket
        self.num_lost = 0
        self.ref = reach.submit(lambda planner: planner.load.remote(ticket, request))

    def again(self) -> None:
        """Asks the next planner for what came of it."""
        self.num_lost += 1
        self.ref = self._reach.submit(lambda planner: planner.load.remote(self.ticket, self._request, True))


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
