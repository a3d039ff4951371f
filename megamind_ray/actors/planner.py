"""The planner: has loads done one after the other, and knows what is loaded. One actor per fleet."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

from megamind_ray import __version__
from megamind_ray.actors.catalogue import Catalogue
from megamind_ray.actors.departures import Departures
from megamind_ray.actors.fleet import Fleet
from megamind_ray.actors.groups import in_group
from megamind_ray.actors.journal import Charter, Journal
from megamind_ray.actors.loading import Loader, planner_lost
from megamind_ray.actors.messages import DrainRequest, LoadRequest, ModelInfo, PlannerFacts
from megamind_ray.actors.recording import RecordBook
from megamind_ray.actors.spawner import Spawner
from megamind_ray.actors.succession import Estate, free_strays, take_over
from megamind_ray.actors.ticket import Ticket
from megamind_ray.actors.wire_choice import AgentNodes, WireChooser
from megamind_ray.core.departure import DrainReport
from megamind_ray.core.ids import LoadId, NodeId
from megamind_ray.core.progress import Progress
from megamind_ray.core.recording import LoadRecord
from megamind_ray.core.report import Fault, LoadReport
from megamind_ray.core.topology import Topology
from megamind_ray.errors import ClusterError, MegamindError, RequestError

__all__ = ["Planner"]

_CANCEL_EVERY_S: Final = 0.1  # how often a load that queues looks whether it is still wanted
_LOST: Final = "the planner's process ended, or gave no answer"


class Planner:
    """Plans, has executed, and remembers. Methods run on threads of their concurrency groups (see ``runtime``).

    Ray starts it again where its process ends, a client where that does not help. It then finds out what there is, and
    takes up what an earlier one began (docs/design/0027); who asks meanwhile waits.
    """

    def __init__(self, charter: Charter, spawner: Spawner) -> None:
        """Returns at once.

        Args:
            charter: What a new fleet is started with; one that runs keeps its own.
            spawner: Starts actors, and finds those that there are.
        """
        self._charter = charter
        self._spawner = spawner
        self._incarnation = uuid.uuid4().hex
        self._moves = threading.Lock()  # one load or unload at a time
        self._calls = threading.Lock()  # collective calls enter all ranks in one order
        self._tickets: dict[str, Ticket] = {}
        self._records = RecordBook()
        self._ready = threading.Event()
        self._trouble: MegamindError | None = None
        # Loads that queue or are under way, by ticket, and what came of one that an earlier planner began.
        self._results: dict[str, Future[LoadReport]] = {}
        self._set_up()
        threading.Thread(target=self._begin, name="take-over", daemon=True).start()

    @in_group("control")
    def hello(self, version: str, patient: bool = False) -> PlannerFacts:
        """Greets a client.

        Args:
            version: Its release.
            patient: Waits until all of the answer is settled, as every other question does.

        Raises:
            RequestError: The client is of another release.
        """
        charter = self._charter
        if version != __version__:
            raise RequestError(
                f"fleet {charter.fleet!r} runs megamind-ray {__version__}, this client is {version}; use the same "
                f"release, or end the fleet with `megamind down --fleet {charter.fleet}` and start it anew"
            )
        if patient:
            self._require_ready()
        if self._trouble is not None:
            raise self._trouble
        charter = self._charter
        return PlannerFacts(
            version=__version__,
            fleet=charter.fleet,
            lifetime=charter.lifetime,
            owner=charter.owner,
            device_memory_bytes=charter.device_memory_bytes,
            incarnation=self._incarnation,
            is_ready=self._ready.is_set(),
            leaving=self._departures.leaving,
        )

    @in_group("moves")
    def load(self, ticket_id: str, request: LoadRequest, again: bool = False) -> LoadReport:
        """Loads a checkpoint onto the fleet.

        Args:
            ticket_id: Unique to the load.
            request: What to load.
            again: Its client lost sight of the planner that it asked first: an earlier one, or this one, if it was
                silent for a while. What had begun is waited for.

        Raises:
            MegamindError: It cannot be done or went wrong; nothing of it is left behind.
        """
        self._require_ready()
        result: Future[LoadReport] = Future()
        under_way = self._results.setdefault(ticket_id, result)
        if under_way is not result:
            return under_way.result()
        try:
            result.set_result(self._load(ticket_id, request, again))
        except BaseException as error:
            result.set_exception(error)
            raise
        finally:
            self._results.pop(ticket_id, None)
        return result.result()

    @in_group("control")
    def record(self, ticket_id: str) -> LoadRecord | None:
        """What was recorded of a load that has ended, well or not; once. None where nothing was to be recorded."""
        self._require_ready()
        return self._records.take(ticket_id)

    @in_group("control")
    def progress(self, ticket_id: str) -> Progress:
        """How far a load or a drain is. A ticket that is not there yet, or no more, is ``queued`` with no bytes."""
        self._require_ready()
        leaving = self._departures.progress(ticket_id)
        if leaving is not None:
            return leaving
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.driver is None:
            return Progress(phase=ticket.phase if ticket else "queued")
        ranks = ticket.driver.progress()
        return Progress(
            phase=ticket.phase,
            bytes_done=sum(rank.bytes_done for rank in ranks),
            bytes_total=sum(rank.bytes_total for rank in ranks),
            ranks=ranks,
        )

    @in_group("control")
    def cancel(self, ticket_id: str, reason: str) -> None:
        """Stops a load or a drain, also one that still queues."""
        self._require_ready()
        if self._departures.cancel(ticket_id, reason):
            return
        ticket = self._tickets.setdefault(ticket_id, Ticket())
        ticket.cancelled = reason
        if ticket.driver is not None:
            ticket.driver.cancel(reason)

    @in_group("control")
    def models(self) -> tuple[ModelInfo, ...]:
        """What is loaded."""
        self._require_ready()
        return self._catalogue.infos()

    @in_group("control")
    def report(self, name: str) -> LoadReport:
        """What loading a model moved.

        Raises:
            RequestError: No such model.
        """
        self._require_ready()
        return self._catalogue.get(name).report

    @in_group("moves")
    def topology(self) -> Topology:
        """The fleet's hardware now."""
        self._require_ready()
        with self._moves:
            self._fleet.refresh()
            return self._fleet.topology()

    @in_group("moves")
    def unload(self, name: str, load: LoadId | None = None) -> None:
        """Frees a model's arenas and kept blocks.

        Args:
            name: Of the model.
            load: Its load, where an earlier planner was asked: if another model has the name by now, or none, it is
                done already.

        Raises:
            RequestError: No such model, or user code still holds its tensors; it is unloaded all the same, and their
                memory comes back when they are forgotten.
        """
        self._require_ready()
        with self._moves:
            if load is not None and load not in {model.info.load for model in self._catalogue}:
                return
            self._catalogue.remove(name)

    @in_group("control")
    def mark_leaving(self, ticket_id: str, request: DrainRequest) -> None:
        """Marks a node that is to leave: no load that begins from now on uses it. ``drain`` empties it.

        Raises:
            RequestError: No such node, one that cannot leave, or one that is being drained.
        """
        self._require_ready()
        self._departures.mark(ticket_id, request)

    @in_group("moves")
    def drain(self, ticket_id: str) -> DrainReport:
        """Empties a node that was marked, and ends the fleet's actors there (see ``Departures.drain``)."""
        self._require_ready()
        return self._departures.drain(ticket_id)

    @in_group("control")
    def undrain(self, node: str) -> NodeId:
        """Takes a node back that is leaving (see ``Departures.undrain``)."""
        self._require_ready()
        return self._departures.undrain(node)

    @in_group("control")
    def run(self, name: str, payload: bytes) -> list[Any]:
        """Submits a function to every rank of a model; returns the refs of the results, by rank.

        Raises:
            RequestError: No such model.
            ClusterError: A worker that held a rank is gone.
        """
        self._require_ready()
        with self._calls:
            return self._catalogue.submit(name, payload, rendezvous=self._incarnation)

    @in_group("control")
    def shut_down(self) -> None:
        """Ends all actors of the fleet but this one."""
        self._require_ready()
        for ticket in list(self._tickets.values()):
            ticket.cancelled = "the fleet was taken down"
            if ticket.driver is not None:
                ticket.driver.cancel(ticket.cancelled)
        self._catalogue.clear()
        with suppress(ClusterError):  # for a planner that is started before the last actor is gone; all end anyway
            self._journal.note(models=())
        self._fleet.shut_down()

    def _load(self, ticket_id: str, request: LoadRequest, again: bool) -> LoadReport:
        faults: tuple[Fault, ...] = ()
        if again:
            made = self._catalogue.of_ticket(ticket_id)
            if made is not None:
                return made.report
            faults = (planner_lost(_LOST, "the load had no plan yet and was begun anew"),)
        ticket = self._tickets.setdefault(ticket_id, Ticket())
        try:
            while not self._departures.let_first(_CANCEL_EVERY_S) or not self._moves.acquire(timeout=_CANCEL_EVERY_S):
                ticket.raise_if_cancelled()
            try:
                return self._loader.load(ticket_id, ticket, request, faults=faults)
            finally:
                self._moves.release()
                self._records.keep(ticket_id, ticket.recorded())
        finally:
            self._tickets.pop(ticket_id, None)

    def _set_up(self) -> None:
        charter = self._charter
        self._fleet = Fleet(
            charter.fleet,
            lifetime=charter.lifetime,
            config=charter.config,
            spawner=self._spawner,
            device_memory_bytes=charter.device_memory_bytes,
        )
        self._catalogue = Catalogue(self._fleet, charter.config, on_removed=self._write_models)
        self._departures = Departures(
            self._fleet,
            self._catalogue,
            self._moves,
            charter.config,
            on_marked=lambda nodes: self._journal.note(leaving=nodes),
        )

    def _write_models(self) -> None:
        self._journal.note(models=self._catalogue.journaled())

    def _require_ready(self) -> None:
        deadlines = self._charter.config.deadlines
        if not self._ready.wait(deadlines.call_s + deadlines.actor_start_s):
            raise ClusterError(f"the planner of fleet {self._charter.fleet!r} has not yet found out what there is")
        if self._trouble is not None:
            raise self._trouble

    def _begin(self) -> None:
        """Takes over what there is, then takes up the load that was under way, if one was."""
        with self._moves:
            try:
                estate = self._take_over()
            except MegamindError as error:
                self._trouble = error
                return
            except Exception as error:  # noqa: BLE001 - nobody is above this thread; all who ask are told
                self._trouble = ClusterError(
                    f"the planner of fleet {self._charter.fleet!r} cannot take over what there is "
                    f"({type(error).__name__}: {error}); `megamind down --fleet {self._charter.fleet}` ends it"
                )
                return
            finally:
                self._ready.set()
            self._clear_up(estate)

    def _take_over(self) -> Estate:
        call_s = self._charter.config.deadlines.call_s
        estate = take_over(self._spawner, self._charter.fleet, self._incarnation, call_s=call_s)
        if estate.snapshot is not None:
            self._charter = estate.snapshot.charter
        self._set_up()
        fleet = self._fleet
        estate.adopted_by(fleet)
        self._journal = Journal(self._charter, estate.epoch, lambda: fleet.agents, here=fleet.here)
        self._loader = Loader(
            fleet, self._catalogue, self._journal, self._charter, estate.epoch, WireChooser(AgentNodes(fleet))
        )
        if estate.snapshot is not None:
            self._catalogue.restore(estate.snapshot.models, estate)
            self._departures.restore(estate.snapshot.leaving)
            self._journal.restore(estate.snapshot)
            job = estate.snapshot.load
            if job is not None:
                self._tickets[job.ticket] = Ticket()
                self._results[job.ticket] = Future()
        return estate

    def _clear_up(self, estate: Estate) -> None:
        job = None if estate.snapshot is None else estate.snapshot.load
        deadlines = self._charter.config.deadlines
        known = {model.info.load for model in self._catalogue}
        if job is not None and estate.transfer is not None:
            known.add(job.load)
        free = partial(free_strays, estate, frozenset(known), call_s=deadlines.call_s, close_s=deadlines.close_s)
        if job is None:
            free()
            return
        ticket, result = self._tickets[job.ticket], self._results[job.ticket]
        try:
            free()
            result.set_result(self._loader.resume(ticket, job, estate.transfer, _LOST))
        except BaseException as error:  # noqa: BLE001 - its client, who asks for it, is told
            result.set_exception(error)
        finally:
            self._records.keep(job.ticket, ticket.recorded())
            del self._tickets[job.ticket]
