"""Records of loads on their way: from agents and workers to the planner, which keeps them until clients fetch them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final

from megamind_ray import __version__
from megamind_ray.actors.boundary import settle
from megamind_ray.actors.transfer import Transfer
from megamind_ray.core.event_log import EventLog, LogEntry
from megamind_ray.core.events import Event
from megamind_ray.core.ids import NodeId, Rank
from megamind_ray.core.instructions import Instruction
from megamind_ray.core.load_machine import LoadFacts
from megamind_ray.core.recorder import Recorded, RecordSettings
from megamind_ray.core.recording import LoadRecord, RawRecord
from megamind_ray.core.tracks import NodeTracks, device_series

__all__ = ["LoadRecorder", "RecordBook", "collect"]

_MAX_KEPT: Final = 4


class LoadRecorder:
    """What the driver of a load writes down of it, and gathers from all who take part.

    Attributes:
        settings: For those who take part; None where they record nothing.
        transfer: What is moved, as it stands.

    Args:
        transfer: What is moved.
        facts: What the load's machine knows of it.
        settings: How the load is recorded, if it is.
        began_s: When it began, on the clock; None: now.
        clock: Monotonic.
        entries: What an earlier planner wrote down.
    """

    def __init__(
        self,
        transfer: Transfer,
        facts: LoadFacts,
        *,
        settings: RecordSettings | None,
        began_s: float | None,
        clock: Callable[[], float],
        entries: Sequence[LogEntry] = (),
    ) -> None:
        self.settings = None if settings is None else settings.shared_by(len(facts.nodes) + facts.num_ranks)
        self.transfer = transfer
        self._facts = facts
        self._began_s = clock() if began_s is None else began_s
        self._clock = clock
        self._entries: list[LogEntry] = list(entries)
        self._pages: list[Recorded] = []

    @property
    def entries(self) -> Sequence[LogEntry]:
        """The log so far."""
        return self._entries

    def took(self, event: Event, said: Sequence[Instruction]) -> float:
        """The machine took an event just now, and said this to it.

        Returns:
            When that was, in seconds after the start of the load.
        """
        at_s = self._now_s()
        self._entries.append(LogEntry(at_s=at_s, event=event, instructions=tuple(said)))
        return at_s

    def collect(self, agents: Mapping[NodeId, Any], workers: Mapping[Rank, Any], until_s: float) -> None:
        """Ends all recordings of the load and gathers them.

        Args:
            agents: Handles by node.
            workers: Handles by rank.
            until_s: When to give up, on the clock.
        """
        if self.settings is None:
            return
        load = self.transfer.load
        asks: dict[str, Callable[[int], Any]] = {
            f"agent of node {node}": partial(agent.recorded.remote, load) for node, agent in agents.items()
        }
        asks |= {f"rank {rank}": partial(worker.recorded.remote, load) for rank, worker in workers.items()}
        self._pages += collect(asks, until_s=until_s, now_s=self._now_s(), clock=self._clock)

    def record(self, *parts: Recorded) -> RawRecord:
        """What there is of the load.

        Args:
            parts: What others recorded of it.
        """
        transfer = self.transfer
        ranks = transfer.plan.tables["ranks"].select(["rank", "node", "arena_bytes"]).to_pylist()
        pools = {NodeTracks.of(node).host: float(nbytes) for node, nbytes in transfer.credit_bytes.items()}
        arenas = {device_series(row["rank"]): float(row["arena_bytes"]) for row in ranks}
        return RawRecord(
            parts=(*parts, *self._pages),
            events=EventLog(facts=self._facts, entries=tuple(self._entries), load=transfer.load, release=__version__),
            node_of_rank={row["rank"]: row["node"] for row in ranks},
            limits=pools | arenas,
        )

    def _now_s(self) -> float:
        return self._clock() - self._began_s


def collect(
    asks: Mapping[str, Callable[[int], Any]],
    *,
    until_s: float,
    now_s: float,
    clock: Callable[[], float] = monotonic,
) -> list[Recorded]:
    """What processes recorded, page by page, all of them at a time.

    Args:
        asks: By name, how to ask a process for its page that begins with some row.
        until_s: When to give up, on ``clock``. Who has not answered by then, or is gone, is named by a mark.
        now_s: Time of such marks, in seconds after the start of the load.
        clock: Monotonic.
    """
    pages: list[Recorded] = []
    first = dict.fromkeys(asks, 0)
    while first:
        answers = settle(
            [asks[name](row) for name, row in first.items()],
            timeout_s=max(0.0, until_s - clock()),
            what="collecting what was recorded",
        )
        following: dict[str, int] = {}
        for name, answer in zip(first, answers, strict=True):
            if not isinstance(answer, Recorded):
                pages.append(Recorded(marks=((now_s, "not_recorded", f"{name}: {answer}"),)))
                continue
            pages.append(answer)
            if answer.next is not None:
                following[name] = answer.next
        first = following
    return pages


class RecordBook:
    """What was recorded of the latest loads. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, RawRecord] = {}

    def keep(self, ticket_id: str, record: RawRecord | None) -> None:
        """Keeps a record until it is taken, or newer ones of clients that never came for theirs push it out."""
        if record is None:
            return
        with self._lock:
            self._records[ticket_id] = record
            while len(self._records) > _MAX_KEPT:
                del self._records[next(iter(self._records))]

    def take(self, ticket_id: str) -> LoadRecord | None:
        """The record of a load, once; None where there is none."""
        with self._lock:
            record = self._records.pop(ticket_id, None)
        return None if record is None else record.assembled()
