"""``megamind load`` against a cluster that is a hand-written fake: options, streams, exit codes, cleaning up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from megamind_ray.core.parallel import Parallel
from megamind_ray.core.progress import Progress, RankProgress
from megamind_ray.core.report import LoadReport, RankReport
from megamind_ray.errors import CapacityError, ClusterError, RecordError

GPU_FULL = CapacityError("GPU n0:0: out of memory", where="GPU n0:0", needed_bytes=3, free_bytes=1)
MOVING = Progress(
    phase="transfer", bytes_done=5, bytes_total=10, ranks=(RankProgress(rank=0, bytes_done=5, bytes_total=10),)
)


def report(model: str) -> LoadReport:
    rank = RankReport(rank=0, pp=0, dp=0, tp=0, node="n0", gpu=0, num_tensors=1, arena_bytes=10, bytes_to_device=10)
    return LoadReport(
        model=model,
        uri="x",
        parallel={"tp": 1, "pp": 1, "dp": 1, "ep": 1},
        started_at="2026-01-01T00:00:00+00:00",
        bytes_total=10,
        bytes_from_storage=10,
        bytes_to_device=10,
        bytes_replicated=0,
        seconds={"total": 1.0, "transfer": 0.5},
        throughput_bytes_per_s=20.0,
        ranks=(rank,),
        verified="transit",
    )


@dataclass
class FakeModel:
    report: LoadReport
    unload: Callable[[], None]


@dataclass
class FakeCluster:
    """Tells what it was asked, shows progress, and then loads or raises."""

    outcome: BaseException | None = None
    progress: tuple[Progress, ...] = (Progress(phase="queued"), MOVING)
    connected: dict[str, Any] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    closed: int = 0
    unloaded: list[str] = field(default_factory=list)

    def connect(self, address: str | None, **options: Any) -> Self:
        self.connected = {"address": address, **options}
        return self

    def load(self, uri: str, *, on_progress: Callable[[Progress], None], **options: Any) -> FakeModel:
        self.loaded = {"uri": uri, **options}
        print("what a worker prints")
        for snapshot in self.progress:
            on_progress(snapshot)
        if self.outcome is not None:
            raise self.outcome
        name = options["name"] or "x"
        return FakeModel(report(name), lambda: self.unload(name))

    def unload(self, name: str) -> None:
        assert not self.closed
        self.unloaded.append(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr("megamind_ray.api.cluster.connect", fake.connect)
    monkeypatch.setattr("megamind_ray.actors.connection.find_cluster", lambda *_args, **_options: "10.0.0.1:6379")
    return fake


def test_the_report_is_the_document(megamind: Any, cluster: FakeCluster) -> None:
    result = megamind("load", "x", "--name", "tiny", "--json")

    assert result.code == 0
    assert LoadReport.from_json(result.document) == report("tiny")


def test_people_see_what_each_rank_holds(megamind: Any, cluster: FakeCluster) -> None:
    result = megamind("load", "x")

    assert "n0:0" in result.stdout
    assert "20 B/s from storage" in result.stdout


def test_no_progress_is_drawn_where_there_is_no_terminal(megamind: Any, cluster: FakeCluster) -> None:
    assert megamind("load", "x").stderr == "what a worker prints\n"


def test_options_reach_the_cluster(megamind: Any, cluster: FakeCluster) -> None:
    options = "--tp 4 --pp 2 --dp 1 --ep 2 --no-keep --name big --detach --address 10.0.0.1:6379 --fleet blue"

    megamind("load", "s3://bucket/big", *options.split(), "--device-memory", "70GiB", "--allow-replication")

    assert cluster.loaded["parallel"] == Parallel(tp=4, pp=2, ep=2)
    assert (cluster.loaded["keep"], cluster.loaded["name"], cluster.loaded["allow_replication"]) == (False, "big", True)
    assert cluster.connected["address"] == "10.0.0.1:6379"
    assert (cluster.connected["fleet"], cluster.connected["lifetime"]) == ("blue", "detached")
    assert cluster.connected["device_memory"] == "70GiB"


def test_the_folder_of_the_record_reaches_the_cluster(megamind: Any, cluster: FakeCluster, tmp_path: Path) -> None:
    result = megamind("load", "x", "--record", tmp_path / "new")

    assert cluster.loaded["record"] == tmp_path / "new"
    assert f"record written to {tmp_path / 'new'}" in result.stdout


def test_a_load_lives_as_long_as_its_command_by_default(megamind: Any, cluster: FakeCluster) -> None:
    megamind("load", "x")

    assert cluster.connected["lifetime"] == "job"
    assert cluster.closed == 1


def test_a_configuration_file_is_used(megamind: Any, cluster: FakeCluster, tmp_path: Path) -> None:
    (tmp_path / "megamind.toml").write_text('[io]\nchunk_bytes = "12MiB"\nextent_bytes = "48MiB"\n')

    megamind("load", "x", "--config", tmp_path / "megamind.toml")

    assert cluster.connected["config"].io.chunk_bytes == 12 << 20


def test_the_report_is_written_to_a_file_too(megamind: Any, cluster: FakeCluster, tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    result = megamind("load", "x", "--report", path, "--json")

    assert json.loads(path.read_text()) == result.document


def test_a_report_file_that_cannot_be_is_refused_before_anything_starts(megamind: Any, cluster: FakeCluster) -> None:
    result = megamind("load", "x", "--report", "/no/such/folder/report.json")

    assert result.code == 2
    assert "/no/such/folder" in result.stderr
    assert cluster.connected == {}


@pytest.mark.parametrize("argv", [("--ep", "3"), ("--config", "/no/such.toml"), ("--rules", "/no/such.toml")])
def test_a_wrong_request_starts_nothing(megamind: Any, cluster: FakeCluster, argv: tuple[str, ...]) -> None:
    assert megamind("load", "x", *argv).code == 2
    assert cluster.connected == {}


def test_a_topology_file_that_cannot_be_read_starts_nothing(
    megamind: Any, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMIND_PLAN_TOPOLOGY", "/no/such.toml")

    result = megamind("load", "x", "--json")

    assert result.code == 2
    assert "/no/such.toml" in result.document["error"]["message"]
    assert cluster.connected == {}


def test_a_fleet_that_stays_gets_its_memory_back(megamind: Any, cluster: FakeCluster) -> None:
    assert megamind("load", "x", "--name", "a").code == 0

    assert (cluster.unloaded, cluster.closed) == (["a"], 1)


def test_a_detached_model_stays(megamind: Any, cluster: FakeCluster) -> None:
    assert megamind("load", "x", "--detach").code == 0

    assert (cluster.unloaded, cluster.closed) == ([], 1)


@pytest.mark.parametrize(("options", "unloaded"), [((), ["llama"]), (("--detach",), [])])
def test_a_load_whose_record_cannot_be_written_is_given_back_too(
    megamind: Any, cluster: FakeCluster, options: tuple[str, ...], unloaded: list[str]
) -> None:
    cluster.outcome = RecordError("record r: cannot be written (no room)", model="llama")

    result = megamind("load", "x", *options)

    assert (result.code, cluster.unloaded) == (1, unloaded)
    assert ("stays loaded" in result.stderr) is bool(options)


def test_nothing_can_stay_in_a_cluster_that_ends_with_the_command(megamind: Any, no_cluster: FakeCluster) -> None:
    result = megamind("load", "x", "--detach", "--address", "local")

    assert (result.code, no_cluster.connected) == (2, {})
    assert "--detach: the Ray that this command would start ends with it" in result.stderr
    assert "ray start --head" in result.stderr


def test_a_failure_closes_the_cluster_and_exits_with_1(megamind: Any, cluster: FakeCluster) -> None:
    cluster.outcome = ClusterError("the planner is gone")

    result = megamind("load", "x", "--json")

    assert (result.code, cluster.closed) == (1, 1)
    assert result.document["error"]["class"] == "ClusterError"


def test_an_interrupt_closes_the_cluster_and_exits_with_130(megamind: Any, cluster: FakeCluster) -> None:
    cluster.outcome = KeyboardInterrupt()

    result = megamind("load", "x", "--json")

    assert (result.code, cluster.closed) == (130, 1)
    assert result.document["error"]["class"] == "KeyboardInterrupt"


def test_what_does_not_fit_is_a_wrong_request(megamind: Any, cluster: FakeCluster) -> None:
    cluster.outcome = GPU_FULL
    cluster.progress = (Progress(phase="plan"),)

    assert megamind("load", "x").code == 2


def test_memory_that_runs_out_in_the_middle_is_a_failure(megamind: Any, cluster: FakeCluster) -> None:
    cluster.outcome = CapacityError("GPU n0:0: out of memory", where="GPU n0:0", needed_bytes=3, free_bytes=1)

    assert megamind("load", "x").code == 1


@pytest.fixture
def no_cluster(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """None runs: one would be started."""
    monkeypatch.setattr("megamind_ray.actors.connection.find_cluster", lambda *_args, **_options: None)
    return cluster


def test_no_cluster_is_started_for_a_checkpoint_that_is_not_there(megamind: Any, no_cluster: FakeCluster) -> None:
    result = megamind("load", "/no/such/model", "--json")

    assert result.code == 2
    assert "/no/such/model: no such file or folder" in result.document["error"]["message"]
    assert no_cluster.connected == {}


def test_no_cluster_is_started_for_a_mesh_that_does_not_divide_the_model(
    megamind: Any, no_cluster: FakeCluster, checkpoint: Path
) -> None:
    result = megamind("load", checkpoint, "--tp", "3", "--json")

    assert (result.code, result.document["error"]["class"]) == (2, "RequestError")
    assert no_cluster.connected == {}


def test_no_cluster_is_started_for_a_recording_that_is_not_there(
    megamind: Any, no_cluster: FakeCluster, checkpoint: Path
) -> None:
    assert megamind("load", checkpoint, "--sidecar", "/no/such.json").code == 2
    assert no_cluster.connected == {}


def test_no_cluster_is_started_with_fewer_gpus_than_ranks(
    megamind: Any, no_cluster: FakeCluster, checkpoint: Path
) -> None:
    result = megamind("load", checkpoint, "--tp", "2", "--num-gpus", "1", "--json")

    assert (result.code, no_cluster.connected) == (2, {})
    assert "give --num-gpus 2" in result.document["error"]["message"]


def test_a_request_that_is_right_goes_to_the_cluster_that_is_started(
    megamind: Any, no_cluster: FakeCluster, checkpoint: Path
) -> None:
    assert megamind("load", checkpoint, "--tp", "2").code == 0
    assert no_cluster.loaded["parallel"] == Parallel(tp=2)


def test_a_cluster_that_runs_may_reach_what_this_machine_does_not(megamind: Any, cluster: FakeCluster) -> None:
    assert megamind("load", "/no/such/model").code == 0
    assert cluster.loaded["uri"] == "/no/such/model"
