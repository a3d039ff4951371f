"""Loads in one process that record a timeline."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.config import Config
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.timeline import Timeline
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.local_load import load_plan

PlanFor = Callable[..., Any]
BUDGET_BYTES = 16 << 20


def total(timeline: Timeline, *kinds: str) -> int:
    return sum(row["nbytes"] for row in timeline.spans.to_pylist() if row["kind"] in kinds)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2, dp=2)], ids=str)
@pytest.mark.parametrize("settings", ["config", "pool_config"])
def test_the_timeline_has_every_byte_of_the_report(
    parallel: Parallel, settings: str, llama: Any, plan_for: PlanFor, request: pytest.FixtureRequest
) -> None:
    config: Config = request.getfixturevalue(settings)
    plan, manifest = plan_for(llama.path, parallel, config)

    done = load_plan(plan, manifest, config, [HostArena(BUDGET_BYTES) for _ in parallel.ranks], record=True)

    assert done.timeline is not None
    assert total(done.timeline, "read") == done.report.bytes_from_storage
    assert total(done.timeline, "copy") == done.report.bytes_to_device
    assert [mark.text for mark in done.timeline.marks] == [f"rank {rank}" for rank in parallel.ranks]
    assert done.timeline.end_s <= done.report.seconds["total"]
    last = {row["series"]: row["value"] for row in done.timeline.samples.to_pylist()}
    for rank in done.report.ranks:
        assert last[f"bytes rank {rank.rank}/device"] == rank.bytes_to_device


def test_with_a_reference_each_byte_of_the_pool_is_verified_and_a_fault_is_a_mark(
    llama: Any, plan_for: PlanFor, pool_config: Config, storage: Any, tmp_path: Path, record: Callable[[Path], Any]
) -> None:
    folder = Path(shutil.copytree(llama.path, tmp_path / "llama"))
    record(folder)
    plan, manifest = plan_for(folder, Parallel(tp=2), pool_config)
    storage.flip_at, storage.flips_left = manifest.files[0].size_bytes - 3, 1
    arenas = [HostArena(BUDGET_BYTES), HostArena(BUDGET_BYTES)]

    done = load_plan(plan, manifest, pool_config, arenas, opener=storage, record=True)

    assert done.timeline is not None
    assert total(done.timeline, "verify") == done.report.bytes_from_storage == total(done.timeline, "read")
    assert [mark.kind for mark in done.timeline.marks] == ["chunk_mismatch", "rank_done", "rank_done"]


def test_a_load_that_is_not_recorded_has_no_timeline(llama: Any, plan_for: PlanFor, config: Config) -> None:
    plan, manifest = plan_for(llama.path, Parallel(), config)

    assert load_plan(plan, manifest, config, [HostArena(BUDGET_BYTES)]).timeline is None
