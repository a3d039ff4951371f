"""Nodes that leave a fleet as planned: marked at once, emptied when no load is under way, then let go (0028)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Final

from megamind_ray.actors.catalogue import Catalogue
from megamind_ray.actors.emptying import Emptying
from megamind_ray.actors.fleet import Fleet
from megamind_ray.actors.messages import DrainRequest
from megamind_ray.actors.spawner import NodeResources
from megamind_ray.config import Config
from megamind_ray.core.departure import DrainReport
from megamind_ray.core.ids import NodeId
from megamind_ray.core.node_names import NodeNames, find_node
from megamind_ray.core.progress import Progress
from megamind_ray.core.tracks import short_node
from megamind_ray.errors import ClusterError, RequestError

__all__ = ["Departures"]

_LOOK_S: Final = 0.1


@dataclass(slots=True, eq=False)
class _Departure:
    """A node that is to leave.

    Attributes:
        names: What it is called.
        force, wait_s: As the request has it.
        emptying: Does the work, when its turn has come.
        cancelled: Why it was called off, if it was.
        ended: Set while no drain of it runs.
        report: What came of it, when the node has left.
    """

    names: NodeNames
    force: bool = False
    wait_s: float = 0.0
    emptying: Emptying | None = None
    cancelled: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    report: DrainReport | None = None

    def __post_init__(self) -> None:
        self.ended.set()

    def raise_if_under_way(self) -> None:
        if not self.ended.is_set():
            raise RequestError(
                f"node {self.names} is being drained already; wait for that to end, or take it back with "
                f"`megamind drain {short_node(self.names.node)} --cancel`"
            )

    def raise_if_cancelled(self) -> None:
        if self.cancelled is not None:
            raise ClusterError(f"node {self.names}: draining it was called off: {self.cancelled}")


class Departures:
    """Which nodes of a fleet are leaving. All methods may be called from any thread.

    Args:
        fleet: Whose nodes.
        catalogue: What is loaded on them.
        moves: Held by whatever moves bytes in this fleet.
        config: Deadlines, and what pools take.
        on_marked: Told which nodes leave whenever that changes, so that it outlives the planner.
    """

    def __init__(
        self,
        fleet: Fleet,
        catalogue: Catalogue,
        moves: threading.Lock,
        config: Config,
        *,
        on_marked: Callable[[tuple[NodeId, ...]], None] = lambda _: None,
    ) -> None:
        self._on_marked = on_marked
        self._fleet, self._catalogue, self._moves, self._config = fleet, catalogue, moves, config
        self._lock = threading.Lock()
        self._departures: dict[NodeId, _Departure] = {}
        self._tickets: dict[str, _Departure] = {}
        self._num_waiting = 0
        self._none_waits = threading.Condition(self._lock)

    @property
    def leaving(self) -> tuple[NodeId, ...]:
        """Nodes that are to leave, or have left and are still in the cluster."""
        return tuple(sorted(self._fleet.leaving))

    def restore(self, nodes: Iterable[NodeId]) -> None:
        """Nodes that an earlier planner had marked, as far as they are still there."""
        rows = {row.node: row for row in self._fleet.cluster_nodes()}
        with self._lock:
            for node in rows.keys() & set(nodes):
                self._departures[node] = _Departure(_names(rows[node]))
                self._fleet.leaving.add(node)

    def let_first(self, timeout_s: float) -> bool:
        """Whether no drain waits for its turn; where one does, loads that queue let it go first.

        Args:
            timeout_s: Longest wait for that.
        """
        with self._lock:
            return self._none_waits.wait_for(lambda: not self._num_waiting, timeout_s)

    def progress(self, ticket_id: str) -> Progress | None:
        """How far a drain is: bytes copied, of those that only its node keeps. None of a ticket that is not ours."""
        departure = self._tickets.get(ticket_id)
        if departure is None:
            return None
        return Progress(phase="queued") if departure.emptying is None else departure.emptying.progress

    def cancel(self, ticket_id: str, reason: str) -> bool:
        """Calls a drain off; its node stays marked. False of a ticket that is none of ours, or has ended."""
        departure = self._tickets.get(ticket_id)
        if departure is None:
            return False
        departure.cancelled = reason
        return True

    def mark(self, ticket_id: str, request: DrainRequest) -> None:
        """From now on no load is planned with a node, whatever comes of draining it.

        Raises:
            RequestError: No such node, one that cannot leave, or one that is being drained.
        """
        rows = self._fleet.cluster_nodes()
        with self._lock:
            node = self._find(request.node, rows)
            departure = self._departures.get(node)
            if departure is None:
                (row,) = (row for row in rows if row.node == node)
                self._require_may_leave(row, rows)
                departure = self._departures[node] = _Departure(_names(row))
                self._fleet.leaving.add(node)
            departure.raise_if_under_way()
            departure.force, departure.wait_s, departure.cancelled = request.force, request.wait_s, None
            self._tickets[ticket_id] = departure
        self._on_marked(self.leaving)

    def drain(self, ticket_id: str) -> DrainReport:
        """Empties a node that was marked, and ends the fleet's actors there. Of one that has left, the same report.

        Raises:
            RequestError: Models have ranks there, or a load is under way that is not to be waited for.
            CapacityError: Blocks that it alone keeps have no room elsewhere.
            ClusterError: A load was under way for too long, it was called off, or blocks were lost with the node.
        """
        begin_s = monotonic()
        departure = self._tickets.pop(ticket_id, None)
        if departure is None:
            raise ClusterError("the planner was lost after it had marked the node; drain it once more")
        with self._lock:
            if departure.report is not None:
                return departure.report
            departure.raise_if_under_way()
            departure.ended.clear()
            self._tickets[ticket_id] = departure
        try:
            with self._turn(departure):
                waited_s = monotonic() - begin_s
                departure.emptying = Emptying(
                    departure.names, self._fleet, self._catalogue, self._config, force=departure.force
                )
                report = departure.emptying.run(departure.raise_if_cancelled)
            departure.report = replace(report, seconds=monotonic() - begin_s, waited_s=waited_s)
            return departure.report
        finally:
            self._tickets.pop(ticket_id, None)
            departure.emptying = None
            departure.ended.set()

    def undrain(self, text: str) -> NodeId:
        """Takes a node back: a drain that is under way is called off, and the next load uses the node again.

        Raises:
            RequestError: No such node, or it is not leaving.
            ClusterError: The drain does not end.
        """
        node = self._find(text)
        departure = self._departures.get(node)
        if departure is None:
            raise RequestError(
                f"node {text!r} is not leaving fleet {self._fleet.name!r}: there is nothing to take back"
            )
        departure.cancelled = "it was taken back"
        close_s = self._config.deadlines.close_s + self._config.deadlines.call_s
        if not departure.ended.wait(close_s):
            raise ClusterError(f"node {departure.names}: its drain has not ended within {close_s:g} s; ask once more")
        with self._lock:
            self._departures.pop(node, None)
            self._fleet.leaving.discard(node)
        self._on_marked(self.leaving)
        return node

    def _find(self, text: str, rows: list[NodeResources] | None = None) -> NodeId:
        return find_node(text, [_names(row) for row in (self._fleet.cluster_nodes() if rows is None else rows)])

    def _require_may_leave(self, row: NodeResources, rows: list[NodeResources]) -> None:
        fleet, names = self._fleet, _names(row)
        if row.node == fleet.here:
            raise RequestError(
                f"node {names}: the planner of fleet {fleet.name!r} runs there, and it does not move; end the "
                f"fleet with `megamind down --fleet {fleet.name}`, and start it from another node"
            )
        if row.is_head:
            raise RequestError(f"node {names}: Ray's head runs there, and the cluster ends with it; it cannot leave")
        staying = [one for one in rows if one.num_gpus and one.node != row.node and one.node not in fleet.leaving]
        if row.num_gpus and not staying:
            raise RequestError(
                f"node {names} is the last one with GPUs that fleet {fleet.name!r} has; add another one first, or end "
                f"the fleet with `megamind down --fleet {fleet.name}`"
            )

    @contextmanager
    def _turn(self, departure: _Departure) -> Iterator[None]:
        """While no load is under way, and none begins."""
        until_s = monotonic() + departure.wait_s
        with self._lock:
            self._num_waiting += 1
        try:
            while not self._moves.acquire(timeout=_LOOK_S):
                departure.raise_if_cancelled()
                if monotonic() > until_s:
                    what = f"node {departure.names}: a load is under way"
                    if not departure.wait_s:
                        raise RequestError(f"{what}; drain the node when it has ended, or let --wait wait for it")
                    raise ClusterError(
                        f"{what}, and has not ended within {departure.wait_s:g} s; drain the node once more"
                    )
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._none_waits.notify_all()
        try:
            yield
        finally:
            self._moves.release()


def _names(row: NodeResources) -> NodeNames:
    return NodeNames(node=row.node, address=row.address, host=row.host)
