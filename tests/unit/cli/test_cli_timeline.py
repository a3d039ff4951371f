"""`megamind timeline`: a measured and a predicted record on one page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.api.record import read_record, write_record
from megamind_ray.core.recording import LoadRecord
from megamind_ray.core.timeline import Timeline

PLAN = ("plan", "llama-3-8b", "--shapes", "--tp", "2", "--topology", "4x-rtx-4090")


@pytest.fixture
def predicted(megamind: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "predicted"
    assert megamind(*PLAN, "--record", folder).code == 0
    return folder


@pytest.fixture
def measured(predicted: Path, tmp_path: Path) -> Path:
    """As if a load had gone exactly as predicted."""
    report, timeline = read_record(predicted)
    folder = tmp_path / "measured"
    folder.mkdir()
    record = LoadRecord(timeline=replace(timeline, origin="measured"), events=None)
    write_record(folder, record, replace(report, kind="load"))
    return folder


def test_a_record_is_shown_in_the_terminal(megamind: Any, predicted: Path) -> None:
    result = megamind("timeline", predicted)

    assert result.code == 0, result.stderr
    assert "n0/storage" in result.stdout
    assert "bottleneck" in result.stdout


def test_both_are_written_to_one_page_and_one_trace(megamind: Any, measured: Path, predicted: Path) -> None:
    page, trace = predicted.parent / "both.html", predicted.parent / "both.json"

    document = megamind("timeline", measured, predicted, "--out", page, "--trace", trace, "--json").document

    assert [report["kind"] for report in document["reports"]] == ["load", "simulation"]
    assert "measured" in page.read_text()
    names = {
        event["args"].get("name", "") for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"
    }
    assert any("measured" in name for name in names)
    assert any("predicted" in name for name in names)


def test_two_of_a_kind_are_refused(megamind: Any, predicted: Path) -> None:
    result = megamind("timeline", predicted, predicted)

    assert result.code == 2
    assert "both predicted" in result.stderr


def test_three_records_are_refused(megamind: Any, predicted: Path) -> None:
    assert "give one, or" in megamind("timeline", predicted, predicted, predicted).stderr


@pytest.mark.parametrize("text", [None, "", "[]", "{}", "not json", '{"schema": "megamind.timeline/9"}'])
def test_what_is_no_record_is_refused(megamind: Any, predicted: Path, text: str | None) -> None:
    path = predicted / "timeline.json"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)

    result = megamind("timeline", predicted)

    assert result.code == 2
    assert "timeline" in result.stderr


def test_a_page_that_cannot_be_written_is_an_error(megamind: Any, predicted: Path) -> None:
    result = megamind("timeline", predicted, "--out", predicted / "no" / "such" / "page.html")

    assert result.code == 2
    assert "cannot be written" in result.stderr


def test_an_empty_timeline_is_no_obstacle(megamind: Any, predicted: Path) -> None:
    (predicted / "timeline.json").write_text(json.dumps(Timeline.of("predicted", []).to_json()))

    assert megamind("timeline", predicted).code == 0


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("report.json", "kind", None),
        ("report.json", "bytes_total", "many"),
        ("report.json", "seconds", {"total": None}),
        ("report.json", "verified", "surely"),
        ("report.json", "ranks", [{"rank": "first"}]),
        ("report.json", "throughput_bytes_per_s", float("nan")),
        ("timeline.json", "origin", ["measured"]),
        ("timeline.json", "dropped_spans", None),
        ("timeline.json", "limits", {"bytes/s n0/storage": "fast"}),
        ("timeline.json", "schema", "another"),
    ],
)
def test_a_record_with_a_value_of_another_type_is_refused_by_its_name(
    megamind: Any, predicted: Path, tmp_path: Path, file: str, key: str, value: object
) -> None:
    document = json.loads((predicted / file).read_text())
    (predicted / file).write_text(json.dumps(document | {key: value}))

    result = megamind("timeline", predicted, "--out", tmp_path / "page.html", "--json")

    assert result.code == 2
    assert str(predicted) in result.document["error"]["message"]


@pytest.mark.parametrize("begin_s", [float("nan"), -1e300, None])
def test_spans_that_begin_at_no_time_are_refused(megamind: Any, predicted: Path, begin_s: float | None) -> None:
    document = json.loads((predicted / "timeline.json").read_text())
    document["spans"]["begin_s"][0] = begin_s
    (predicted / "timeline.json").write_text(json.dumps(document))

    result = megamind("timeline", predicted, "--json")

    assert result.code == 2
    assert "begin_s has" in result.document["error"]["message"]


def test_a_record_is_not_written_over(megamind: Any, predicted: Path) -> None:
    before = (predicted / "report.json").read_bytes()

    result = megamind("timeline", predicted, "--out", predicted / "report.json", "--json")

    assert result.code == 2
    assert (predicted / "report.json").read_bytes() == before


def test_the_page_and_the_trace_have_their_own_files(megamind: Any, predicted: Path, tmp_path: Path) -> None:
    result = megamind("timeline", predicted, "--out", tmp_path / "both", "--trace", tmp_path / "both", "--json")

    assert result.code == 2
    assert not (tmp_path / "both").exists()
