"""``megamind replay``, and where records of loads are written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.api.record import new_folder, write_record
from megamind_ray.core import events as ev
from megamind_ray.core.event_log import EventLog, LogEntry
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadFacts, LoadMachine
from megamind_ray.core.recorder import Recorded, SpanRow
from megamind_ray.core.recording import LoadRecord, RawRecord
from megamind_ray.core.report import LoadReport
from megamind_ray.core.timeline import Timeline
from megamind_ray.errors import MegamindError, RequestError

RAY_ID = "ab12cd34" * 7


@pytest.fixture
def log() -> EventLog:
    """One rank that is lost once."""
    extent = ExtentId(0)
    facts = LoadFacts(
        nodes=(NodeId(RAY_ID),),
        num_ranks=1,
        reader={extent: NodeId(RAY_ID)},
        consumers={extent: (Rank(0),)},
        extent_bytes={extent: 100},
    )
    machine = LoadMachine(facts)
    happened = (
        ev.LoadStarted(),
        ev.WorkerLost(rank=Rank(0), generation=Generation(0), reason="its process ended"),
        ev.WorkerReady(rank=Rank(0), generation=Generation(1)),
        ev.RankDone(rank=Rank(0), generation=Generation(1)),
    )
    entries = [
        LogEntry(at_s=number + 0.5, event=event, instructions=tuple(machine.handle(event)))
        for number, event in enumerate(happened)
    ]
    return EventLog(facts=facts, entries=tuple(entries), load="tiny#1", release="0.0.1")


@pytest.fixture
def folder(tmp_path: Path, log: EventLog) -> Path:
    """A record without a report, as a load that failed leaves it."""
    folder = new_folder(tmp_path / "recorded")
    write_record(folder, RawRecord(events=log).assembled(), None)
    return folder


def differing(log: EventLog) -> EventLog:
    first, second, *rest = log.entries
    return replace(log, entries=(first, replace(second, instructions=second.instructions[:1]), *rest))


def test_events_and_instructions_are_shown_with_their_times(megamind: Any, folder: Path) -> None:
    result = megamind("replay", folder)

    assert result.code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1] == ["0.500", "s", "LoadStarted", "StartRank:", "rank", "0,", "generation", "0"]
    assert lines[2] == ["StartReads:", "node", "ab12cd34"]
    assert "WorkerLost: rank 0, generation 0, reason its process ended" in result.stdout
    assert "RecordFault: fault worker_lost" in result.stdout
    assert "ReadAgain: node ab12cd34, extents 0, ranks 0" in result.stdout
    assert "the same: " in result.stdout
    assert "gives the same 7 instructions to 4 events (recorded with megamind-ray 0.0.1)" in result.stdout


def test_the_file_may_be_named_too(megamind: Any, folder: Path) -> None:
    assert megamind("replay", folder / "events.jsonl").stdout == megamind("replay", folder).stdout


def test_the_document_has_all_events(megamind: Any, folder: Path) -> None:
    result = megamind("replay", folder, "--json")

    assert result.code == 0
    assert (result.document["load"], result.document["recorded_with"]) == ("tiny#1", "0.0.1")
    assert result.document["same"] is True
    assert result.document["difference"] is None
    assert [entry["event"]["type"] for entry in result.document["events"]] == [
        "LoadStarted",
        "WorkerLost",
        "WorkerReady",
        "RankDone",
    ]


def test_a_difference_is_shown_and_is_exit_code_1(megamind: Any, folder: Path, log: EventLog) -> None:
    (folder / "events.jsonl").write_text(differing(log).to_jsonl())

    result = megamind("replay", folder)
    document = megamind("replay", folder, "--json").document

    assert result.code == 1
    assert "different: at 1.500 s (line 3) to WorkerLost: rank 0" in result.stdout
    assert "ReplaceWorker: rank 0, generation 1" in result.stdout
    assert document["same"] is False
    assert document["difference"]["line"] == 3
    assert [said["type"] for said in document["difference"]["replayed"]] == ["RecordFault", "ReplaceWorker"]


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"{}\n", "line 1"), (b"\xff\xfe", "not text"), (None, "cannot be read")],
    ids=["foreign", "binary", "missing"],
)
def test_what_is_no_log_is_a_wrong_request(megamind: Any, tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "events.jsonl"
    if content is not None:
        path.write_bytes(content)

    result = megamind("replay", tmp_path, "--json")

    assert result.code == 2
    assert str(path) in result.document["error"]["message"]
    assert text in result.document["error"]["message"]


@pytest.fixture
def report() -> LoadReport:
    return LoadReport(
        model="tiny",
        uri="/tiny",
        parallel={"tp": 1},
        started_at="2026-01-01T00:00:00+00:00",
        bytes_total=1,
        bytes_from_storage=1,
        bytes_to_device=1,
        bytes_replicated=0,
        seconds={"total": 1.0},
        throughput_bytes_per_s=1.0,
        ranks=(),
        verified="transit",
    )


def test_a_record_is_a_report_a_timeline_the_events_and_two_pictures(
    tmp_path: Path, log: EventLog, report: LoadReport
) -> None:
    copy: SpanRow = ("rank 0", "copy", 0.5, 1.5, 8, "block 0")
    record: LoadRecord = RawRecord(parts=(Recorded(spans=(copy,)),), events=log).assembled()
    folder = new_folder(tmp_path / "a" / "b")

    write_record(folder, record, report)

    assert LoadReport.from_json(json.loads((folder / "report.json").read_text())) == report
    timeline = Timeline.from_json(json.loads((folder / "timeline.json").read_text()))
    assert timeline.to_json() == record.timeline.to_json()
    assert EventLog.from_jsonl((folder / "events.jsonl").read_text()).to_jsonl() == log.to_jsonl()
    trace = json.loads((folder / "trace.json").read_text())
    assert "block 0" in json.dumps(trace["traceEvents"])
    assert trace["otherData"]["name"] == "tiny#1"
    assert "rank 0" in (folder / "timeline.html").read_text()


def test_a_load_that_failed_has_neither_report_nor_page(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"timeline.json", "events.jsonl", "trace.json"}


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    new_folder(tmp_path / "empty")
    new_folder(tmp_path / "empty")
    (tmp_path / "empty" / "notes.txt").touch()

    with pytest.raises(RequestError, match="is not empty"):
        new_folder(tmp_path / "empty")
    with pytest.raises(RequestError, match="cannot be used as a folder"):
        new_folder(tmp_path / "empty" / "notes.txt")


def test_a_folder_that_went_away_meanwhile_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "gone")
    folder.rmdir()

    with pytest.raises(MegamindError, match=r"gone/timeline\.json: cannot be written"):
        write_record(folder, RawRecord().assembled(), None)


def test_a_load_does_not_begin_with_a_folder_that_cannot_take_its_record(
    megamind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object, **__: object) -> None:
        raise AssertionError("the load began")

    monkeypatch.setattr("megamind_ray.api.cluster.connect", connect)
    (tmp_path / "notes.txt").touch()

    result = megamind("load", "x", "--record", tmp_path, "--json")

    assert result.code == 2
    assert "is not empty" in result.document["error"]["message"]
