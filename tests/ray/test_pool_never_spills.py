"""A checkpoint four times as large as the pool goes through it without a byte spilled or allocated beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import ray

import megamind_ray as mm
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.store_stats import StoreStats, store_stats

_SAMPLE_EVERY_S = 0.02


@contextmanager
def sampled(address: str) -> Iterator[list[StoreStats]]:
    """Asks the object stores for their counters all the time until the block ends, and once more then."""
    samples: list[StoreStats] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(_SAMPLE_EVERY_S):
            samples.append(store_stats(address))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join(30)
        samples.append(store_stats(address))


def test_1_gb_through_a_256_mib_pool_spills_nothing(cluster: mm.Cluster, tmp_path: Path) -> None:
    folder = llama_checkpoint(tmp_path / "large", total_bytes=10**9, num_files=2)
    config = mm.load_config(overrides={"routing": {"force_pool": True}})
    with mm.connect(cluster.address, config=config) as pooled, sampled(cluster.address) as samples:
        model = pooled.load(folder, mm.Parallel(tp=2), keep=False)
    report = model.report
    cluster.unload(model.name)
    assert report.bytes_from_storage == report.bytes_total > 0.9e9
    assert sum(rank.bytes_direct for rank in report.ranks) == 0
    assert max(one.used_bytes for one in samples) > 0, "no sample fell into the load"
    assert {one.spilled_bytes for one in samples} == {0}
    assert {one.fallback_bytes for one in samples} == {0}


def test_what_the_user_has_in_the_store_is_not_pushed_to_disk(cluster: mm.Cluster, tmp_path: Path) -> None:
    """Three quarters of it are the user's; blocks take what is left, kept ones too."""
    before = store_stats(cluster.address)
    mine = [ray.put(np.ones(19 << 20, np.uint8)) for _ in range(8)]
    folder = llama_checkpoint(tmp_path / "larger", total_bytes=200 << 20)
    model = cluster.load(folder, mm.Parallel(tp=2), keep=True)
    cluster.unload(model.name)
    assert len(mine) == 8
    assert model.report.kept.bytes_not_kept > 0
    assert store_stats(cluster.address).spilled_bytes == before.spilled_bytes
