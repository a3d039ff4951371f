"""Loads through planner, agents and workers: every rank holds what the oracle says, and nothing else happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megamind_ray as mm
from megamind_ray.core.progress import Progress
from megamind_ray.testing.checkpoints import (
    gpt_oss_checkpoint,
    llama_checkpoint,
    llama_fp8_checkpoint,
    mixtral_checkpoint,
)
from megamind_ray.testing.digests import digest_all, rank_digests
from megamind_ray.testing.oracle import expected_state_dict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("ray") / "llama", num_files=3)


@pytest.mark.parametrize(
    ("make", "parallel"),
    [
        (llama_checkpoint, mm.Parallel(tp=4)),
        (llama_checkpoint, mm.Parallel(tp=2, pp=2)),
        (llama_checkpoint, mm.Parallel(tp=2, dp=2)),
        (llama_fp8_checkpoint, mm.Parallel(tp=3)),
        (mixtral_checkpoint, mm.Parallel(tp=2, dp=2, ep=4)),
        (mixtral_checkpoint, mm.Parallel(tp=2, dp=2, ep=2)),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_every_rank_holds_exactly_its_slices(
    cluster: mm.Cluster, tmp_path: Path, make: Callable[[Path], Path], parallel: mm.Parallel
) -> None:
    folder = make(tmp_path / "m")
    model = cluster.load(folder, parallel)
    held = model.run(rank_digests)
    model.unload()
    for rank in parallel.ranks:
        assert held[rank] == digest_all(expected_state_dict(folder, parallel, rank))


def test_storage_is_read_once_and_the_report_adds_up(cluster: mm.Cluster, folder: Path) -> None:
    model = cluster.load(folder, mm.Parallel(tp=2, dp=2), keep=False)
    model.unload()
    report = model.report
    assert report.bytes_from_storage == report.bytes_total == mm.inspect(folder).nbytes
    assert report.bytes_to_device == report.bytes_total + report.bytes_replicated
    assert report.bytes_to_device == sum(rank.bytes_to_device for rank in report.ranks)
    assert report.bytes_retried == 0
    assert report.faults == ()
    assert report.verified == "transit"
    assert {"manifest", "workers", "plan", "transfer", "total"} <= set(report.seconds)
    assert [rank.rank for rank in report.ranks] == [0, 1, 2, 3]


def test_a_report_survives_json(cluster: mm.Cluster, folder: Path) -> None:
    import json

    model = cluster.load(folder)
    model.unload()
    assert mm.LoadReport.from_json(json.loads(json.dumps(model.report.to_json()))) == model.report


def test_kept_blocks_are_reported_and_go_with_the_model(cluster: mm.Cluster, folder: Path) -> None:
    model = cluster.load(folder, mm.Parallel(tp=2), keep=True)
    (info,) = cluster.models()
    assert model.report.kept.num_bytes == model.report.bytes_total == info.kept_bytes
    assert model.report.kept.bytes_not_kept == 0
    model.unload()
    again = cluster.load(folder, mm.Parallel(tp=2), keep=False)
    assert again.report.kept.num_bytes == 0
    again.unload()


def test_models_live_side_by_side_and_their_memory_comes_back(cluster: mm.Cluster, folder: Path) -> None:
    def free() -> list[int]:
        return [gpu.free_bytes for node in cluster.topology().nodes for gpu in node.gpus]

    before = free()
    first = cluster.load(folder, mm.Parallel(tp=2), name="first")
    second = cluster.load(folder, mm.Parallel(tp=4), name="second")
    assert [model.name for model in cluster.models()] == ["first", "second"]
    assert first.run(lambda ctx: ctx.rank) == [0, 1]
    assert cluster.model("second").report == second.report
    assert second.run(lambda ctx: ctx.coords.tp) == [0, 1, 2, 3]
    first.unload()
    second.unload()
    assert free() == before


def test_state_stays_from_call_to_call_and_tied_names_share_memory(cluster: mm.Cluster, folder: Path) -> None:
    model = cluster.load(folder, mm.Parallel(tp=2))

    def remember(ctx: Any, word: str) -> None:
        ctx.state["word"] = word + str(ctx.rank)

    model.run(remember, "hello")
    assert model.run(lambda ctx: ctx.state["word"]) == ["hello0", "hello1"]
    tied = "lm_head.weight", "model.embed_tokens.weight"
    assert model.run(lambda ctx: len({ctx.state_dict[name].data_ptr() for name in tied})) == [1, 1]
    model.unload()


def test_the_device_mesh_spans_the_ranks(cluster: mm.Cluster, folder: Path) -> None:
    model = cluster.load(folder, mm.Parallel(pp=2, tp=2))

    def sum_over_tp(ctx: Any) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor([float(ctx.rank)])
        dist.all_reduce(value, group=ctx.device_mesh["tp"].get_group())
        result = value.item()
        dist.barrier()
        return result

    def leave(ctx: Any) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    assert model.run(sum_over_tp) == [1.0, 1.0, 5.0, 5.0]
    model.run(leave)
    model.unload()


def test_what_a_function_raises_reaches_the_caller_as_it_is(cluster: mm.Cluster, folder: Path) -> None:
    model = cluster.load(folder)

    def fail(ctx: Any) -> None:
        raise KeyError(f"rank {ctx.rank} says no")

    with pytest.raises(KeyError, match="rank 0 says no"):
        model.run(fail)
    model.unload()


def test_a_function_that_does_not_return_holds_up_neither_progress_nor_another_load(
    cluster: mm.Cluster, folder: Path, tmp_path: Path
) -> None:
    """User code runs on a thread of its own: moves go on beside it."""
    busy = cluster.load(folder, mm.Parallel(tp=4), name="busy")
    gate = tmp_path / "gate"

    def wait_for_gate(ctx: Any) -> int:
        import time

        for _ in range(600):
            if gate.exists():
                return int(ctx.rank)
            time.sleep(0.1)
        raise TimeoutError

    answers: list[list[int]] = []
    running = threading.Thread(target=lambda: answers.append(busy.run(wait_for_gate)), daemon=True)
    running.start()
    other = cluster.load(folder, mm.Parallel(tp=4), name="other")
    other.unload()
    gate.touch()
    running.join(60)
    assert answers == [[0, 1, 2, 3]]
    busy.unload()


def test_unloading_while_code_holds_tensors_says_so_and_the_memory_comes_back_later(
    cluster: mm.Cluster, folder: Path
) -> None:
    def free() -> list[int]:
        return [gpu.free_bytes for node in cluster.topology().nodes for gpu in node.gpus]

    def hoard(ctx: Any) -> None:
        import torch

        torch.hoarded = ctx.state_dict  # somewhere that outlives the call and ctx.state

    def forget(ctx: Any) -> None:
        import torch

        torch.__dict__.pop("hoarded", None)

    before = free()
    config = mm.load_config(overrides={"deadlines": {"close_s": 0.2}})
    with mm.connect(cluster.address, config=config) as client:
        held = client.load(folder, name="held")
        held.run(hoard)
        with pytest.raises(mm.RequestError, match="rank 0"):
            held.unload()
        assert client.models() == []
        other = client.load(folder, name="other", parallel=mm.Parallel(tp=4))
        other.run(forget)
        other.unload()
    assert free() == before


def test_progress_goes_up_to_the_bytes_of_all_ranks(cluster: mm.Cluster, tmp_path: Path) -> None:
    folder = llama_checkpoint(tmp_path / "larger", total_bytes=96 << 20)
    seen: list[Progress] = []
    model = cluster.load(folder, mm.Parallel(tp=2), on_progress=seen.append)
    model.unload()
    done = [progress.bytes_done for progress in seen]
    assert done == sorted(done)
    totals = {progress.bytes_total for progress in seen if progress.phase == "transfer" and progress.ranks}
    assert totals <= {model.report.bytes_to_device}


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c, f: c.load(f, mm.Parallel(tp=8)), mm.RequestError, "8"),
        (lambda c, f: c.load(f, mm.Parallel(tp=3)), mm.RequestError, "num_key_value_heads"),
        (lambda c, f: c.load(f / "nowhere"), mm.RequestError, "nowhere"),
        (lambda c, f: c.load(f, name="no/slash"), mm.RequestError, "no/slash"),
        (lambda c, _: c.unload("ghost"), mm.RequestError, "ghost"),
        (lambda c, _: c.model("ghost"), mm.RequestError, "ghost"),
    ],
    ids=[
        "more ranks than GPUs",
        "tp against heads",
        "no such path",
        "bad name",
        "no such model",
        "no such model to look at",
    ],
)
def test_bad_requests_are_refused_by_name_and_leave_nothing(
    cluster: mm.Cluster, folder: Path, call: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(cluster, folder)
    assert cluster.models() == []


def test_a_name_that_is_taken_is_refused(cluster: mm.Cluster, folder: Path) -> None:
    model = cluster.load(folder, name="twice")
    with pytest.raises(mm.RequestError, match="twice"):
        cluster.load(folder, name="twice")
    model.unload()


def test_a_client_of_another_release_is_refused(cluster: mm.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from megamind_ray.actors import reaching

    monkeypatch.setattr(reaching, "__version__", "9.9.9")
    with pytest.raises(mm.RequestError, match=r"9\.9\.9.*megamind down"):
        mm.connect(cluster.address)


def test_a_size_for_a_running_cluster_is_refused(cluster: mm.Cluster) -> None:
    with pytest.raises(mm.RequestError, match="num_gpus=2"):
        mm.connect(cluster.address, num_gpus=2)


def test_ranks_without_a_byte_and_a_checkpoint_without_one_are_loads_like_others(
    cluster: mm.Cluster, tmp_path: Path
) -> None:
    """Five blocks of MXFP4 over four ranks leave the last one none of some tensors; an empty tensor is nobody's."""
    from megamind_ray.testing.sparse import sparse_checkpoint

    folder = sparse_checkpoint(tmp_path / "empty", {"nothing": (0, 4)})
    model = cluster.load(folder, mm.Parallel(dp=2))
    assert model.run(lambda ctx: tuple(ctx.state_dict["nothing"].shape)) == [(0, 4), (0, 4)]
    assert (model.report.bytes_total, model.report.bytes_from_storage) == (0, 0)
    model.unload()
    folder = gpt_oss_checkpoint(tmp_path / "gpt_oss")
    parallel = mm.Parallel(tp=4)
    model = cluster.load(folder, parallel)
    held = model.run(rank_digests)
    model.unload()
    assert held == [digest_all(expected_state_dict(folder, parallel, rank)) for rank in parallel.ranks]


def test_blocks_that_are_kept_nowhere_are_told(cluster: mm.Cluster, tmp_path: Path) -> None:
    """The pool has room for a part of them only: what is kept and what is not is the whole checkpoint."""
    folder = llama_checkpoint(tmp_path / "larger-than-the-pool", total_bytes=300 * 10**6)
    model = cluster.load(folder, mm.Parallel(tp=2), keep=True)
    model.unload()
    kept = model.report.kept
    assert 0 < kept.num_bytes < 256 << 20
    assert kept.num_bytes + kept.bytes_not_kept == model.report.bytes_total
    assert "keep_fraction" in kept.reason


def test_a_model_larger_than_the_devices_is_refused_by_name_and_leaves_them_free(
    cluster: mm.Cluster, tmp_path: Path
) -> None:
    from megamind_ray.testing.sparse import sparse_checkpoint

    folder = sparse_checkpoint(tmp_path / "huge", tensors={"model.embed_tokens.weight": (3 << 20, 1024)})
    with pytest.raises(mm.CapacityError, match="GPU") as caught:
        cluster.load(folder, allow_replication=True)
    assert caught.value.needed_bytes > caught.value.free_bytes
