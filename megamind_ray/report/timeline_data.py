"""What the page of a timeline draws, as compact JSON values: times in whole microseconds, columns instead of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from megamind_ray.core.report import Fault, LoadReport
from megamind_ray.core.timeline import Mark, Timeline
from megamind_ray.report.terminal import printable
from megamind_ray.report.timeline_layout import (
    GROUPS,
    KINDS,
    Curve,
    Floats,
    Ints,
    Track,
    curves_of,
    lanes_of,
    natural_key,
    sum_of,
    thinned,
    tracks_of,
)

__all__ = ["MAX_SPANS", "PageTimeline", "page_data", "page_timelines", "shown"]

MAX_SPANS: Final = 50_000
"""Spans of a page, over all its timelines: a few megabytes of JSON, and some milliseconds to draw them."""

_FINEST_BINS: Final = 4096  # a wide screen has no more pixels
_MAX_SAMPLES: Final = 100_000
_SAMPLES_OF_A_CURVE: Final = (50, 1000)
_MAX_MARKS: Final = 500
_MAX_TEXT: Final = 160
_OPEN_TRACKS: Final = 12
_OPEN_CURVES: Final = 2
_SPAN_TITLES: Final = {
    "storage": "Storage",
    "nics": "Network cards",
    "network": "Between nodes",
    "pool": "Host pool",
    "ranks": "Ranks",
    "other": "Other work",
}
_CURVE_TITLES: Final = {
    ("bytes/s", "storage"): "Throughput of storage",
    ("bytes/s", "nics"): "Throughput of network cards",
    ("bytes/s", "network"): "Throughput between nodes",
    ("bytes/s", "pool"): "Throughput of the host pool",
    ("bytes/s", "ranks"): "Throughput to devices",
    ("bytes", "pool"): "Host memory",
    ("bytes", "ranks"): "Device memory",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class DrawnTrack:
    """A track as it is drawn, some of its spans perhaps merged.

    Attributes:
        track: Its spans; a merged one reaches from the first begin to the last end, and has the sum of the bytes.
        count: Spans that each of them stands for.
        busy: How much of its time a merged span was busy, 0 to 1.
        lane: Where it is drawn; spans of a lane do not overlap.
    """

    track: Track
    count: Ints
    busy: Floats
    lane: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _CurveName:
    """A curve that one or more timelines have; ``place`` is None for the sum over all places."""

    unit: str
    group: str
    place: str | None
    title: str


@dataclass(frozen=True, eq=False, kw_only=True)
class PageTimeline:
    """A timeline ready to be drawn.

    Attributes:
        title: Its origin; with a number where several have the same.
        timeline: As recorded.
        tracks: All tracks, complete.
        drawn: The same tracks as they are drawn.
        curves: All series with their limits.
    """

    title: str
    timeline: Timeline
    tracks: tuple[Track, ...]
    drawn: tuple[DrawnTrack, ...]
    curves: tuple[Curve, ...]

    @property
    def end_s(self) -> float:
        """When the last of anything happened."""
        moments = [float(curve.at_s[-1]) for curve in self.curves] + [mark.at_s for mark in self.timeline.marks]
        return max([self.timeline.end_s, *moments])

    @property
    def num_spans(self) -> int:
        """Spans as recorded."""
        return len(self.timeline.spans)

    @property
    def num_drawn(self) -> int:
        """Spans as drawn."""
        return sum(len(drawn.count) for drawn in self.drawn)


def page_timelines(timelines: Sequence[Timeline], max_spans: int = MAX_SPANS) -> tuple[PageTimeline, ...]:
    """Lays timelines out; where they have more spans than that, neighbours of a track and a kind are merged."""
    origins = [timeline.origin for timeline in timelines]
    pages = []
    for position, timeline in enumerate(timelines):
        number = f" {origins[:position].count(timeline.origin) + 1}" if origins.count(timeline.origin) > 1 else ""
        tracks = tracks_of(timeline)
        pages.append(
            PageTimeline(
                title=timeline.origin + number,
                timeline=timeline,
                tracks=tracks,
                drawn=_drawn(tracks, timeline.end_s, max_spans // len(timelines)),
                curves=curves_of(timeline),
            )
        )
    return tuple(pages)


def page_data(report: LoadReport, pages: Sequence[PageTimeline]) -> dict[str, Any]:
    """The values that the page's script draws."""
    end_s = max((page.end_s for page in pages), default=0.0)
    track_names = _ordered((track.group, track.name) for page in pages for track in page.tracks)
    sections = list(_span_sections(track_names))
    curve_sections, curve_names = _curve_sections(pages)
    samples = _bounded(_MAX_SAMPLES // max(1, len(curve_names) * len(pages)), *_SAMPLES_OF_A_CURVE)
    index_of_track = {name: index for index, (_, name) in enumerate(track_names)}
    return {
        "kinds": list(KINDS),
        "end": _us(end_s),
        "bound": None if report.lower_bound_s is None else _us(report.lower_bound_s),
        "tracks": [shown(name) for _, name in track_names],
        "curves": [{"name": curve.title, "unit": shown(curve.unit)} for curve in curve_names],
        "sections": sections + curve_sections,
        "timelines": [
            {
                "title": page.title,
                "end": _us(page.timeline.end_s),
                "tracks": [_track_json(drawn, index_of_track[drawn.track.name]) for drawn in page.drawn],
                "curves": list(_curves_json(page, curve_names, end_s, samples)),
                "marks": _marks_json(report, page, first=page is _page_of_report(report, pages)),
            }
            for page in pages
        ],
    }


def shown(text: str) -> str:
    """Text of others, fit to be shown: control characters written out, and not longer than a line."""
    text = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT // 2]} ... {text[-_MAX_TEXT // 2 :]}"
    return printable(text)


def _ordered(names: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted(set(names), key=lambda item: (_order(item[0]), natural_key(item[1])))


def _order(group: str) -> int:
    return GROUPS.index(group)


def _span_sections(track_names: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for group in GROUPS:
        members = [index for index, (of, _) in enumerate(track_names) if of == group]
        if members:
            is_open = len(members) <= _OPEN_TRACKS
            yield {"title": _SPAN_TITLES[group], "shape": "spans", "rows": members, "sum": None, "open": is_open}


def _curve_sections(pages: Sequence[PageTimeline]) -> tuple[list[dict[str, Any]], list[_CurveName]]:
    """Sections of curves, and the curves they speak of."""
    places: dict[tuple[str, str], set[str]] = {}
    for page in pages:
        for curve in page.curves:
            places.setdefault((curve.unit, curve.group), set()).add(curve.place)
    sections: list[dict[str, Any]] = []
    names: list[_CurveName] = []
    # Rates before amounts, both before units that others may add.
    for unit, group in sorted(places, key=lambda key: (("bytes/s", "bytes", key[0]).index(key[0]), _order(key[1]))):
        members = sorted(places[unit, group], key=natural_key)
        total = None
        if len(members) > 1:
            total = len(names)
            names.append(_CurveName(unit=unit, group=group, place=None, title=f"all {len(members)}"))
        rows = list(range(len(names), len(names) + len(members)))
        names += [_CurveName(unit=unit, group=group, place=place, title=shown(place)) for place in members]
        title = _CURVE_TITLES.get((unit, group), f"{shown(unit)}, {group}")
        is_open = len(members) <= _OPEN_CURVES
        sections.append({"title": title, "shape": "curves", "rows": rows, "sum": total, "open": is_open})
    return sections, names


def _drawn(tracks: Sequence[Track], end_s: float, max_spans: int) -> tuple[DrawnTrack, ...]:
    if sum(len(track.kind) for track in tracks) <= max_spans:
        return tuple(
            DrawnTrack(
                track=track,
                count=np.ones(len(track.kind), np.int64),
                busy=np.ones(len(track.kind)),
                lane=lanes_of(track.begin_s, track.end_s),
            )
            for track in tracks
        )
    fit, too_many = 1, _FINEST_BINS + 1
    while too_many - fit > 1:
        bins = (fit + too_many) // 2
        if sum(len(np.unique(_cells(track, end_s / bins))) for track in tracks) <= max_spans:
            fit = bins
        else:
            too_many = bins
    return tuple(_merged(track, end_s / fit) for track in tracks)


def _cells(track: Track, bin_s: float) -> Ints:
    """Spans of one kind that begin in the same bin share a cell."""
    column = (track.begin_s / bin_s).astype(np.int64) if bin_s > 0 else np.zeros(len(track.kind), np.int64)
    return column * len(KINDS) + track.kind


def _merged(track: Track, bin_s: float) -> DrawnTrack:
    cells = _cells(track, bin_s)
    order = np.argsort(cells, kind="stable")
    first = np.flatnonzero(np.diff(cells[order], prepend=-1))
    begin_s = np.minimum.reduceat(track.begin_s[order], first)
    end_s = np.maximum.reduceat(track.end_s[order], first)
    work_s = np.add.reduceat((track.end_s - track.begin_s)[order], first)
    count = np.diff(first, append=len(order))
    extent_s = end_s - begin_s
    busy = np.where(extent_s > 0, np.minimum(1.0, work_s / np.where(extent_s > 0, extent_s, 1.0)), 1.0)
    by_time = np.lexsort((end_s, begin_s))
    label = np.where(count == 1, track.label[order][first], "")
    merged = Track(
        name=track.name,
        group=track.group,
        kind=track.kind[order][first][by_time],
        begin_s=begin_s[by_time],
        end_s=end_s[by_time],
        nbytes=np.add.reduceat(track.nbytes[order], first)[by_time],
        label=label[by_time],
    )
    lane = lanes_of(merged.begin_s, merged.end_s)
    return DrawnTrack(track=merged, count=count[by_time], busy=busy[by_time], lane=lane)


def _track_json(drawn: DrawnTrack, index: int) -> dict[str, Any]:
    track = drawn.track
    begin = np.rint(track.begin_s * 1e6).astype(np.int64)
    end = np.rint(track.end_s * 1e6).astype(np.int64)
    labels = {text: number for number, text in enumerate(dict.fromkeys(track.label.tolist()))}
    document = {
        "track": index,
        "lanes": int(drawn.lane.max(initial=-1)) + 1,
        # Differences, since small numbers are short ones.
        "begin": np.diff(begin, prepend=0).tolist(),
        "length": (end - begin).tolist(),
        "kind": track.kind.tolist(),
        "lane": drawn.lane.tolist(),
        "bytes": track.nbytes.tolist(),
        "label": [labels[text] for text in track.label.tolist()],
        "labels": [shown(text) for text in labels],
    }
    if (drawn.count > 1).any():
        document["count"] = drawn.count.tolist()
        document["busy"] = drawn.busy.round(3).tolist()
    return document


def _curves_json(
    page: PageTimeline, names: Sequence[_CurveName], end_s: float, max_samples: int
) -> Iterator[dict[str, Any]]:
    for index, name in enumerate(names):
        members = [
            curve
            for curve in page.curves
            if (curve.unit, curve.group) == (name.unit, name.group) and name.place in (None, curve.place)
        ]
        if not members:
            continue
        curve = thinned(members[0] if len(members) == 1 else sum_of(members, name.title), end_s, max_samples)
        digits = 0 if name.unit in ("bytes", "bytes/s") else 6
        yield {
            "curve": index,
            "limit": curve.limit,
            "at": np.rint(curve.at_s * 1e6).astype(np.int64).tolist(),
            "value": [_short(value, digits) for value in curve.value.tolist()],
        }


def _short(value: float, digits: int) -> float:
    return round(value, digits) if digits else round(value)


def _page_of_report(report: LoadReport, pages: Sequence[PageTimeline]) -> PageTimeline | None:
    origin = "predicted" if report.kind == "simulation" else "measured"
    return next((page for page in pages if page.timeline.origin == origin), None)


def _marks_json(report: LoadReport, page: PageTimeline, *, first: bool) -> list[dict[str, Any]]:
    marks = list(page.timeline.marks)
    if first:
        marks += [
            Mark(at_s=fault.at_s, kind=fault.kind, text=f"{fault.where}: {fault.action}")
            for fault in report.faults
            if fault.at_s is not None and not any(_tells_of(mark, fault) for mark in page.timeline.marks)
        ]
    # Where there are more than fit, faults stay and what went well goes.
    chosen = sorted(marks, key=_is_fine)[:_MAX_MARKS]
    return [
        {"at": _us(mark.at_s), "kind": shown(mark.kind), "text": shown(mark.text), "fine": _is_fine(mark)}
        for mark in sorted(chosen, key=lambda mark: mark.at_s)
    ]


def _tells_of(mark: Mark, fault: Fault) -> bool:
    """Whether a mark is that fault; by its place, since the clocks that they were taken from may differ."""
    return mark.kind == fault.kind and fault.where in mark.text


def _is_fine(mark: Mark) -> bool:
    """Whether it is progress rather than a fault: ``rank_done``."""
    return any(word in mark.kind.lower() for word in ("done", "ready", "complete", "finished"))


def _bounded(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
