"""Recorded loads through planner, agents and workers: what the record holds, and that it is replayed exactly."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import megamind_ray as mm
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import EventLog, as_document, check, replay
from megamind_ray.core.timeline import Timeline
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.range_server import RangeServer

BOUND_S = 90.0
FILES = {"report.json", "timeline.json", "events.jsonl", "trace.json", "timeline.html"}
SMALL_CHUNKS: dict[str, dict[str, object]] = {"io": {"chunk_bytes": 128 * 1024, "extent_bytes": 256 * 1024}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("recorded") / "llama", num_layers=20)


@pytest.fixture
def held(folder: Path) -> Iterator[RangeServer]:
    """Serves the checkpoint, but nothing from its middle on."""
    with RangeServer(folder, hold_after_bytes=2 << 20) as server:
        yield server


class Background:
    """A recorded load on a thread of its own."""

    def __init__(self, cluster: mm.Cluster, uri: str, record: Path) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._load, args=(cluster, uri, record), daemon=True)
        self._thread.start()

    def _load(self, cluster: mm.Cluster, uri: str, record: Path) -> None:
        try:
            cluster.load(uri, mm.Parallel(tp=2), name="victim", keep=False, record=record).unload()
        except BaseException as error:  # noqa: BLE001 - looked at by the test, on its own thread
            self.error = error

    def wait(self) -> None:
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive(), "the load hangs"


def read_timeline(record: Path) -> Timeline:
    return Timeline.from_json(json.loads((record / "timeline.json").read_text()))


def read_log(record: Path) -> EventLog:
    return EventLog.from_jsonl((record / "events.jsonl").read_text())


def total(timeline: Timeline, kind: str) -> int:
    return sum(row["nbytes"] for row in timeline.spans.to_pylist() if row["kind"] == kind)


@pytest.mark.parametrize("force_pool", [True, False], ids=["through the pool", "as planned"])
def test_the_record_of_a_clean_load_has_every_byte_once(
    cluster: mm.Cluster, folder: Path, tmp_path: Path, force_pool: bool
) -> None:
    config = mm.load_config(overrides={**SMALL_CHUNKS, "routing": {"force_pool": force_pool, "min_direct_bytes": 1}})
    record = tmp_path / "record"
    with mm.connect(cluster.address, config=config) as client:
        model = client.load(folder, mm.Parallel(tp=2, pp=2), keep=False, record=record)
        model.unload()
    report, timeline, log = model.report, read_timeline(record), read_log(record)

    assert {path.name for path in record.iterdir()} == FILES
    assert mm.LoadReport.from_json(json.loads((record / "report.json").read_text())) == report
    assert total(timeline, "read") == report.bytes_from_storage == report.bytes_total
    assert total(timeline, "copy") == report.bytes_to_device
    assert timeline.dropped_spans == 0
    tracks = set(timeline.spans["track"].to_pylist())
    node = report.ranks[0].node[:8]
    assert {"planner", f"{node}/storage", f"{node}/pool", *(f"rank {rank}" for rank in range(4))} <= tracks
    by_series = {row["series"]: row["value"] for row in timeline.samples.to_pylist()}
    for rank in report.ranks:
        assert by_series[f"bytes rank {rank.rank}/device"] == rank.bytes_to_device
        assert timeline.limits[f"bytes rank {rank.rank}/device"] == rank.arena_bytes
    assert by_series[f"bytes {node}/host"] == 0, "all credit came back"
    assert sorted(mark.text for mark in timeline.marks) == [f"rank {rank}" for rank in range(4)]
    assert timeline.end_s <= report.seconds["total"] + 1.0
    assert log.release == mm.__version__
    assert check(log) is None


def test_a_load_that_is_not_recorded_leaves_nothing_to_fetch(cluster: mm.Cluster, folder: Path) -> None:
    cluster.load(folder, name="plain", keep=False).unload()

    client = cluster._client
    assert client._ask(lambda planner: planner.record.remote("no such ticket"), "asking") is None


def test_the_loss_of_a_worker_is_recorded_and_replayed_exactly(
    cluster: mm.Cluster, folder: Path, held: RangeServer, tmp_path: Path
) -> None:
    scout = cluster.load(folder, mm.Parallel(tp=2), name="scout")
    victim: int = scout.run(lambda ctx: os.getpid())[1]
    scout.unload()
    record = tmp_path / "record"
    with mm.connect(cluster.address, config=mm.load_config(overrides=SMALL_CHUNKS)) as client:
        load = Background(client, held.uri + "/model.safetensors", record)
        assert held.wait_until_holding()
        os.kill(victim, signal.SIGKILL)
        held.release()
        load.wait()
    assert load.error is None, load.error
    log, timeline = read_log(record), read_timeline(record)

    assert [entry.event.rank for entry in log.entries if isinstance(entry.event, ev.WorkerLost)] == [1]
    assert check(log) is None
    said = tuple(instruction for entry in log.entries for instruction in entry.instructions)
    assert as_document(tuple(replay(log))) == as_document(said)
    assert isinstance(said[-1], ins.CompleteLoad)
    (lost,) = [mark for mark in timeline.marks if mark.kind == "worker_lost"]
    report = mm.LoadReport.from_json(json.loads((record / "report.json").read_text()))
    (fault,) = report.faults
    assert lost.at_s == fault.at_s
    rows = timeline.spans.to_pylist()
    copied = sum(row["nbytes"] for row in rows if (row["track"], row["kind"]) == ("rank 1", "copy"))
    assert copied == report.ranks[1].bytes_to_device > 0, "its successor took all anew"


def test_a_load_that_fails_leaves_its_events_and_what_was_recorded(
    cluster: mm.Cluster, held: RangeServer, tmp_path: Path
) -> None:
    deadlines = {"stall_s": 2.0, "poll_s": 0.5, "close_s": 4.0}
    record = tmp_path / "record"
    with mm.connect(
        cluster.address, config=mm.load_config(overrides={**SMALL_CHUNKS, "deadlines": deadlines})
    ) as client:
        load = Background(client, held.uri + "/model.safetensors", record)
        load.wait()
        held.release()
    assert isinstance(load.error, mm.ClusterError)
    assert not (record / "report.json").exists()
    log, timeline = read_log(record), read_timeline(record)

    assert isinstance(log.entries[-1].event, ev.DeadlinePassed)
    assert check(log) is None
    assert total(timeline, "read") > 0
    assert [mark.text for mark in timeline.marks if mark.kind == "load_failed"] == [str(load.error)]


def test_a_request_that_is_refused_leaves_no_events(cluster: mm.Cluster, tmp_path: Path) -> None:
    with pytest.raises(mm.RequestError):
        cluster.load(tmp_path / "nothing", record=tmp_path / "record")

    assert not (tmp_path / "record" / "events.jsonl").exists()
    assert read_timeline(tmp_path / "record").spans["label"].to_pylist() == ["manifest"]


def test_a_record_that_cannot_be_written_says_so_and_leaves_the_model(
    cluster: mm.Cluster, held: RangeServer, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    with mm.connect(cluster.address, config=mm.load_config(overrides=SMALL_CHUNKS)) as client:
        load = Background(client, held.uri + "/model.safetensors", record)
        assert held.wait_until_holding()
        record.rmdir()
        held.release()
        load.wait()
        assert isinstance(load.error, mm.MegamindError)
        assert "the load itself was done, model 'victim' stays loaded" in str(load.error)
        client.model("victim").unload()


def test_a_folder_that_is_not_empty_is_refused_before_anything_is_loaded(
    cluster: mm.Cluster, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").touch()

    with pytest.raises(mm.RequestError, match="is not empty"):
        cluster.load(folder, record=tmp_path)
    assert cluster.models() == []
