"""One load after the other, from a request to a model of the catalogue, each step written down before it is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from time import monotonic, time

from megamind_ray.actors.catalogue import Catalogue, model_entry
from megamind_ray.actors.fencing import Epoch
from megamind_ray.actors.fleet import Fleet
from megamind_ray.actors.journal import Charter, Journal, JournaledLoad
from megamind_ray.actors.load_driver import LoadDriver
from megamind_ray.actors.load_report import build_report
from megamind_ray.actors.messages import LoadRequest
from megamind_ray.actors.preparing import open_checkpoint, prepare
from megamind_ray.actors.ticket import Ticket
from megamind_ray.actors.transfer import Transfer, TransferResult
from megamind_ray.actors.wire_choice import WireChooser
from megamind_ray.core.ids import LoadId, ModelName
from megamind_ray.core.report import Fault, LoadReport
from megamind_ray.errors import ClusterError

__all__ = ["Loader", "planner_lost"]


def planner_lost(where: str, action: str) -> Fault:
    """For the report of a load that was begun anew."""
    return Fault(kind="planner_lost", where=where, action=action)


class Loader:
    """Has loads done. Used by one thread at a time, under the planner's lock.

    Args:
        fleet: Who does them.
        catalogue: Where their models go.
        journal: Where they are written down.
        charter: Of the fleet.
        epoch: Of the planner.
        wires: Chooses how blocks go between nodes.
    """

    def __init__(
        self,
        fleet: Fleet,
        catalogue: Catalogue,
        journal: Journal,
        charter: Charter,
        epoch: Epoch,
        wires: WireChooser,
    ) -> None:
        self._fleet, self._catalogue, self._journal = fleet, catalogue, journal
        self._charter, self._epoch, self._wires = charter, epoch, wires
        self._num_loads = 0

    def load(
        self, ticket_id: str, ticket: Ticket, request: LoadRequest, *, faults: tuple[Fault, ...] = ()
    ) -> LoadReport:
        """Loads a checkpoint.

        Args:
            ticket_id: What its client knows it by.
            ticket: Where it stands.
            request: What to load.
            faults: What has gone wrong with it so far.

        Raises:
            MegamindError: It cannot be done or went wrong; nothing of it is left behind.
        """
        began_at_s, began_s = time(), monotonic()
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        if request.record and ticket.record is None:
            ticket.start_recording()
        with ticket.timed("manifest"):
            manifest = open_checkpoint(request)
            name = self._catalogue.free_name(request)
        prepared = prepare(
            ticket,
            request,
            manifest,
            load=self._new_id(name),
            fleet=self._fleet,
            catalogue=self._catalogue,
            wires=self._wires,
            fallback_rules=self._charter.fallback_rules,
        )
        job = JournaledLoad(
            ticket=ticket_id,
            asked=request,
            request=prepared.request,
            name=name,
            load=prepared.transfer.load,
            began_at_s=began_at_s,
            transfer_began_at_s=time(),
            started_at=started_at,
            seconds=dict(ticket.seconds),
            notes=prepared.notes,
            record=ticket.record,
            faults=faults,
        )
        try:
            self._journal.begin(job, prepared.transfer)
        except ClusterError as error:
            self._end_failed(error)  # else whatever is written next would say that it is under way
            raise
        return self._carry_out(ticket, job, prepared.transfer, LoadDriver.run, began_s=began_s)

    def resume(self, ticket: Ticket, job: JournaledLoad, transfer: Transfer | None, reason: str) -> LoadReport:
        """Takes up a load that an earlier planner began; where that cannot be, begins it anew.

        Args:
            ticket: Where it stands.
            job: What that planner wrote down.
            transfer: What it moves; None where nobody has that any more.
            reason: How that planner was lost.

        Raises:
            MegamindError: As ``load``.
        """
        if job.record is not None:
            ticket.resume_recording(job.record)
        why = "its plan was lost with the nodes that kept it"
        if transfer is not None:
            # By the wall clock: it is the only one that two planners have in common.
            began_s = monotonic() - max(0.0, time() - job.began_at_s)
            resume = partial(LoadDriver.resume, reason=reason)
            try:
                return self._carry_out(ticket, job, transfer, resume, began_s=began_s)
            except ClusterError as error:
                is_over = ticket.driver is not None and ticket.driver.was_given_up
                if ticket.cancelled is not None or is_over:
                    raise
                why = f"what was under way could not be taken up ({error})"
        fault = planner_lost(reason, f"the load was begun anew: {why}")
        ticket.driver = None
        return self.load(job.ticket, ticket, job.asked, faults=(*job.faults, fault))

    def _carry_out(
        self,
        ticket: Ticket,
        job: JournaledLoad,
        transfer: Transfer,
        move: Callable[[LoadDriver], TransferResult],
        *,
        began_s: float,
    ) -> LoadReport:
        before_s = max(0.0, time() - job.transfer_began_at_s)  # of the transfer, by an earlier planner
        try:
            with ticket.timed("transfer"):
                ticket.driver = LoadDriver(
                    transfer,
                    self._fleet,
                    job.request.config,
                    record=ticket.record,
                    began_s=began_s,
                    entries=job.entries,
                    journal=self._journal.took,
                )
                if ticket.cancelled is not None:
                    ticket.driver.cancel(ticket.cancelled)
                result = move(ticket.driver)
            ticket.phase = "finish"
            seconds = {"transfer": before_s + ticket.seconds["transfer"], "total": monotonic() - began_s}
            report = build_report(
                job.name,
                job.request,
                transfer.manifest,
                result,
                keep_blocks=transfer.keep_blocks,
                seconds={**job.seconds, **seconds},
                started_at=job.started_at,
                notes=job.notes,
            )
            report = replace(report, faults=(*job.faults, *report.faults))
        except BaseException as error:
            self._end_failed(error)
            raise
        entry = model_entry(transfer, result, report, job.request, self._fleet, job.ticket)
        self._catalogue.add(entry)
        try:
            self._journal.end(self._catalogue.journaled())
        except ClusterError:
            # Nobody would know of it after a loss of this planner, and no agent answers: that is no model to hand out.
            with suppress(ClusterError):  # the same again
                self._catalogue.remove(entry.info.name)
            raise
        return report

    def _end_failed(self, error: BaseException) -> None:
        try:
            self._journal.end(self._catalogue.journaled())
        except ClusterError as unwritten:
            error.add_note(f"and its end could not be written down: {unwritten}")

    def _new_id(self, name: ModelName) -> LoadId:
        """Ids of this planner's loads: none that an earlier one gave, of which actors may remember something."""
        self._num_loads += 1
        own = "" if self._epoch.number == 1 else f"{self._epoch.planner[:8]}."
        return LoadId(f"{name}#{own}{self._num_loads}")
