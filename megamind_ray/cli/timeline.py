"""``megamind timeline``: recorded loads and predictions on one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from megamind_ray.cli.options import AsJson, examples
from megamind_ray.cli.output import Output
from megamind_ray.errors import RequestError

__all__ = ["EXAMPLES", "timeline_command"]

_MOST = 2
EXAMPLES = examples(
    "megamind timeline ./recorded",
    "megamind timeline ./measured ./predicted --out both.html",
    "megamind timeline ./measured ./predicted --trace both.json      (for ui.perfetto.dev)",
)


def timeline_command(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR",
            show_default=False,
            help="What --record of `megamind load` or `megamind plan` wrote; one of each stand side by side.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write one HTML page there, which needs no network.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shows when what was busy in a recorded load; a measured and a predicted one on the same axis.

    The page's figures are those of the first record. Tracks lie beside each other where nodes have the same names:
    predict for the topology file that `megamind topology --cluster` writes. A measured load that started its own
    workers has their start on the axis too; a prediction begins when they run.
    """
    with Output(as_json) as output:
        from rich.console import Group, RenderableType
        from rich.text import Text

        from megamind_ray.api.record import read_record
        from megamind_ray.report.timeline_html import render
        from megamind_ray.report.timeline_text import TimelineText
        from megamind_ray.report.trace import perfetto

        if len(records) > _MOST:
            raise RequestError(f"{len(records)} records: give one, or a measured and a predicted one")
        _require_own_places(out, trace, records)
        read = [read_record(folder) for folder in records]
        timelines = [timeline for _, timeline in read]
        if len({timeline.origin for timeline in timelines}) < len(timelines):
            raise RequestError(
                f"{records[0]} and {records[1]} are both {timelines[0].origin}; give a measured and a predicted one"
            )
        report = read[0][0]
        document: dict[str, Any] = {"reports": [each.to_json() for each, _ in read]}
        parts: list[RenderableType] = [TimelineText(timeline=timeline, report=each) for each, timeline in read]
        if out is not None:
            _write(out, render(report, timelines))
            document["page"] = str(out)
            parts.append(Text(f"page written to {out}"))
        if trace is not None:
            _write(trace, json.dumps(perfetto(*timelines, name=report.model)) + "\n")
            document["trace"] = str(trace)
            parts.append(Text(f"trace written to {trace}"))
        output.emit(document, Group(*parts))


def _require_own_places(out: Path | None, trace: Path | None, records: Sequence[Path]) -> None:
    from megamind_ray.api.record import SOURCE_FILES

    taken = {(folder / name).resolve() for folder in records for name in SOURCE_FILES}
    for option, path in (("--out", out), ("--trace", trace)):
        if path is None:
            continue
        if path.resolve() in taken:
            raise RequestError(f"{option} {path}: that file is in use by this command; name another file")
        taken.add(path.resolve())


def _write(path: Path, text: str) -> None:
    from megamind_ray.core.output_file import write_output

    try:
        write_output(path, text)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error.strerror}); name another file") from error
