"""A timeline for a terminal: how busy each track was over time, and throughput beside its limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from megamind_ray.core.report import LoadReport
from megamind_ray.core.timeline import Mark, SpanKind, Timeline
from megamind_ray.core.tracks import PLANNER_TRACK
from megamind_ray.report.tables import count_of
from megamind_ray.report.terminal import printable
from megamind_ray.report.timeline_layout import (
    GROUPS,
    KINDS,
    Curve,
    Floats,
    Track,
    binned,
    busy_share,
    curves_of,
    natural_key,
    sum_of,
    tracks_of,
)
from megamind_ray.units import format_duration, format_rate

__all__ = ["TimelineText"]

_MAX_ROWS: Final = 20
_MAX_PLOT: Final = 100  # wider is not easier to read; a pipe has no width of its own
_MIN_PLOT: Final = 16
_LEAST_PLOT: Final = 4  # where there is no room for more
_MAX_NAME: Final = 28
_MAX_EVENTS: Final = 4
_SHADES: Final = " ░▒▓█"
_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_ASCII: Final = " .:+#"
_COLOURS: Final[dict[SpanKind, str]] = {
    "read": "blue",
    "verify": "magenta",
    "cut": "yellow",
    "put": "cyan",
    "wire": "bright_red",
    "copy": "green",
}
_RATES: Final = {
    "storage": "storage",
    "nics": "network cards",
    "network": "between nodes",
    "pool": "pool",
    "ranks": "to devices",
    "other": "other",
}


@dataclass(frozen=True, kw_only=True)
class TimelineText:
    """A timeline that rich can print, as wide as the terminal and at most some 35 lines high.

    Attributes:
        timeline: What to show.
        report: Its report, for the bottleneck and the lower bound.
        max_rows: Tracks that are shown; the busiest of each group. Of all others the mean is shown.
    """

    timeline: Timeline
    report: LoadReport | None = None
    max_rows: int = _MAX_ROWS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tracks, all_curves = tracks_of(self.timeline), curves_of(self.timeline)
        end_s = self._end_s(all_curves)
        if not tracks or end_s <= 0:
            yield Text(f"{self.timeline.origin} timeline: nothing happened")
            return
        rows = list(_rows(tracks, self.max_rows))
        curves = _totals(all_curves)
        names = [*(name for name, _ in rows), *(name for name, _ in curves)]
        indent = max(len(name) for name in names)
        notes = [_rate_note(curve, end_s) for _, curve in curves]
        room = options.max_width - indent - len(" || ") - max(map(len, [*notes, "100%"]))
        if room < _MIN_PLOT:
            # The picture says where the limit is; the room is needed for the picture.
            notes = [note.partition(" of ")[0] for note in notes]
            room = options.max_width - indent - len(" || ") - max(map(len, [*notes, "100%"]))
        below: list[str] = []
        if room < _MIN_PLOT:
            # Nothing is cut: rates get lines of their own, long names give way, and the picture takes what is left.
            most = max(len("..."), options.max_width // 2)
            below = [f"{name}: {note}" for (name, _), note in zip(curves, notes, strict=True)]
            notes = [""] * len(notes)
            rows = [(_cut(name, most), members) for name, members in rows]
            curves = [(_cut(name, most), curve) for name, curve in curves]
            indent = max(len(name) for name in [*(name for name, _ in rows), *(name for name, _ in curves)])
            room = options.max_width - indent - len(" || ") - len("100%")
        width = min(_MAX_PLOT, max(_LEAST_PLOT, room))
        edges_s = np.linspace(0.0, end_s, width + 1)
        is_ascii = options.ascii_only
        yield from self._header()
        for name, members in rows:
            yield _busy_line(name.rjust(indent), members, edges_s, is_ascii)
        yield Text(" " * indent + " " + _axis(end_s, width), style="dim")
        for (name, curve), note in zip(curves, notes, strict=True):
            yield _curve_line(name.rjust(indent), curve, edges_s, is_ascii).append(note)
        yield from (Text(line, overflow="fold") for line in below)
        yield from self._footer(tracks, end_s)

    def _end_s(self, curves: Sequence[Curve]) -> float:
        """When the last of anything happened, as on the page; of a prediction, all of what it says it takes."""
        moments = [float(curve.at_s[-1]) for curve in curves] + [mark.at_s for mark in self.timeline.marks]
        if self.report is not None and self.report.kind == "simulation" and self.timeline.origin == "predicted":
            moments.append(self.report.seconds.get("total", 0.0))
        return max([self.timeline.end_s, *moments])

    def _header(self) -> Iterator[Text]:
        used = set(self.timeline.spans["kind"].to_pylist())
        text = Text(f"{self.timeline.origin} timeline, busy share of time: ", style="bold")
        kinds = [kind for kind in KINDS if kind in used and kind in _COLOURS]
        for position, kind in enumerate(kinds):
            text.append(", " if position else "", style="not bold")
            text.append(kind, style=f"not bold {_COLOURS[kind]}")
        yield text

    def _footer(self, tracks: Sequence[Track], end_s: float) -> Iterator[Text]:
        report = self.report
        if report is not None and report.bottleneck:
            bound = f"; lower bound {format_duration(report.lower_bound_s)}" if report.lower_bound_s is not None else ""
            yield Text(f"bottleneck: {printable(report.bottleneck)}{bound}")
        else:
            # The planner sees to a load from its beginning to its end, whatever is the bottleneck.
            moving = [track for track in tracks if track.name != PLANNER_TRACK]
            busiest = max(moving or tracks, key=lambda track: track.busy_s)
            share = busiest.busy_s / end_s
            yield Text(f"busiest: {printable(busiest.name)}, {share:.0%} of {format_duration(end_s)}")
        if self.timeline.marks:
            yield Text(f"events: {printable('; '.join(_events(self.timeline.marks)))}")
        if self.timeline.dropped_spans:
            yield Text(f"{count_of(self.timeline.dropped_spans, 'span')} were not kept: the recorder was full")


def _rows(tracks: Sequence[Track], max_rows: int) -> Iterator[tuple[str, list[Track]]]:
    """The busiest tracks, by group and then by name, and after those of a group one row for the rest of it."""
    groups = [[track for track in tracks if track.group == group] for group in GROUPS]
    groups = [sorted(members, key=lambda track: -track.busy_s) for members in groups if members]
    room = _shares([len(members) for members in groups], max_rows)
    for members, count in zip(groups, room, strict=True):
        # A row that sums up a single track would better show it.
        kept = members if count >= len(members) else members[: max(0, count - 1)]
        for track in sorted(kept, key=lambda track: natural_key(track.name)):
            yield _cut(track.name), [track]
        if rest := members[len(kept) :]:
            what = {"ranks": "rank", "other": "other"}.get(rest[0].group, f"{rest[0].group} track")
            yield f"{len(rest):,} {'more ' if kept else ''}{what}s", rest


def _shares(sizes: Sequence[int], room: int) -> list[int]:
    """Rows for each group: evenly, and what small groups leave goes to larger ones; at least one each."""
    given = [1] * len(sizes)
    while sum(given) < room and any(count < size for count, size in zip(given, sizes, strict=True)):
        # To the group that has the fewest of those that want more.
        wanting = [index for index, size in enumerate(sizes) if given[index] < size]
        given[min(wanting, key=lambda index: given[index])] += 1
    return given


def _totals(curves: Sequence[Curve]) -> list[tuple[str, Curve]]:
    """One curve of throughput for each group."""
    totals = []
    for group in GROUPS:
        members = [curve for curve in curves if curve.unit == "bytes/s" and curve.group == group]
        if members:
            totals.append((_RATES[group], sum_of(members, group)))
    return totals


def _busy_line(name: str, tracks: Sequence[Track], edges_s: Floats, is_ascii: bool) -> Text:
    shares = np.mean([track.busy_share(edges_s) for track in tracks], axis=0)
    kinds = _main_kinds(tracks, edges_s)
    shades = _ASCII if is_ascii else _SHADES
    text = Text(f"{name} {_bar(is_ascii)}", no_wrap=True)
    for share, kind in zip(shares.tolist(), kinds, strict=True):
        text.append(_glyph(shades, share), style=_COLOURS.get(kind, ""))
    total = sum(track.busy_s for track in tracks) / len(tracks) / float(edges_s[-1])
    text.append(f"{_bar(is_ascii)} {total:4.0%}")
    return text


def _main_kinds(tracks: Sequence[Track], edges_s: Floats) -> list[SpanKind]:
    """For each bin what took most of the time."""
    best = np.zeros(len(edges_s) - 1)
    main = np.full(len(edges_s) - 1, KINDS.index("other"))
    for index in (number for number, kind in enumerate(KINDS) if kind != "wait"):
        spent = np.zeros(len(best))
        for track in tracks:
            rows = track.kind == index
            if rows.any():
                spent += busy_share(track.begin_s[rows], track.end_s[rows], edges_s)
        main[spent > best] = index
        best = np.maximum(best, spent)
    return [KINDS[index] for index in main.tolist()]


def _curve_line(name: str, curve: Curve, edges_s: Floats, is_ascii: bool) -> Text:
    values = binned(curve, edges_s)
    top = curve.limit if curve.limit is not None else max(float(values.max()), 1e-9)
    levels = _ASCII if is_ascii else _LEVELS
    text = Text(f"{name} {_bar(is_ascii)}", no_wrap=True)
    for value in values.tolist():
        over = curve.limit is not None and value > 1.005 * curve.limit
        text.append(_glyph(levels, value / top), style="bright_red" if over else "blue")
    return text.append(f"{_bar(is_ascii)} ")


def _rate_note(curve: Curve, end_s: float) -> str:
    """The mean over all of the time, beside what would be possible."""
    mean = format_rate(float(binned(curve, np.array([0.0, end_s]))[0]))
    return f"{mean} of {format_rate(curve.limit)}" if curve.limit is not None else mean


def _events(marks: Sequence[Mark]) -> Iterator[str]:
    """How often what happened, and when."""
    by_kind: dict[str, list[float]] = {}
    for mark in marks:
        by_kind.setdefault(mark.kind, []).append(mark.at_s)
    for kind, moments in list(by_kind.items())[:_MAX_EVENTS]:
        times = [format_duration(at_s) for at_s in moments]
        if len(moments) == 1:
            yield f"{kind} at {times[0]}"
        else:
            yield f"{kind}, {len(moments):,} times, from {times[0]} to {times[-1]}"
    if len(by_kind) > _MAX_EVENTS:
        yield f"and {count_of(len(by_kind) - _MAX_EVENTS, 'more kind')}"


def _axis(end_s: float, width: int) -> str:
    """Moments below the plot: 0, the end, and between them what has room."""
    parts = 4 if width >= 60 else 2 if width >= 30 else 1
    line = [" "] * (width + 2)
    for part in range(parts + 1):
        text = "0" if part == 0 else format_duration(end_s * part / parts)
        at = round(part / parts * width) + 1
        begin = min(max(0, at - len(text) // 2), len(line) - len(text)) if part else 1
        if begin >= 0 and all(letter == " " for letter in line[max(0, begin - 1) : begin + len(text)]):
            line[begin : begin + len(text)] = text
    return "".join(line).rstrip()


def _glyph(glyphs: str, share: float) -> str:
    """A glyph for a share; what is not nothing is never shown as nothing, and only all is shown as all."""
    if share <= 0:
        return glyphs[0]
    return glyphs[min(len(glyphs) - 1, max(1, int(share * (len(glyphs) - 1) + 0.05)))]


def _bar(is_ascii: bool) -> str:
    return "|" if is_ascii else "│"


def _cut(name: str, most: int = _MAX_NAME) -> str:
    name = printable(name)
    return name if len(name) <= most else f"...{name[len(name) + 3 - most :]}"
