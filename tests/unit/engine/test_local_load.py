from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megamind_ray.config import Config
from megamind_ray.core.parallel import Parallel
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.local_load import load_plan
from megamind_ray.errors import CapacityError, ClusterError, IntegrityError, RequestError, SourceError

PlanFor = Callable[..., Any]
BUDGET_BYTES = 16 << 20


def test_each_byte_is_read_once_though_four_ranks_need_it(llama: Any, plan_for: PlanFor, config: Config) -> None:
    parallel = Parallel(tp=2, dp=2)
    plan, manifest = plan_for(llama.path, parallel, config)

    report = load_plan(plan, manifest, config, [HostArena(BUDGET_BYTES) for _ in parallel.ranks]).report

    assert report.bytes_from_storage == llama.nbytes == report.bytes_total
    assert report.bytes_to_device == sum(rank.bytes_to_device for rank in report.ranks) == plan.bytes_to_device
    assert report.bytes_replicated == report.bytes_to_device - report.bytes_total
    assert report.verified == "transit"
    assert report.parallel == {"tp": 2, "pp": 1, "dp": 2, "ep": 1}


def test_a_checkpoint_of_empty_tensors_is_not_called_verified(
    tmp_path: Path, write_raw: Callable[..., Path], plan_for: PlanFor, config: Config
) -> None:
    write_raw(tmp_path / "model.safetensors", {"a": ("F32", [0, 4], b"")})
    plan, manifest = plan_for(tmp_path, Parallel(), config)

    report = load_plan(plan, manifest, config, [HostArena(BUDGET_BYTES)]).report

    assert (report.bytes_from_storage, report.verified) == (0, "transit")


def test_with_a_sidecar_all_is_verified_and_a_passing_fault_is_reported(
    llama: Any, plan_for: PlanFor, config: Config, storage: Any, tmp_path: Path, record: Callable[[Path], Any]
) -> None:
    folder = Path(shutil.copytree(llama.path, tmp_path / "llama"))
    record(folder)
    plan, manifest = plan_for(folder, Parallel(tp=2), config)
    storage.flip_at, storage.flips_left = manifest.files[0].size_bytes - 3, 1

    report = load_plan(
        plan, manifest, config, [HostArena(BUDGET_BYTES), HostArena(BUDGET_BYTES)], opener=storage
    ).report

    assert report.verified == "reference"
    assert [fault.kind for fault in report.faults] == ["chunk_mismatch"]
    assert report.bytes_retried == report.faults[0].bytes_retried > 0


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2)], ids=str)
def test_a_persistent_fault_ends_the_load_and_frees_every_arena(
    parallel: Parallel,
    llama: Any,
    plan_for: PlanFor,
    config: Config,
    storage: Any,
    tmp_path: Path,
    record: Callable[[Path], Any],
) -> None:
    folder = Path(shutil.copytree(llama.path, tmp_path / "llama"))
    record(folder)
    plan, manifest = plan_for(folder, parallel, config)
    storage.flip_at, storage.flips_left = manifest.files[0].size_bytes - 3, -1
    arenas = [HostArena(BUDGET_BYTES) for _ in parallel.ranks]

    with pytest.raises(IntegrityError, match="also after 3 reads"):
        load_plan(plan, manifest, config, arenas, opener=storage)

    assert all(arena.free_bytes == BUDGET_BYTES for arena in arenas)


def test_failing_storage_ends_the_load_and_frees_every_arena(
    llama: Any, plan_for: PlanFor, config: Config, storage: Any
) -> None:
    plan, manifest = plan_for(llama.path, Parallel(tp=2), config)
    storage.errors_left = 10**6
    arenas = [HostArena(BUDGET_BYTES), HostArena(BUDGET_BYTES)]

    with pytest.raises(SourceError):
        load_plan(plan, manifest, config, arenas, opener=storage)

    assert all(arena.free_bytes == BUDGET_BYTES for arena in arenas)


def test_an_arena_without_room_frees_those_before_it(llama: Any, plan_for: PlanFor, config: Config) -> None:
    plan, manifest = plan_for(llama.path, Parallel(tp=2), config)
    arenas = [HostArena(BUDGET_BYTES), HostArena(1 << 10)]

    with pytest.raises(CapacityError):
        load_plan(plan, manifest, config, arenas)

    assert arenas[0].free_bytes == BUDGET_BYTES


def test_a_load_can_be_stopped(llama: Any, plan_for: PlanFor, config: Config, storage: Any) -> None:
    plan, manifest = plan_for(llama.path, Parallel(tp=2), config)
    stop = threading.Event()
    storage.before_read = lambda _offset: stop.set()

    with pytest.raises(ClusterError, match="stopped before all was done"):
        load_plan(plan, manifest, config, [HostArena(BUDGET_BYTES)] * 2, opener=storage, stop=stop)


def test_ranks_may_share_an_arena(llama: Any, plan_for: PlanFor, config: Config) -> None:
    plan, manifest = plan_for(llama.path, Parallel(tp=2), config)
    arena = HostArena(BUDGET_BYTES)

    first, second = load_plan(plan, manifest, config, [arena, arena]).sessions

    whole = llama.tensors["model.layers.0.self_attn.q_proj.weight"]
    parts = [session.state_dict()["model.layers.0.self_attn.q_proj.weight"] for session in (first, second)]
    assert torch.equal(torch.cat(parts), whole)


def test_one_arena_for_each_rank(llama: Any, plan_for: PlanFor, config: Config) -> None:
    plan, manifest = plan_for(llama.path, Parallel(tp=2), config)

    with pytest.raises(RequestError, match="1 arenas for 2 ranks"):
        load_plan(plan, manifest, config, [HostArena(BUDGET_BYTES)])
