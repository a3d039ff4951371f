"""Where the record of a load is written: a folder with its report, its timeline and its events."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from megamind_ray.core.recording import LoadRecord
from megamind_ray.core.report import LoadReport
from megamind_ray.errors import MegamindError, RequestError

__all__ = ["EVENTS_FILE", "new_folder", "write_record"]

REPORT_FILE: Final = "report.json"
TIMELINE_FILE: Final = "timeline.json"
EVENTS_FILE: Final = "events.jsonl"


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


def write_record(folder: Path, record: LoadRecord, report: LoadReport | None) -> None:
    """Writes ``report.json``, ``timeline.json`` and ``events.jsonl``, those of them that there are.

    Args:
        folder: Where, see ``new_folder``.
        record: What was recorded.
        report: Of the load; None where it failed.

    Raises:
        MegamindError: The folder cannot be written to.
    """
    texts = {TIMELINE_FILE: json.dumps(record.timeline.to_json()) + "\n"}
    if report is not None:
        texts[REPORT_FILE] = json.dumps(report.to_json(), indent=2) + "\n"
    if record.events is not None:
        texts[EVENTS_FILE] = record.events.to_jsonl()
    for name, text in texts.items():
        path = folder / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise MegamindError(f"record {path}: cannot be written ({error.strerror})") from error
