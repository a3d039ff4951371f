"""A load as one HTML file: facts, a chart to zoom into, tables (docs/design/0019). It needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from string import Template
from typing import Final

from megamind_ray.core.report import LoadReport
from megamind_ray.core.timeline import Timeline
from megamind_ray.report.tables import VERIFIED_MEANING, count_of
from megamind_ray.report.terminal import printable
from megamind_ray.report.timeline_data import MAX_SPANS, PageTimeline, page_data, page_timelines, shown
from megamind_ray.report.timeline_layout import KINDS, Track
from megamind_ray.units import format_bytes, format_duration, format_rate

__all__ = ["render"]

# In this order: each uses what stands before it.
_SCRIPTS: Final = ("format.js", "model.js", "draw.js", "page.js")
_MAX_ROWS: Final = 300


def render(report: LoadReport, timelines: Sequence[Timeline], *, max_spans: int = MAX_SPANS) -> str:
    """The page of a load: what it moved, what happened when, and the same figures as tables.

    Args:
        report: Of the load or the simulation.
        timelines: Measured, predicted, or both: they are drawn on one axis. Without any there are the facts and tables.
        max_spans: Spans that are drawn, over all timelines. Where there are more, neighbours of a track and a kind are
            merged, and the page says so.

    Returns:
        The text of an HTML file, to be written as UTF-8.
    """
    pages = page_timelines(timelines, max_spans)
    style = _asset("timeline.css")
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    return Template(_asset("timeline.html")).substitute(
        title=escape(f"{shown(report.model)}: {_what(report)}"),
        style=style,
        style_hash=_digest(style),
        script=script,
        script_hash=_digest(script),
        header=_header(report, pages),
        notices="\n".join(f'<p class="notice">{escape(text)}</p>' for text in _notices(pages)),
        summary=escape(_summary(report, pages)),
        tables="\n".join(_tables(report, pages)),
        data=_data_block(page_data(report, pages)),
    )


def _asset(name: str) -> str:
    return resources.files("megamind_ray.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """What the content security policy allows: this text and no other, so that no name can become a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data_block(document: object) -> str:
    """JSON that cannot end the element that it stands in, whatever its strings say."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _what(report: LoadReport) -> str:
    return "simulated load" if report.kind == "simulation" else report.kind


def _header(report: LoadReport, pages: Sequence[PageTimeline]) -> str:
    facts = "\n".join(
        f'<div class="{shape}"><dt>{escape(name)}</dt><dd>{escape(value)}'
        f"{f'<small>{escape(note)}</small>' if note else ''}</dd></div>"
        for name, value, note, shape in _facts(report, pages)
    )
    return (
        f"<h1>{escape(shown(report.model))}: {escape(_what(report))}</h1>\n"
        f'<p class="uri">{escape(shown(report.uri))}<br>{escape(_mesh(report))}, '
        f"started {escape(_moment(report.started_at))}</p>\n"
        f'<dl class="facts">\n{facts}\n</dl>'
    )


def _facts(report: LoadReport, pages: Sequence[PageTimeline]) -> Iterable[tuple[str, str, str, str]]:
    """Name, value, a note in small letters; ``bad`` for bad news, ``line`` for what needs a line of its own."""
    total_s = report.seconds.get("total", 0.0)
    yield "Total time", format_duration(total_s), _other_times(report, pages), ""
    if report.lower_bound_s is not None:
        times = f"the total is {total_s / report.lower_bound_s:.2f} times that" if report.lower_bound_s > 0 else ""
        yield "Lower bound", format_duration(report.lower_bound_s), times, ""
    yield "Throughput", format_rate(report.throughput_bytes_per_s), "from storage", ""
    distinct = f"for {format_bytes(report.bytes_total)} of distinct weights"
    yield "Read from storage", format_bytes(report.bytes_from_storage), distinct, ""
    replicated = f"{format_bytes(report.bytes_replicated)} of it replicated"
    network = f"{format_bytes(report.bytes_over_network)} over the network"
    yield "Written to devices", format_bytes(report.bytes_to_device), f"{replicated}, {network}", ""
    word, _, meaning = VERIFIED_MEANING[report.verified].partition(": ")
    yield "Verified", word, meaning, "bad" if report.verified == "off" else ""
    again = f"{format_bytes(report.bytes_retried)} read again" if report.bytes_retried else ""
    yield "Faults", f"{len(report.faults):,}" if report.faults else "none", again, "bad" if report.faults else ""
    if report.bottleneck:
        share = max(report.utilisation.items(), key=lambda item: item[1], default=None)
        note = f"{shown(share[0])}: {share[1]:.0%} used" if share else ""
        yield "Bottleneck", printable(report.bottleneck), note, "line"


def _other_times(report: LoadReport, pages: Sequence[PageTimeline]) -> str:
    """What the timelines of the other origin took."""
    own = "predicted" if report.kind == "simulation" else "measured"
    return ", ".join(
        f"{page.title} {format_duration(page.timeline.end_s)}" for page in pages if page.timeline.origin != own
    )


def _mesh(report: LoadReport) -> str:
    sizes = " ".join(f"{name}={size}" for name, size in report.parallel.items() if size > 1)
    return f"{sizes or 'tp=1'} ({count_of(len(report.ranks), 'rank')})"


def _moment(text: str) -> str:
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S %Z")
    except ValueError:
        return shown(text)


def _notices(pages: Sequence[PageTimeline]) -> Iterable[str]:
    for page in pages:
        if page.num_drawn < page.num_spans:
            yield (
                f"The {page.title} timeline has {page.num_spans:,} spans. Neighbours of one track and kind are merged"
                f" into {page.num_drawn:,}: such a span has the sum of their bytes, reaches from the first to the last,"
                " and is the paler the less of that time was busy."
            )
        if page.timeline.dropped_spans:
            yield (
                f"{count_of(page.timeline.dropped_spans, 'span')} of the {page.title} timeline were not kept, since the"
                " recorder was full: what is shown is not all that was done."
            )


def _summary(report: LoadReport, pages: Sequence[PageTimeline]) -> str:
    """The picture in words."""
    parts = [
        f"{page.title}: {format_duration(page.timeline.end_s)}, {count_of(page.num_spans, 'span')} on"
        f" {count_of(len(page.tracks), 'track')}, {count_of(len(page.timeline.marks), 'event')}"
        for page in pages
    ]
    bottleneck = f" Bottleneck: {shown(report.bottleneck)}." if report.bottleneck else ""
    return f"What happened when. {'; '.join(parts) or 'No timeline was recorded'}.{bottleneck}"


def _tables(report: LoadReport, pages: Sequence[PageTimeline]) -> Iterable[str]:
    total_s = report.seconds.get("total", 0.0)
    phases = [
        (name, format_duration(seconds), f"{seconds / total_s:.1%}" if total_s else "-")
        for name, seconds in report.seconds.items()
    ]
    yield _table("Phases", ("phase", ">time", ">share"), phases)
    if report.utilisation:
        used = sorted(report.utilisation.items(), key=lambda item: -item[1])
        yield _folded("Use of resources", ("resource", ">use"), [(name, f"{share:.1%}") for name, share in used])
    if report.faults:
        faults = [
            (
                "-" if fault.at_s is None else f"{fault.at_s:.3f} s",
                fault.kind,
                fault.where,
                fault.action,
                format_bytes(fault.bytes_retried) if fault.bytes_retried else "-",
            )
            for fault in report.faults
        ]
        yield _folded("Faults", (">at", "fault", "where", "what was done", ">read again"), faults)
    for page in pages:
        end_s = page.timeline.end_s  # of all spans: not once for each track
        rows = [row for track in page.tracks for row in _track_rows(track, end_s)]
        columns = ("track", "kind", ">spans", ">bytes", ">added time", ">rate of one", ">track busy")
        yield _folded(f"Tracks, {page.title}", columns, rows)
        marks = [(f"{mark.at_s:.3f} s", mark.kind, mark.text) for mark in page.timeline.marks]
        if marks:
            yield _folded(f"Events, {page.title}", (">at", "event", "what"), marks)
    yield _folded("Ranks", (">rank", "pp.dp.tp", "where", ">names", ">holds", ">time", ">speed"), _rank_rows(report))
    if report.notes:
        yield "<h3>Notes</h3><ul>" + "".join(f"<li>{escape(shown(note))}</li>" for note in report.notes) + "</ul>"


def _track_rows(track: Track, end_s: float) -> Iterable[tuple[str, ...]]:
    busy = f"{track.busy_s / end_s:.1%}" if end_s else "-"
    for index, kind in enumerate(KINDS):
        rows = track.kind == index
        if not rows.any():
            continue
        num_bytes, added_s = int(track.nbytes[rows].sum()), float((track.end_s - track.begin_s)[rows].sum())
        yield (
            track.name,
            kind,
            f"{int(rows.sum()):,}",
            format_bytes(num_bytes) if num_bytes else "-",
            format_duration(added_s),
            format_rate(num_bytes / added_s) if num_bytes and added_s else "-",
            busy,
        )


def _rank_rows(report: LoadReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for rank in report.ranks:
        seconds = rank.seconds.get("total", 0.0)
        rows.append(
            (
                str(rank.rank),
                f"{rank.pp}.{rank.dp}.{rank.tp}",
                f"{rank.node}:{rank.gpu}",
                f"{rank.num_tensors:,}",
                format_bytes(rank.bytes_to_device),
                format_duration(seconds),
                format_rate(rank.bytes_to_device / seconds) if seconds > 0 else "-",
            )
        )
    return rows


def _folded(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return (
        f"<details><summary><h3>{escape(title)}</h3> <span>{count_of(len(rows), 'row')}</span></summary>"
        f"{_table('', columns, rows)}</details>"
    )


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a column whose name begins with ``>`` is aligned to the right."""
    right = [" class=number" if column.startswith(">") else "" for column in columns]
    head = "".join(
        f"<th scope=col{attribute}>{escape(column.removeprefix('>'))}</th>"
        for column, attribute in zip(columns, right, strict=True)
    )
    body = "\n".join(
        "<tr>"
        + "".join(
            f"<th scope=row{attribute}>{escape(shown(cell))}</th>"
            if position == 0
            else f"<td{attribute}>{escape(shown(cell))}</td>"
            for position, (cell, attribute) in enumerate(zip(row, right, strict=True))
        )
        + "</tr>"
        for row in rows[:_MAX_ROWS]
    )
    rest = len(rows) - _MAX_ROWS
    more = f"<p>... and {count_of(rest, 'more row')}; --json has all of them</p>" if rest > 0 else ""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide"><table>{title}<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>{more}'
    )
