"""Where a load stands, by its log: the machine, and what follows from all that it has said (0027). No Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from megamind_ray.actors.fleet import GpuKey
from megamind_ray.actors.messages import Reroute
from megamind_ray.actors.rerouting import Routes
from megamind_ray.actors.transfer import Transfer
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import LogEntry
from megamind_ray.core.ids import ExtentId, NodeId, Rank
from megamind_ray.core.load_machine import LoadMachine
from megamind_ray.core.report import Fault
from megamind_ray.errors import MegamindError

__all__ = ["Standing"]


class Standing:
    """A load that has just been planned, or one that a planner's successor finds.

    Attributes:
        machine: Decides.
        transfer: What is moved, with ranks where they live now, read by whom it is by now.
        entries: The log so far.
        gpu_of: The place of each rank.
        given_up: Nodes that were.
        left: Places that ranks had there.
        faults: For the report.
        error: Why the load was given up, if it was.

    Args:
        transfer: As it was planned.
        max_worker_restarts: Of the load.
        entries: What the machine was told so far.
    """

    def __init__(self, transfer: Transfer, *, max_worker_restarts: int, entries: Iterable[LogEntry] = ()) -> None:
        self.machine = LoadMachine(transfer.facts(max_worker_restarts=max_worker_restarts))
        self.transfer = transfer
        self.entries: list[LogEntry] = []
        ranks = transfer.plan.tables["ranks"].to_pylist()
        self.gpu_of: dict[Rank, GpuKey] = {Rank(row["rank"]): (NodeId(row["node"]), row["gpu"]) for row in ranks}
        self.given_up: set[NodeId] = set()
        self.left: list[GpuKey] = []
        self.faults: list[Fault] = []
        self.error: MegamindError | None = None
        self._routes = Routes(transfer.plan)
        self._heard: set[tuple[ExtentId, NodeId]] = set()
        for entry in entries:
            self._take_again(entry)

    def drop(self, drop: ins.DropNode) -> Mapping[NodeId, Reroute]:
        """Ranks of a node that is given up live elsewhere; what each of the nodes that remain is to be told."""
        self.given_up.add(drop.node)
        routes = self._routes.drop(drop, self.machine.nodes)
        self.transfer = replace(self.transfer, plan=self._routes.plan)
        for move in drop.moves:
            key = (move.node, move.gpu)
            if self.gpu_of[move.rank] != key:
                self.left.append(self.gpu_of[move.rank])
                self.gpu_of[move.rank] = key
        return routes

    def give(self, reads: ins.ReadInstead) -> Mapping[NodeId, tuple[NodeId, ...]]:
        """Another node than planned reads some extents; by node, from whom it is to take their blocks."""
        sources = self._routes.give(reads, self.machine.nodes)
        self.transfer = replace(self.transfer, plan=self._routes.plan)
        return sources

    def was_heard(self, event: ev.Event) -> bool:
        """Whether this is what was reported to an earlier planner: agents and workers report all from the beginning."""
        if not isinstance(event, ev.ExtentFailed) or (event.extent, event.node) not in self._heard:
            return False
        self._heard.remove((event.extent, event.node))
        return True

    def _take_again(self, entry: LogEntry) -> None:
        said = tuple(self.machine.handle(entry.event))
        self.entries.append(replace(entry, instructions=said))
        if isinstance(entry.event, ev.ExtentFailed):
            self._heard.add((entry.event.extent, entry.event.node))
        for one in said:
            match one:
                case ins.DropNode():
                    self.drop(one)
                case ins.ReadInstead():
                    self.give(one)
                case ins.RecordFault(fault=fault):
                    self.faults.append(replace(fault, at_s=entry.at_s))
                case ins.AbortLoad(error=error):
                    self.error = error
