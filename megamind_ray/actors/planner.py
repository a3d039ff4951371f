"""The planner: has loads done one after the other, and knows what is loaded. One actor per fleet."""

from __future__ import annotations

import threading
import uuid
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final

from megamind_ray import __version__
from megamind_ray.actors.catalogue import Catalogue, model_entry
from megamind_ray.actors.departures import Departures
from megamind_ray.actors.fleet import Fleet, Spawner
from megamind_ray.actors.groups import in_group
from megamind_ray.actors.load_driver import LoadDriver
from megamind_ray.actors.load_report import build_report
from megamind_ray.actors.messages import DrainRequest, Lifetime, LoadRequest, ModelInfo, PlannerFacts
from megamind_ray.actors.preparing import open_checkpoint, prepare
from megamind_ray.actors.recording import RecordBook
from megamind_ray.actors.ticket import Ticket
from megamind_ray.actors.wire_choice import AgentNodes, WireChooser
from megamind_ray.config import Config
from megamind_ray.core.departure import DrainReport
from megamind_ray.core.ids import LoadId, NodeId
from megamind_ray.core.progress import Progress
from megamind_ray.core.recording import LoadRecord
from megamind_ray.core.report import LoadReport
from megamind_ray.core.topology import Topology
from megamind_ray.errors import RequestError
from megamind_ray.planning import RuleSource

__all__ = ["Planner"]

_CANCEL_EVERY_S: Final = 0.1  # how often a load that queues looks whether it is still wanted


class Planner:
    """Plans, has executed, and remembers. Methods run on threads of their concurrency groups (see ``runtime``)."""

    def __init__(
        self,
        fleet: str,
        *,
        lifetime: Lifetime,
        config: Config,
        spawner: Spawner,
        device_memory_bytes: int | None = None,
        owner: str = "",
        fallback_rules: RuleSource | None = None,
    ) -> None:
        self._name = fleet
        self._owner = owner
        self._lifetime: Lifetime = lifetime
        self._config = config
        self._device_memory_bytes = device_memory_bytes
        self._fallback_rules = fallback_rules
        self._fleet = Fleet(
            fleet, lifetime=lifetime, config=config, spawner=spawner, device_memory_bytes=device_memory_bytes
        )
        self._wires = WireChooser(AgentNodes(self._fleet))
        self._moves = threading.Lock()  # one load or unload at a time
        self._calls = threading.Lock()  # collective calls enter all ranks in one order
        self._tickets: dict[str, Ticket] = {}
        self._catalogue = Catalogue(self._fleet, config)
        self._departures = Departures(self._fleet, self._catalogue, self._moves, config)
        self._records = RecordBook()
        self._num_loads = 0
        # Load ids begin again with each planner; what outlives one is marked with this.
        self._incarnation = uuid.uuid4().hex

    @in_group("control")
    def hello(self, version: str) -> PlannerFacts:
        """Greets a client.

        Raises:
            RequestError: The client is of another release.
        """
        if version != __version__:
            raise RequestError(
                f"fleet {self._name!r} runs megamind-ray {__version__}, this client is {version}; use the same "
                f"release, or end the fleet with `megamind down --fleet {self._name}` and start it anew"
            )
        return PlannerFacts(
            version=__version__,
            fleet=self._name,
            lifetime=self._lifetime,
            owner=self._owner,
            device_memory_bytes=self._device_memory_bytes,
            leaving=self._departures.leaving,
        )

    @in_group("moves")
    def load(self, ticket_id: str, request: LoadRequest) -> LoadReport:
        """Loads a checkpoint onto the fleet.

        Raises:
            MegamindError: It cannot be done or went wrong; nothing of it is left behind.
        """
        ticket = self._tickets.setdefault(ticket_id, Ticket())
        try:
            while not self._departures.let_first(_CANCEL_EVERY_S) or not self._moves.acquire(timeout=_CANCEL_EVERY_S):
                ticket.raise_if_cancelled()
            try:
                return self._load(ticket, request)
            finally:
                self._moves.release()
                self._records.keep(ticket_id, ticket.recorded())
        finally:
            self._tickets.pop(ticket_id, None)

    @in_group("control")
    def record(self, ticket_id: str) -> LoadRecord | None:
        """What was recorded of a load that has ended, well or not; once. None where nothing was to be recorded."""
        return self._records.take(ticket_id)

    @in_group("control")
    def progress(self, ticket_id: str) -> Progress:
        """How far a load or a drain is. A ticket that is not there yet, or no more, is ``queued`` with no bytes."""
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
        if self._departures.cancel(ticket_id, reason):
            return
        ticket = self._tickets.setdefault(ticket_id, Ticket())
        ticket.cancelled = reason
        if ticket.driver is not None:
            ticket.driver.cancel(reason)

    @in_group("control")
    def models(self) -> tuple[ModelInfo, ...]:
        """What is loaded."""
        return self._catalogue.infos()

    @in_group("control")
    def report(self, name: str) -> LoadReport:
        """What loading a model moved.

        Raises:
            RequestError: No such model.
        """
        return self._catalogue.get(name).report

    @in_group("moves")
    def topology(self) -> Topology:
        """The fleet's hardware now."""
        with self._moves:
            self._fleet.refresh()
            return self._fleet.topology()

    @in_group("moves")
    def unload(self, name: str) -> None:
        """Frees a model's arenas and kept blocks.

        Raises:
            RequestError: No such model, or user code still holds its tensors; it is unloaded all the same, and their
                memory comes back when they are forgotten.
        """
        with self._moves:
            self._catalogue.remove(name)

    @in_group("control")
    def mark_leaving(self, ticket_id: str, request: DrainRequest) -> None:
        """Marks a node that is to leave: no load that begins from now on uses it. ``drain`` empties it.

        Raises:
            RequestError: No such node, one that cannot leave, or one that is being drained.
        """
        self._departures.mark(ticket_id, request)

    @in_group("moves")
    def drain(self, ticket_id: str) -> DrainReport:
        """Empties a node that was marked, and ends the fleet's actors there (see ``Departures.drain``)."""
        return self._departures.drain(ticket_id)

    @in_group("control")
    def undrain(self, node: str) -> NodeId:
        """Takes a node back that is leaving (see ``Departures.undrain``)."""
        return self._departures.undrain(node)

    @in_group("control")
    def run(self, name: str, payload: bytes) -> list[Any]:
        """Submits a function to every rank of a model; returns the refs of the results, by rank.

        Raises:
            RequestError: No such model.
            ClusterError: A worker that held a rank is gone.
        """
        with self._calls:
            return self._catalogue.submit(name, payload, rendezvous=self._incarnation)

    @in_group("control")
    def shut_down(self) -> None:
        """Ends all actors of the fleet but this one."""
        for ticket in list(self._tickets.values()):
            ticket.cancelled = "the fleet was taken down"
            if ticket.driver is not None:
                ticket.driver.cancel(ticket.cancelled)
        self._fleet.shut_down()
        self._catalogue.clear()

    def _load(self, ticket: Ticket, request: LoadRequest) -> LoadReport:
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        begin = monotonic()
        if request.record:
            ticket.start_recording()
        with ticket.timed("manifest"):
            manifest = open_checkpoint(request)
            name = self._catalogue.free_name(request)
        self._num_loads += 1
        prepared = prepare(
            ticket,
            request,
            manifest,
            load=LoadId(f"{name}#{self._num_loads}"),
            fleet=self._fleet,
            catalogue=self._catalogue,
            wires=self._wires,
            fallback_rules=self._fallback_rules,
        )
        request, transfer = prepared.request, prepared.transfer
        with ticket.timed("transfer"):
            ticket.driver = LoadDriver(transfer, self._fleet, request.config, record=ticket.record, began_s=begin)
            if ticket.cancelled is not None:
                ticket.driver.cancel(ticket.cancelled)
            result = ticket.driver.run()
        ticket.phase = "finish"
        report = build_report(
            name,
            request,
            manifest,
            result,
            keep_blocks=transfer.keep_blocks,
            seconds=ticket.seconds | {"total": monotonic() - begin},
            started_at=started_at,
            notes=prepared.notes,
        )
        self._catalogue.add(model_entry(transfer, result, report, request, self._fleet))
        return report
