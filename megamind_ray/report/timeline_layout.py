"""How a timeline is laid out, whatever draws it: tracks in order, lanes, busy shares, curves with their limits."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from megamind_ray.core.timeline import SpanKind, Timeline

__all__ = [
    "GROUPS",
    "KINDS",
    "Curve",
    "Floats",
    "Ints",
    "Track",
    "binned",
    "busy_share",
    "curves_of",
    "group_of",
    "lanes_of",
    "natural_key",
    "spread",
    "sum_of",
    "thinned",
    "tracks_of",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KINDS: Final[tuple[SpanKind, ...]] = get_args(SpanKind)
# In the order in which bytes pass through them.
GROUPS: Final = ("storage", "nics", "network", "pool", "ranks", "other")
_GROUP_OF_PART: Final = {"storage": "storage", "network in": "nics", "wire": "network", "pool": "pool", "host": "pool"}
# What counts as throughput of a group; all else that is done there looks at the same bytes again.
_MOVING: Final[dict[str, SpanKind]] = {"storage": "read", "network": "wire", "ranks": "copy"}
# Bounded, since Python refuses to convert thousands of digits and names are anybody's.
_DIGITS: Final = re.compile(r"(\d{1,15})")
_CURVE_BINS: Final = 400


@dataclass(frozen=True, eq=False, kw_only=True)
class Track:
    """One line of a Gantt chart, column by column, ascending in ``begin_s``.

    Attributes:
        name: As in ``Span.track``.
        group: One of ``GROUPS``.
        kind: Index in ``KINDS``.
        begin_s, end_s: Seconds after the start of the load.
        nbytes: Bytes moved or looked at.
        label: For people.
    """

    name: str
    group: str
    kind: Ints
    begin_s: Floats
    end_s: Floats
    nbytes: Ints
    label: npt.NDArray[np.object_]

    @property
    def work(self) -> npt.NDArray[np.bool_]:
        """Which spans are work; waiting is none."""
        return np.not_equal(self.kind, KINDS.index("wait"))

    @property
    def busy_s(self) -> float:
        """Time in which at least one span of work was open."""
        starts, ends = _merged(self.begin_s[self.work], self.end_s[self.work])
        return float(np.sum(ends - starts))

    def busy_share(self, edges_s: Floats) -> Floats:
        """For each bin the part of it in which at least one span of work was open, 0 to 1."""
        return busy_share(self.begin_s[self.work], self.end_s[self.work], edges_s)

    @property
    def num_bytes(self) -> int:
        """Bytes of all spans."""
        return int(self.nbytes.sum())


@dataclass(frozen=True, eq=False, kw_only=True)
class Curve:
    """A value over time: ``value[i]`` holds from ``at_s[i]`` until the next one.

    Attributes:
        unit: First word of the series: ``bytes/s``, ``bytes``, or another one.
        place: The rest of it: ``n0/storage``.
        group: One of ``GROUPS``.
        at_s: Ascending.
        value: In ``unit``.
        limit: What it can be at most, if that is known.
    """

    unit: str
    place: str
    group: str
    at_s: Floats
    value: Floats
    limit: float | None


def tracks_of(timeline: Timeline) -> tuple[Track, ...]:
    """The tracks of a timeline: by group, names with numbers in the order of the numbers."""
    spans = timeline.spans.sort_by([("begin_s", "ascending"), ("end_s", "ascending")])
    codes, names = _words(spans["track"])
    kind_codes, kind_names = _words(spans["kind"])
    kinds = np.array([KINDS.index(cast("SpanKind", name)) for name in kind_names] or [0], np.int64)[kind_codes]
    label_codes, labels = _words(spans["label"])
    words = np.array([*labels, ""], dtype=np.object_)[label_codes]
    begin_s, end_s = _numbers(spans["begin_s"]), _numbers(spans["end_s"])
    nbytes = spans["nbytes"].to_numpy()
    by_track = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[by_track], np.arange(len(names) + 1))
    tracks = []
    for code, name in enumerate(names):
        rows = by_track[bounds[code] : bounds[code + 1]]
        if len(rows):
            tracks.append(
                Track(
                    name=name,
                    group=group_of(name),
                    kind=kinds[rows],
                    begin_s=begin_s[rows],
                    end_s=np.maximum(begin_s[rows], end_s[rows]),
                    nbytes=nbytes[rows],
                    label=words[rows],
                )
            )
    return tuple(sorted(tracks, key=lambda track: (GROUPS.index(track.group), natural_key(track.name))))


def curves_of(timeline: Timeline) -> tuple[Curve, ...]:
    """The series of a timeline with their limits; a rate that was not sampled is added up from the spans."""
    codes, names = _words(timeline.samples["series"])
    at_s, values = _numbers(timeline.samples["at_s"]), _numbers(timeline.samples["value"])
    curves = []
    for code, name in enumerate(names):
        rows = np.flatnonzero((codes == code) & np.isfinite(values))
        if len(rows):
            rows = rows[np.argsort(at_s[rows], kind="stable")]
            curves.append(_curve(name, at_s[rows], values[rows], timeline))
    # A rate may be named by the track, or by something within it: ``rank 3/device``.
    known = {
        name for curve in curves if curve.unit == "bytes/s" for name in (curve.place, curve.place.rpartition("/")[0])
    }
    end_s = timeline.end_s
    for track in tracks_of(timeline):
        moving = track.kind == KINDS.index(_MOVING.get(track.group, "other"))
        if track.group in _MOVING and track.name not in known and moving.any() and end_s > 0:
            edges = np.linspace(0, end_s, _CURVE_BINS + 1)
            moved = spread(track.begin_s[moving], track.end_s[moving], track.nbytes[moving], edges)
            curves.append(_curve(f"bytes/s {track.name}", edges[:-1], moved / np.diff(edges), timeline))
    return tuple(sorted(curves, key=lambda curve: (curve.unit, GROUPS.index(curve.group), natural_key(curve.place))))


def _curve(series: str, at_s: Floats, value: Floats, timeline: Timeline) -> Curve:
    unit, _, place = series.partition(" ")
    limit = timeline.limits.get(series)
    known = limit is not None and 0 < limit < float("inf")
    return Curve(unit=unit, place=place, group=group_of(place), at_s=at_s, value=value, limit=limit if known else None)


def group_of(name: str) -> str:
    """The group of a track or of a series' place: ``n0/wire`` -> ``network``, ``rank 3/device`` -> ``ranks``."""
    if name.startswith("rank "):
        return "ranks"
    return _GROUP_OF_PART.get(name.rpartition("/")[2], "other")


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """A sort key by which ``n2`` comes before ``n10`` and ``n0/x`` before ``n0-1/x``; different names differ in it."""
    parts = _DIGITS.split(name.replace("/", "\0"))
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts)), name


def lanes_of(begin: Sequence[float] | npt.NDArray[np.generic], end: Sequence[float] | npt.NDArray[np.generic]) -> Ints:
    """A lane for each span, as few as possible, so that no two spans of a lane overlap; they may touch."""
    begins, ends = np.asarray(begin), np.asarray(end)
    lanes = np.zeros(len(begins), np.int64)
    order = np.lexsort((ends, begins))
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    num_lanes = 0
    for row, begins_at, ends_at in zip(order.tolist(), begins[order].tolist(), ends[order].tolist(), strict=True):
        while busy and busy[0][0] <= begins_at:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        lanes[row] = lane
        heapq.heappush(busy, (ends_at, lane))
    return lanes


def busy_share(begin_s: Floats, end_s: Floats, edges_s: Floats) -> Floats:
    """For each bin the part of it in which at least one span was open, 0 to 1."""
    starts, ends = _merged(begin_s, end_s)
    if not len(starts):
        return np.zeros(len(edges_s) - 1)
    covered = np.concatenate(([0.0], np.cumsum(ends - starts)))
    knots = np.column_stack((starts, ends)).ravel()
    until = np.interp(edges_s, knots, np.column_stack((covered[:-1], covered[1:])).ravel())
    shares: Floats = np.clip(np.diff(until) / np.diff(edges_s), 0.0, 1.0)
    return shares


def spread(begin_s: Floats, end_s: Floats, amount: npt.NDArray[np.generic], edges_s: Floats) -> Floats:
    """Amounts of spans, spread evenly over their time, per bin; what lies within the edges is all there."""
    amounts = np.asarray(amount, np.float64)
    # Of very short spans the rate is a huge number, which would cost the digits of all others: they count as moments.
    short = end_s - begin_s <= 1e-3 * float(np.min(np.diff(edges_s)))
    moments = np.histogram((begin_s + end_s)[short] / 2, edges_s, weights=amounts[short])[0]
    begins, ends = begin_s[~short], end_s[~short]
    rates = amounts[~short] / (ends - begins)
    until = _ramps(edges_s, begins, rates) - _ramps(edges_s, ends, rates)
    bins: Floats = np.maximum(np.diff(until), 0.0) + moments
    return bins


def _ramps(at: Floats, begins: Floats, rates: Floats) -> Floats:
    """Sum over all ramps of what has come of them until ``at``: ``rate * (at - begin)`` where that is positive."""
    order = np.argsort(begins)
    count = np.searchsorted(begins[order], at, side="right")
    slope = np.concatenate(([0.0], np.cumsum(rates[order])))[count]
    offset = np.concatenate(([0.0], np.cumsum((rates * begins)[order])))[count]
    return at * slope - offset


def _merged(begin_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """The union of spans as separate ranges, ascending."""
    if not len(begin_s):
        return begin_s, end_s
    order = np.argsort(begin_s, kind="stable")
    begins, ends = begin_s[order], np.maximum.accumulate(end_s[order])
    opens = np.concatenate(([True], begins[1:] > ends[:-1]))
    starts, stops = begins[opens], ends[np.concatenate((opens[1:], [True]))]
    real = stops > starts
    return starts[real], stops[real]


def sum_of(curves: Sequence[Curve], place: str) -> Curve:
    """Several curves of one unit added up; the limit too, where all of them have one."""
    at_s = np.unique(np.concatenate([curve.at_s for curve in curves]))
    value = np.zeros(len(at_s))
    for curve in curves:
        index = np.searchsorted(curve.at_s, at_s, side="right") - 1
        value += np.where(index >= 0, curve.value[index], 0.0)
    limits = [curve.limit for curve in curves if curve.limit is not None]
    return Curve(
        unit=curves[0].unit,
        place=place,
        group=curves[0].group,
        at_s=at_s,
        value=value,
        limit=sum(limits) if len(limits) == len(curves) else None,
    )


def binned(curve: Curve, edges_s: Floats) -> Floats:
    """A value per bin: the mean of a rate, so that its integral stays; the largest of all else, so that peaks stay.

    Before its first sample a curve is 0.
    """
    first = np.searchsorted(curve.at_s, edges_s[:-1], side="right") - 1
    held = np.where(first >= 0, curve.value[first], 0.0)
    if curve.unit != "bytes/s":
        inside = np.searchsorted(edges_s, curve.at_s, side="right") - 1
        kept = (inside >= 0) & (inside < len(held))
        np.maximum.at(held, inside[kept], curve.value[kept])
        return held
    steps = np.diff(curve.at_s, append=max(float(edges_s[-1]), float(curve.at_s[-1])))
    integral = np.concatenate(([0.0], np.cumsum(curve.value * steps)))
    until = np.interp(edges_s, np.append(curve.at_s, curve.at_s[-1] + steps[-1]), integral)
    return np.diff(until) / np.diff(edges_s)


def thinned(curve: Curve, end_s: float, max_points: int) -> Curve:
    """The curve itself, or where it has more samples than that, one per bin of equal length."""
    if len(curve.at_s) <= max_points or end_s <= 0:
        return curve
    edges_s = np.linspace(0, max(end_s, float(curve.at_s[-1])), max_points + 1)
    return Curve(
        unit=curve.unit,
        place=curve.place,
        group=curve.group,
        at_s=edges_s[:-1],
        value=binned(curve, edges_s),
        limit=curve.limit,
    )


def _words(column: pa.ChunkedArray) -> tuple[Ints, list[str]]:
    """A column of words as codes and the words."""
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)
    words = column.unify_dictionaries().combine_chunks()
    return words.indices.to_numpy(zero_copy_only=False).astype(np.int64), words.dictionary.to_pylist()


def _numbers(column: Iterable[float]) -> Floats:
    return np.asarray(cast("pa.ChunkedArray", column).to_numpy(), np.float64)
