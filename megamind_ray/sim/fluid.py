"""Flows of bytes through shared resources, in virtual time.

Between two moments at which a flow begins or ends, all rates stay as they are; at such a moment they are shared out
anew (``shares``). Flows of a lane have equal rates, so one running sum of what each of them was served tells when each
is done: a flow ends when the sum has grown by its size.

**Resolution.** With many flows there is always one that begins or ends. So all that happens within ``resolution_s`` of
each other is handled together: each action at its own time, and rates are shared out once, at the end. A flow that
began meanwhile is credited with the time since its own beginning. Rates are thus up to ``resolution_s`` old, and
actions can be out of order by as much; times of a chain of steps add up exactly. 0 is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np

from megamind_ray.sim.clock import Action, Clock, Wait
from megamind_ray.sim.history import History
from megamind_ray.sim.shares import FloatArray, Lanes, fair_rates, usage

__all__ = ["Fluid"]

_SAME = 1e-12  # moments that differ by less, relatively, are one: sums of floats are not exact


@dataclass(slots=True, eq=False)
class _Flow:
    lane: int
    nbytes: float
    begin_s: float
    done: Action
    until: float = math.inf  # the lane's running sum at its end
    is_over: bool = False


@dataclass(slots=True)
class _Lane:
    """A lane's flows, by the running sum at which they end."""

    heap: list[tuple[float, int, _Flow]] = field(default_factory=list)
    num_flows: int = 0
    ended_bytes: float = 0.0

    def first(self) -> float:
        while self.heap and self.heap[0][2].is_over:
            heappop(self.heap)
        return self.heap[0][0] if self.heap else math.inf


class Fluid:
    """Flows over resources.

    Args:
        clock: Virtual time.
        capacity: Of each resource, in its units per second; may be infinite, for what is only watched.
        history: Where the use of resources over time is kept: of those from ``watched`` on.
        watched: The first resource that ``history`` has a column for.

    Attributes:
        resolution_s: See above; 0 unless it is set before the first flow.
    """

    def __init__(
        self,
        clock: Clock,
        capacity: Sequence[float],
        *,
        history: History | None = None,
        watched: int = 0,
    ) -> None:
        self._clock = clock
        self._capacity = np.array(capacity, np.float64)
        self.resolution_s = 0.0
        self._history = history
        self._watched = watched
        self._uses: list[tuple[tuple[int, float], ...]] = []
        self._caps: list[float] = []
        self._weights: list[float] = []
        self._table: Lanes | None = None
        self._lanes: list[_Lane] = []
        # By lane: flows under way, the rate of each, what each was served since the beginning, as of ``_shared_s``.
        self._count = np.zeros(0)
        self._rate = np.zeros(0)
        self._served = np.zeros(0)
        self._first = np.zeros(0)
        self._shared_s = 0.0
        self._window_s = 0.0
        self._fresh: list[_Flow] = []
        self._touched: set[int] = set()
        self._serial = count()

    def lane(self, uses: Sequence[tuple[int, float]], *, cap: float = math.inf, weight: float = 1.0) -> int:
        """A new kind of flow.

        Args:
            uses: (resource, units of it for each byte).
            cap: Most that one flow can have, bytes/s.
            weight: Share of one flow against others.

        Raises:
            ValueError: Nothing limits it, or a number is not positive.
        """
        pairs = tuple((resource, units) for resource, units in uses if units > 0)
        if not (cap > 0 and 0 < weight < math.inf):
            raise ValueError(f"cap {cap} and weight {weight} of a flow must be more than 0")
        if math.isinf(cap) and not any(math.isfinite(self._capacity[resource]) for resource, _ in pairs):
            raise ValueError("nothing limits this flow: give it a cap or a resource")
        self._uses.append(pairs)
        self._caps.append(cap)
        self._weights.append(weight)
        self._lanes.append(_Lane())
        self._table = None
        return len(self._uses) - 1

    def flow(self, lane: int, nbytes: float) -> Wait:
        """A wait until so many bytes have flowed."""

        def begin(resume: Action) -> Action:
            flow = _Flow(lane, nbytes, self._clock.now_s, resume)
            if nbytes <= 0:
                flow.is_over = True
                self._clock.at(self._clock.now_s, resume)
            else:
                self._fresh.append(flow)
            return lambda: self._call_off(flow)

        return begin

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self.advance():
            pass

    def advance(self) -> bool:
        """Handles what happens next, and all within the resolution of it; False where there is nothing."""
        self._share()
        ends_s = self._ends_s()
        begin_s = min(self._clock.next_s, float(ends_s.min(initial=math.inf)))
        if math.isinf(begin_s):
            return False
        until_s = max(begin_s * (1 + _SAME) + self.resolution_s, self._shared_s)
        for lane in np.flatnonzero(ends_s <= until_s).tolist():
            self._end_flows(lane, until_s)
        self._clock.run_until(until_s)
        self._window_s = until_s
        return True

    def units_moved(self) -> FloatArray:
        """Of each resource, the units that all flows took of it so far."""
        moved = np.zeros(len(self._capacity))
        since_s = self._clock.now_s - self._shared_s
        for lane, (uses, state) in enumerate(zip(self._uses, self._lanes, strict=True)):
            nbytes = state.ended_bytes
            if state.heap:
                served = self._served[lane] + self._rate[lane] * since_s
                nbytes += sum(
                    flow.nbytes - max(until - served, 0.0) for until, _, flow in state.heap if not flow.is_over
                )
            for resource, units in uses:
                moved[resource] += units * nbytes
        return moved

    def rates(self) -> tuple[FloatArray, FloatArray]:
        """Of each lane, how many flows it has and the rate of each, as they were last shared out."""
        return self._count.copy(), self._rate.copy()

    def _share(self) -> None:
        """Brings the sums up to date; if a flow began or ended, shares out the rates anew."""
        if not self._fresh and not self._touched:
            return
        self._grow()
        now_s, before_s = self._window_s, self._shared_s
        table = self._lanes_table()
        active = np.flatnonzero(self._count > 0)
        if now_s > before_s:
            if self._history is not None and len(active):
                used = usage(table.rows(active), self._rate[active], self._count[active], len(self._capacity))
                self._history.add(before_s, now_s, used[self._watched :])
            self._served[active] += self._rate[active] * (now_s - before_s)
        self._shared_s = now_s
        for flow in self._fresh:
            if not flow.is_over:
                self._lanes[flow.lane].num_flows += 1
                self._touched.add(flow.lane)
        for lane in self._touched:
            self._count[lane] = self._lanes[lane].num_flows
        active = np.flatnonzero(self._count > 0)
        self._rate[:] = 0.0
        self._rate[active] = fair_rates(self._capacity, table.rows(active), self._count[active])
        self._admit(now_s)

    def _admit(self, now_s: float) -> None:
        for flow in self._fresh:
            if flow.is_over:
                continue
            credit = self._rate[flow.lane] * (now_s - flow.begin_s)
            flow.until = float(self._served[flow.lane] + flow.nbytes - credit)
            heappush(self._lanes[flow.lane].heap, (flow.until, next(self._serial), flow))
        self._fresh.clear()
        for lane in self._touched:
            self._first[lane] = self._lanes[lane].first()
        self._touched.clear()

    def _ends_s(self) -> FloatArray:
        """Of each lane, when its next flow ends."""
        ends_s = np.full(len(self._first), np.inf)
        np.divide(self._first - self._served, self._rate, out=ends_s, where=self._rate > 0)
        return ends_s + self._shared_s

    def _end_flows(self, lane: int, until_s: float) -> None:
        """Hands the flows of a lane that end by then to the clock, each at its own time."""
        state, rate, served = self._lanes[lane], self._rate[lane], self._served[lane]
        while (first := state.first()) < math.inf:
            end_s = self._shared_s + (first - served) / rate
            if end_s > until_s:
                break
            flow = heappop(state.heap)[2]
            flow.is_over = True
            state.ended_bytes += flow.nbytes
            state.num_flows -= 1
            self._clock.at(float(end_s), flow.done)
        self._touched.add(lane)

    def _call_off(self, flow: _Flow) -> None:
        if flow.is_over:
            return
        flow.is_over = True
        if flow.until < math.inf:
            served = self._served[flow.lane] + self._rate[flow.lane] * (self._clock.now_s - self._shared_s)
            state = self._lanes[flow.lane]
            state.ended_bytes += flow.nbytes - max(float(flow.until - served), 0.0)
            state.num_flows -= 1
            self._touched.add(flow.lane)

    def _grow(self) -> None:
        more = len(self._lanes) - len(self._count)
        if more:
            self._count, self._rate, self._served = (
                np.append(column, np.zeros(more)) for column in (self._count, self._rate, self._served)
            )
            self._first = np.append(self._first, np.full(more, np.inf))

    def _lanes_table(self) -> Lanes:
        if self._table is None:
            self._table = Lanes.of(self._uses, np.array(self._caps), np.array(self._weights), self._capacity)
        return self._table
