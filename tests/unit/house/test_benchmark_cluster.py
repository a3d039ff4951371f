"""What the cluster benchmark counts, and that a load that failed is in its result. Its beds are not needed for that."""

from __future__ import annotations

from pathlib import Path

import pytest

import megamind_ray as mm
from benchmarks._checkpoint import Checkpoint
from benchmarks._cluster_killed import lost_at
from benchmarks._cluster_rows import Found
from benchmarks._cluster_session import Expected, weight_bytes, write_model
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.rated_server import Sent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_model(tmp_path_factory.mktemp("cluster") / "model", 20_000_000)


def whole_files(checkpoint: Checkpoint) -> list[Sent]:
    return [Sent("10.0.0.1", path.name, 0, path.stat().st_size) for path in checkpoint.files]


def test_headers_are_not_weights_and_what_is_sent_twice_counts_twice(checkpoint: Checkpoint) -> None:
    once = whole_files(checkpoint)
    first = checkpoint.files[0].name

    assert weight_bytes(once, checkpoint) == checkpoint.nbytes
    assert weight_bytes([*once, Sent("10.0.0.2", "config.json", 0, 900)], checkpoint) == checkpoint.nbytes
    assert weight_bytes([Sent("10.0.0.1", first, 0, 8)], checkpoint) == 0
    end = checkpoint.files[0].stat().st_size
    assert weight_bytes([*once, Sent("10.0.0.2", first, end - 1000, end)], checkpoint) == checkpoint.nbytes + 1000


def test_ranks_need_what_they_share_once(checkpoint: Checkpoint) -> None:
    expected, mesh = Expected(checkpoint), mm.Parallel(tp=2, dp=2)
    tied = {place.name for place in checkpoint.places}
    of_one = sum(
        tensor.nbytes for name, tensor in expected_state_dict(checkpoint.folder, mesh, 0).items() if name in tied
    )

    assert expected.bytes_of(mesh, []) == 0
    assert expected.bytes_of(mesh, [0]) == expected.bytes_of(mesh, [0, 2]) == of_one, "replicas of one shard"
    assert expected.bytes_of(mesh, [0, 1]) == expected.bytes_of(mesh, [0, 1, 2, 3]) == checkpoint.nbytes
    assert checkpoint.nbytes / 2 < of_one < checkpoint.nbytes * 0.51, "norms are replicated"


def test_a_load_that_failed_is_a_row_that_failed_and_its_reason_is_kept() -> None:
    found = Found()

    found.ended("racks: dp=4", [True, False], "no answer")
    found.row("racks: seconds", [], target=1.5)

    (row,) = found.rows
    assert (row.name, row.samples, row.passed) == ("racks: dp=4: ended well", [1.0, 0.0], False)
    assert found.failures == {"racks: dp=4": "no answer"}
    assert found.not_measured == {"racks: seconds": "racks: dp=4: failed"}


def test_a_loss_counts_from_the_blow_on() -> None:
    events = [
        {"at_s": 0.1, "event": {"type": "WorkerLost"}},
        {"at_s": 3.0, "event": {"type": "RankDone"}},
        {"at_s": 4.0, "event": {"type": "AgentLost"}},
        {"at_s": 5.0, "event": {"type": "WorkerLost"}},
    ]

    assert lost_at(events, 2.0) == 4.0
    assert lost_at(events[:2], 2.0) is None


def test_the_model_can_be_shared_by_four(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plan = mm.plan(str(checkpoint.folder), mm.Parallel(tp=4), config=mm.load_config(profile=False))

    assert plan.bytes_total == checkpoint.nbytes
    assert plan.bytes_to_device < 1.01 * checkpoint.nbytes
