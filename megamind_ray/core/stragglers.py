"""Readers that are much slower than the others: which, what they keep, who reads the rest (docs/design/0029). Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Final, Protocol

from megamind_ray.core.ids import ExtentId, NodeId
from megamind_ray.core.report import Fault
from megamind_ray.errors import listed
from megamind_ray.units import format_bytes, format_rate

__all__ = [
    "Limits",
    "ReadProgress",
    "ReaderPace",
    "SlowReader",
    "StragglerWatch",
    "bytes_to_keep",
    "describe_straggler",
    "share_reads",
]

_MAX_SAMPLES: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProgress:
    """How far a node is with the extents that it was given to read.

    Attributes:
        done_bytes: Of extents whose blocks are all in its pool, or that it gave up.
        begun_bytes: Of extents that it is at.
        waiting_bytes: Of extents that nobody has asked storage for.
    """

    done_bytes: int = 0
    begun_bytes: int = 0
    waiting_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        return self.begun_bytes + self.waiting_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderPace:
    """What a node has still to read, and how fast it did of late.

    Attributes:
        node: Which.
        left_bytes: Not done.
        begun_bytes: Of those, in extents that it is at.
        bytes_per_s: Of the slow reader the most that it can have done, of others the mean; 0 where none came.
    """

    node: NodeId
    left_bytes: int
    begun_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class SlowReader:
    """A node that holds up the load, and how fast all who read are."""

    node: NodeId
    paces: tuple[ReaderPace, ...]


@dataclass(frozen=True, slots=True)
class _Sample:
    """All readers at one moment; ``active_s`` is for how long each had something to read until then."""

    at_s: float
    progress: Mapping[NodeId, ReadProgress]
    active_s: Mapping[NodeId, float]


@dataclass(frozen=True, slots=True)
class _Pace:
    """Bytes per second over some time: the least and the most that were certainly read, and what was seen to be done.

    Reads that are under way blur what is seen: sixteen requests that share a slow link end together, after a long time
    in which nothing seems to happen.
    """

    least: float
    mean: float
    most: float
    is_judged: bool


class Limits(Protocol):
    """When a reader is slow, and how often that is told: ``config.straggler``."""

    @property
    def replan(self) -> bool: ...

    @property
    def ratio(self) -> float: ...

    @property
    def window_s(self) -> float: ...

    @property
    def gain_s(self) -> float: ...

    @property
    def max_moves(self) -> int: ...


class StragglerWatch:
    """Looks at the progress of all readers again and again, and tells when one of them holds up the load.

    No speed counts by itself, only when each reader would be done: one is slow where all would have read, since the
    first look, in a ``ratio``-th of the time if what is left were shared out by their paces, and ``gain_s`` earlier.
    The slow one is judged by the most that it can have read, the others by the least. It is judged over the last
    ``window_s``, over twice, four times as long and so on: short times notice a change soon, long ones see through what
    is under way. When it has told of one, it begins anew; it tells ``max_moves`` times at most. While a node gives no
    answer, it tells of nobody, since others wait for that one; when one is lost or joins, it begins anew.

    Args:
        limits: See above. With ``replan`` false it tells of nobody.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._moves_left = limits.max_moves if limits.replan else 0
        self._samples: list[_Sample] = []
        self._active_s: dict[NodeId, float] = {}
        self._heard_s: dict[NodeId, float] = {}
        self._began_s: float | None = None

    def look(
        self, now_s: float, progress: Mapping[NodeId, ReadProgress], *, heard: Collection[NodeId] | None = None
    ) -> SlowReader | None:
        """Takes what all readers say by now; the one that is to give reads away, if there is one.

        The first look is to be when they begin: who is done by the second one has a pace then.

        Args:
            now_s: The time.
            progress: Of every node that has a part in the load, by its last answer.
            heard: Those that answered just now; None: all. Who did not may be faster than it seems.
        """
        if not self._moves_left:
            return None
        self._began_s = now_s if self._began_s is None else self._began_s
        if self._samples and self._samples[-1].progress.keys() != progress.keys():
            self._samples.clear()
        heard = progress if heard is None else heard
        self._heard_s = {node: now_s if node in heard else self._heard_s.get(node, now_s) for node in progress}
        now = self._sample(now_s, progress)
        found = self._judge(now, heard)
        if found is not None:
            self._moves_left -= 1
            self._samples.clear()
        elif len(self._samples) >= _MAX_SAMPLES:
            self._samples = self._samples[::-2][::-1]  # with the last one
        self._samples.append(now)
        return found

    def _sample(self, now_s: float, progress: Mapping[NodeId, ReadProgress]) -> _Sample:
        last = self._samples[-1] if self._samples else _Sample(now_s, {}, {})
        for node, after in progress.items():
            before = last.progress.get(node, ReadProgress())
            # Some begin and end between two looks.
            is_busy = before.left_bytes > 0 or after.done_bytes > before.done_bytes
            self._active_s[node] = self._active_s.get(node, 0.0) + (now_s - last.at_s if is_busy else 0.0)
        return _Sample(now_s, dict(progress), dict(self._active_s))

    def _judge(self, now: _Sample, heard: Collection[NodeId]) -> SlowReader | None:
        least_s = self._limits.window_s
        if any(now.at_s - heard_s >= least_s for heard_s in self._heard_s.values()):
            return None
        for early in reversed(self._samples):
            passed_s = now.at_s - early.at_s
            if passed_s >= least_s:
                found = self._slowest(early, now, heard)
                if found is not None:
                    return found
                least_s = 2 * passed_s
        return None

    def _slowest(self, early: _Sample, now: _Sample, heard: Collection[NodeId]) -> SlowReader | None:
        paces = {node: _pace(node, early, now) for node in now.progress}
        passed_s = now.at_s - (self._began_s or 0.0)
        left_bytes = sum(one.left_bytes for one in now.progress.values())
        least = sum(pace.least for pace in paces.values())
        slow: dict[NodeId, float] = {}
        for node, progress in now.progress.items():
            pace, others = paces[node], least - paces[node].least
            if progress.waiting_bytes == 0 or not pace.is_judged or others <= 0 or node not in heard:
                continue
            alone_s = _seconds(progress.left_bytes, pace.most)
            shared_s = left_bytes / (others + pace.most)
            gain_s = alone_s - max(shared_s, _seconds(progress.begun_bytes, pace.most))
            is_worth_it = passed_s + alone_s >= self._limits.ratio * (passed_s + shared_s)
            if is_worth_it and gain_s >= self._limits.gain_s:
                slow[node] = alone_s
        if not slow:
            return None
        slowest = max(slow, key=lambda node: slow[node])
        return SlowReader(
            slowest,
            tuple(
                ReaderPace(
                    node=node,
                    left_bytes=progress.left_bytes,
                    begun_bytes=progress.begun_bytes,
                    bytes_per_s=paces[node].most if node == slowest else paces[node].mean,
                )
                for node, progress in sorted(now.progress.items())
            ),
        )


def bytes_to_keep(node: NodeId, paces: Iterable[ReaderPace]) -> int:
    """What a slow reader should go on to read of what it has not begun: until all others are done with theirs."""
    paces = tuple(paces)
    own = next((pace for pace in paces if pace.node == node), None)
    rate = sum(pace.bytes_per_s for pace in paces)
    if own is None or rate <= 0:
        return 0
    return max(0, int(own.bytes_per_s * (sum(pace.left_bytes for pace in paces) / rate)) - own.begun_bytes)


@dataclass(slots=True)
class _Load:
    """A reader as extents are given to it: ``left_bytes`` grow."""

    node: NodeId
    left_bytes: int
    bytes_per_s: float
    extents: list[ExtentId] = field(default_factory=list)


def share_reads(
    extents: Sequence[ExtentId],
    extent_bytes: Mapping[ExtentId, int],
    paces: Iterable[ReaderPace],
    *,
    readers_of: Callable[[ExtentId], Collection[NodeId]],
    homes_of: Callable[[ExtentId], Collection[NodeId]],
) -> dict[NodeId, tuple[ExtentId, ...]]:
    """Gives extents to readers: the largest first, each to whoever would be done with it first by its pace.

    That is the rule of the longest processing time for machines of different speeds (T. Gonzalez, O. H. Ibarra and
    S. Sahni, "Bounds for LPT schedules on uniform processors", SIAM J. Comput. 6, 1977), with what each has left
    before it. Of those that are done at the same time, one that needs the extent goes first: it sends it once less.

    Args:
        extents: To be given.
        extent_bytes: Sizes.
        paces: Who may get some. One without a pace gets nothing.
        readers_of: Nodes that can read an extent.
        homes_of: Nodes of the ranks that need it.

    Returns:
        By node, ascending. What nobody here can read is in none.
    """
    loads = [_Load(pace.node, pace.left_bytes, pace.bytes_per_s) for pace in paces if pace.bytes_per_s > 0]
    for extent in sorted(extents, key=lambda extent: (-extent_bytes[extent], extent)):
        able, homes = set(readers_of(extent)), set(homes_of(extent))
        _give(extent, extent_bytes[extent], [one for one in loads if one.node in able], homes)
    return {one.node: tuple(sorted(one.extents)) for one in sorted(loads, key=lambda one: one.node) if one.extents}


def describe_straggler(
    node: NodeId,
    paces: Iterable[ReaderPace],
    shares: Mapping[NodeId, Sequence[ExtentId]],
    extent_bytes: Mapping[ExtentId, int],
) -> Fault:
    """The line of the report: who was slow, and how much of its reading went to whom."""
    rate = {pace.node: pace.bytes_per_s for pace in paces}
    others = [value for other, value in rate.items() if other != node and value > 0]
    size = {other: sum(extent_bytes[extent] for extent in given) for other, given in shares.items()}
    num_extents = sum(map(len, shares.values()))
    takers = listed([f"{other} ({format_bytes(nbytes)})" for other, nbytes in sorted(size.items())])
    return Fault(
        kind="straggler",
        where=f"node {node}: reads at most {format_rate(rate.get(node, 0.0))}, other nodes "
        f"{format_rate(median(others) if others else 0.0)} in the median",
        action=f"{format_bytes(sum(size.values()))} that it had not begun, {num_extents} extents, are read by {takers}",
    )


def _give(extent: ExtentId, nbytes: int, able: Sequence[_Load], homes: Collection[NodeId]) -> None:
    if able:
        first = min(able, key=lambda one: ((one.left_bytes + nbytes) / one.bytes_per_s, one.node not in homes))
        first.left_bytes += nbytes
        first.extents.append(extent)


def _pace(node: NodeId, early: _Sample, now: _Sample) -> _Pace:
    before, after = early.progress.get(node, ReadProgress()), now.progress[node]
    active_s = now.active_s[node] - early.active_s.get(node, 0.0)
    if active_s < (now.at_s - early.at_s) / 2:
        # It had nothing to read for the most of it: how fast it was when it had tells more.
        mean = after.done_bytes / now.active_s[node] if now.active_s[node] else 0.0
        return _Pace(mean, mean, mean, is_judged=False)
    done_bytes = max(0, after.done_bytes - before.done_bytes)
    return _Pace(
        max(0, done_bytes - before.begun_bytes) / active_s,
        done_bytes / active_s,
        (done_bytes + after.begun_bytes) / active_s,
        is_judged=True,
    )


def _seconds(nbytes: int, bytes_per_s: float) -> float:
    if nbytes == 0:
        return 0.0
    return nbytes / bytes_per_s if bytes_per_s > 0 else inf
