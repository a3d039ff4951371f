"""Where the record of a load is written: a folder with its report, timeline and events, and pictures of them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from megamind_ray.config.files import read_regular
from megamind_ray.core.output_file import write_output
from megamind_ray.core.recording import LoadRecord
from megamind_ray.core.report import LoadReport
from megamind_ray.core.timeline import Timeline
from megamind_ray.errors import MegamindError, RequestError
from megamind_ray.report.timeline_html import render
from megamind_ray.report.trace import perfetto

__all__ = ["EVENTS_FILE", "SOURCE_FILES", "new_folder", "read_record", "record_folder", "write_record"]

REPORT_FILE: Final = "report.json"
TIMELINE_FILE: Final = "timeline.json"
EVENTS_FILE: Final = "events.jsonl"
TRACE_FILE: Final = "trace.json"
PAGE_FILE: Final = "timeline.html"
SOURCE_FILES: Final = (REPORT_FILE, TIMELINE_FILE, EVENTS_FILE)  # all else can be made from them again


def new_folder(path: str | os.PathLike[str]) -> Path:
    """A folder for a record, made now, so that what is wrong with it shows before a load begins.

    Raises:
        RequestError: It has something in it, is no folder, or cannot be made.
    """
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = next(folder.iterdir(), None) is None
    except OSError as error:
        raise RequestError(f"record {folder}: cannot be used as a folder ({error.strerror}); name another") from error
    if not is_empty:
        raise RequestError(
            f"record {folder}: is not empty; name a new folder, a record is not written over another one"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError(f"record {folder}: this user may not write there; name another folder")
    return folder


@contextlib.contextmanager
def record_folder(path: str | os.PathLike[str] | None) -> Iterator[Path | None]:
    """A folder for a record, as ``new_folder`` gives it; without a path none.

    If what is done with it fails before anything is in it, it is removed again, unless it was there before.
    """
    was_there = path is None or os.path.lexists(path)
    folder = None if path is None else new_folder(path)
    try:
        yield folder
    except BaseException:
        if folder is not None and not was_there:
            with contextlib.suppress(OSError):  # a load that failed has left what there is of its record
                folder.rmdir()
        raise


def write_record(folder: Path, record: LoadRecord, report: LoadReport | None) -> None:
    """Writes what there is of ``report.json``, ``timeline.json``, ``events.jsonl``, ``trace.json``, ``timeline.html``.

    Args:
        folder: Where, see ``new_folder``.
        record: What was recorded.
        report: Of the load; None where it failed: then there is no page either.

    Raises:
        MegamindError: The folder cannot be written to.
    """
    if report is not None:
        _write(folder / REPORT_FILE, json.dumps(report.to_json(), indent=2) + "\n")
    _write(folder / TIMELINE_FILE, json.dumps(record.timeline.to_json()) + "\n")
    name = "" if record.events is None else record.events.load
    if record.events is not None:
        _write(folder / EVENTS_FILE, record.events.to_jsonl())
    _write(folder / TRACE_FILE, json.dumps(perfetto(record.timeline, name=name)) + "\n")
    if report is not None:
        _write(folder / PAGE_FILE, render(report, [record.timeline]))


def _write(path: Path, text: str) -> None:
    try:
        write_output(path, text, what="record")
    except OSError as error:
        raise MegamindError(f"record {path}: cannot be written ({error.strerror})") from error


def read_record(folder: str | os.PathLike[str]) -> tuple[LoadReport, Timeline]:
    """The report and the timeline of a record.

    Raises:
        RequestError: It is no record of a load that ended well, or one of another release.
    """
    path = Path(folder)
    try:
        report = LoadReport.from_json(_read(path / REPORT_FILE))
        return report, Timeline.from_json(_read(path / TIMELINE_FILE))
    except RequestError as error:
        if str(path) in error.message:
            raise
        raise RequestError(f"record {path}: {error.message}; it was not written by this release's --record") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"record {path}: cannot be read ({error}); give a folder that --record of `megamind load` or `plan` wrote"
        ) from error
    if not isinstance(document, dict):
        raise RequestError(f"record {path}: is not a JSON object; it was not written by --record")
    return document
