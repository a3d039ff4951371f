"""What a planner's successor must know: written by the planner, kept by the node agents (0027). No Ray but its wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import ray
from ray import cloudpickle

from megamind_ray.actors.boundary import settle
from megamind_ray.actors.fencing import Epoch
from megamind_ray.actors.messages import Lifetime, LoadRequest, ModelInfo
from megamind_ray.actors.transfer import Transfer
from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core.event_log import LogEntry
from megamind_ray.core.ids import LoadId, ModelName, NodeId
from megamind_ray.core.recorder import RecordSettings
from megamind_ray.core.report import Fault, LoadReport
from megamind_ray.errors import ClusterError, MegamindError
from megamind_ray.planning import RuleSource

__all__ = [
    "Charter",
    "Journal",
    "JournalCopy",
    "JournaledLoad",
    "JournaledModel",
    "KeptJournal",
    "Snapshot",
    "Stamp",
    "is_journaled",
    "journaled",
    "unpickled",
]

# A plan is large, so not everybody keeps it; a planner's loss together with that of so many nodes starts a load anew.
_TRANSFER_COPIES: Final = 3
_WRITE_S: Final = 2.0  # how long a write waits for agents once one has it; the others get it when they can

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Charter:
    """What a fleet was started with.

    Attributes:
        fleet: Its name.
        lifetime: How long it lives.
        config: Of the planner itself; loads bring their own.
        device_memory_bytes: Arena budget of each worker; None: what was free.
        owner: What the client that started it called itself.
        fallback_rules: Rules for families that planning has none for.
    """

    fleet: str
    lifetime: Lifetime
    config: Config
    device_memory_bytes: int | None = None
    owner: str = ""
    fallback_rules: RuleSource | None = None


@dataclass(frozen=True, slots=True, order=True)
class Stamp:
    """When a snapshot was written: by which planner, and as which of its snapshots."""

    epoch: Epoch = field(default_factory=Epoch)
    serial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JournaledModel:
    """A loaded model.

    Attributes:
        info: With the place of each rank.
        report: Of its load.
        ticket: Of its load.
    """

    info: ModelInfo
    report: LoadReport
    ticket: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournaledLoad:
    """A load from the moment when its plan is made.

    Attributes:
        ticket: What its client knows it by.
        asked: What the client asked for.
        request: The same, with what was left to the planner decided.
        name: Of the model that it makes.
        load: Its id.
        began_at_s, transfer_began_at_s: Wall clock.
        started_at: ISO 8601, UTC.
        seconds: What its phases took, up to the transfer.
        notes: For its report.
        record: How it is recorded, if it is.
        faults: What went wrong before there was a plan.
        entries: What its machine was told that a successor could not find out by itself.
    """

    ticket: str
    asked: LoadRequest
    request: LoadRequest
    name: ModelName
    load: LoadId
    began_at_s: float
    transfer_began_at_s: float
    started_at: str
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()
    record: RecordSettings | None = None
    faults: tuple[Fault, ...] = ()
    entries: tuple[LogEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything but the plan of the load under way.

    Attributes:
        charter: Of the fleet.
        models: What is loaded.
        load: What is under way.
        leaving: Nodes that are to leave (0028).
    """

    charter: Charter
    models: tuple[JournaledModel, ...] = ()
    load: JournaledLoad | None = None
    leaving: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptJournal:
    """What one agent keeps.

    Attributes:
        stamp: Of the snapshot.
        snapshot: Pickled; None where there is none yet.
        load: The load under way.
        transfer: Pickled, what that moves; None where others keep it.
    """

    stamp: Stamp = field(default_factory=Stamp)
    snapshot: bytes | None = None
    load: LoadId | None = None
    transfer: bytes | None = None


class JournalCopy:
    """An agent's copy. Any thread.

    Attributes:
        abandoned: Tickets that ``abandon`` was told.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = KeptJournal()
        self.abandoned: frozenset[str] = frozenset()

    def abandon(self, ticket: str) -> LoadId | None:
        """Nobody waits for a load any more, and there is no planner to be told; the load, if it is under way."""
        with self._lock:
            snapshot = self._kept.snapshot
            load = None if snapshot is None else unpickled(Snapshot, snapshot).load
            if load is None or load.ticket != ticket:
                return None
            self.abandoned |= {ticket}
            return load.load

    @property
    def kept(self) -> KeptJournal:
        """The newest that was written here."""
        with self._lock:
            return self._kept

    def keep(self, written: KeptJournal) -> None:
        """Takes a newer snapshot; the plan of a load stays as long as the load is under way."""
        with self._lock:
            if written.stamp < self._kept.stamp:
                # The plan takes longer than what was written after it.
                if written.transfer is not None and written.load == self._kept.load and self._kept.transfer is None:
                    self._kept = replace(self._kept, transfer=written.transfer)
                return
            if written.transfer is None and written.load is not None and written.load == self._kept.load:
                written = replace(written, transfer=self._kept.transfer)
            self._kept = written


def is_journaled(event: ev.Event) -> bool:
    """Whether an event is written before anything is done about it.

    A successor finds out by itself which ranks are done and which extents failed: workers and agents still say so.
    """
    return not isinstance(event, ev.LoadStarted | ev.RankDone | ev.ExtentFailed)


def journaled(entries: Iterable[LogEntry]) -> tuple[LogEntry, ...]:
    """What of a load's log a successor begins with: all but the ranks that are done, whose results it asks for."""
    return tuple(replace(one, instructions=()) for one in entries if not isinstance(one.event, ev.RankDone))


class Journal:
    """Writes snapshots. Any thread.

    Args:
        charter: Of the fleet.
        epoch: Of the planner.
        agents: Handles by node, as they are when it is asked.
        here: The planner's node: others are to have the plan first.
    """

    def __init__(
        self, charter: Charter, epoch: Epoch, agents: Callable[[], Mapping[NodeId, Any]], *, here: NodeId
    ) -> None:
        self._epoch, self._agents, self._here = epoch, agents, here
        self._lock = threading.Lock()
        self._serial = 0
        self._now = Snapshot(charter=charter)

    def restore(self, snapshot: Snapshot) -> None:
        """Goes on where an earlier planner's journal ends."""
        with self._lock:
            self._now = snapshot

    def begin(self, load: JournaledLoad, transfer: Transfer) -> None:
        """A load has a plan and is about to move bytes.

        Raises:
            ClusterError: No agent took it.
        """
        with self._lock:
            self._write(replace(self._now, load=load), transfer)

    def took(self, entries: Iterable[LogEntry]) -> None:
        """The machine of the load under way took an event that ``is_journaled``; ``entries`` is its whole log.

        Raises:
            ClusterError: No agent took it.
        """
        with self._lock:
            assert self._now.load is not None
            self._write(replace(self._now, load=replace(self._now.load, entries=journaled(entries))))

    def end(self, models: Iterable[JournaledModel]) -> None:
        """The load under way is over, well or not; these are the models from now on.

        Raises:
            ClusterError: No agent took it.
        """
        with self._lock:
            self._write(replace(self._now, load=None, models=tuple(models)))

    def note(self, *, models: Iterable[JournaledModel] | None = None, leaving: Iterable[NodeId] | None = None) -> None:
        """What is loaded, or which nodes are to leave, changes beside whatever load is under way.

        Raises:
            ClusterError: No agent took it.
        """
        with self._lock:
            now = self._now
            now = now if models is None else replace(now, models=tuple(models))
            self._write(now if leaving is None else replace(now, leaving=tuple(leaving)))

    def _write(self, now: Snapshot, transfer: Transfer | None = None) -> None:
        self._now = now
        agents = dict(self._agents())
        if not agents:
            return  # nobody to remember, and nothing to remember of them
        self._serial += 1
        written = KeptJournal(
            stamp=Stamp(self._epoch, self._serial),
            snapshot=cloudpickle.dumps(now),
            load=None if now.load is None else now.load.load,
        )
        plan = None if transfer is None else ray.put(cloudpickle.dumps(transfer))
        elsewhere = sorted(agents, key=lambda node: (node == self._here, node))
        refs = [
            agents[node].keep_journal.remote(written, plan if number < _TRANSFER_COPIES else None)
            for number, node in enumerate(elsewhere)
        ]
        charter = now.charter
        what = f"fleet {charter.fleet!r}: writing its journal"
        # A plan has to be with somebody who was sent it.
        num_needed = len(refs) if plan is None else min(len(refs), _TRANSFER_COPIES)
        answers = settle(refs, timeout_s=_WRITE_S, what=what)[:num_needed]
        if all(isinstance(answer, MegamindError) for answer in answers):
            answers = settle(refs[:num_needed], timeout_s=charter.config.deadlines.call_s, what=what)
        if all(isinstance(answer, MegamindError) for answer in answers):
            raise ClusterError(f"{what}: none of {num_needed} node agents took it ({answers[0]})")


def unpickled(kind: type[Value], data: bytes) -> Value:
    """What a journal has, of this release's kind."""
    value = cloudpickle.loads(data)
    assert isinstance(value, kind), type(value)
    return value
