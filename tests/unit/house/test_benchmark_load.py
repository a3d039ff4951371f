"""The load benchmark on a checkpoint of a few MB: the form of its result, and that it can say no."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks._checkpoint import Checkpoint, write_llama, wrong_tensors
from benchmarks._contenders import OURS, Contender, Load, Loaded, Recycled, Tensors
from benchmarks._load_rows import setting_rows
from benchmarks._page_cache import PageCacheError, evict, fill, resident_share
from benchmarks._peers import PEERS
from benchmarks._result import Measurement, write_result
from benchmarks._rounds import Outcome
from benchmarks.load import Options, Run, run
from megamind_ray.units import parse_bytes

SAFETENSORS = next(peer for peer in PEERS if peer.name == "safetensors")
MAPPED = next(peer for peer in PEERS if peer.name == "safetensors (mapped)")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_llama(tmp_path_factory.mktemp("load") / "llama", total_bytes=4_000_000)


def options(checkpoint: Checkpoint, *parts: str, ours: tuple[Contender, ...], peers: Sequence[Contender]) -> Options:
    return Options(
        folder=checkpoint.folder.parent,
        total_bytes=checkpoint.nbytes,
        num_rounds=1,
        parts=parts,
        ours=ours,
        peers=peers,
        quick=True,
    )


def by_name(rows: list[Measurement]) -> dict[str, Measurement]:
    return {row.name: row for row in rows}


def loads_twenty_times(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    load_once = OURS[0].prepare(checkpoint, recycled)

    def load_again_and_again() -> Loaded:
        for _ in range(19):
            load_once()
        return load_once()

    return load_again_and_again


def loads_zeros(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    def zeros() -> Tensors:
        return {place.name: torch.zeros(place.shape, dtype=place.dtype) for place in checkpoint.places}

    return zeros


def breaks(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    raise OSError("the peer's disk is on fire")


@pytest.fixture(scope="module")
def measured(checkpoint: Checkpoint) -> Run:
    """One run for several tests: ours, a slow one of ours, and three peers of which one is fit to compare with."""
    slow = Contender(name="slow", kind="ours", prepare=loads_twenty_times)
    liar = Contender(name="liar", kind="peer", prepare=loads_zeros)
    broken = Contender(name="broken", kind="peer", prepare=breaks)
    peers = (liar, broken, SAFETENSORS)
    return run(checkpoint, options(checkpoint, "warm", "recycled", ours=(*OURS, slow), peers=peers))


def test_the_document_has_the_rates_the_ratios_and_the_targets(measured: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    write_result("load", measured.rows, config=measured.config, arguments=argparse.Namespace(json=out, quick=True))

    document = json.loads(out.read_text(encoding="utf-8"))
    results = {row["name"]: row for row in document["results"]}
    for name in ("limit", "load_state_dict", "load_file", "safetensors"):
        assert results[f"warm: {name}"]["unit"] == "GB/s"
        assert len(results[f"warm: {name}"]["samples"]) == 1
    assert results["warm: load_state_dict / limit"]["target"] == 0.9
    assert results["warm: load_file / best peer"]["target"] == 1.0
    assert results["recycled: load_state_dict / best peer"]["target"] == 1.3
    assert results["recycled: load_file, wrong tensors"]["pass"] is True
    assert document["config"]["peers"]["safetensors"] == {"warm": "ok", "recycled": "ok"}
    assert "threads" in document["config"]["settings"]["recycled"]["limit"]


def test_a_loader_that_is_slow_misses_its_target(measured: Run) -> None:
    row = by_name(measured.rows)["warm: slow / limit"]

    assert row.value < 0.9
    assert row.passed is False


def test_a_peer_with_wrong_bytes_is_named_and_not_compared_with(measured: Run) -> None:
    assert "has other bytes than the file" in measured.config["peers"]["liar"]["warm"]
    assert measured.config["settings"]["warm"]["best_peer"] == "safetensors"


def test_a_peer_that_fails_is_named_and_the_others_go_on(measured: Run) -> None:
    assert measured.config["peers"]["broken"]["warm"] == "failed: OSError: the peer's disk is on fire"
    assert "warm: broken" not in by_name(measured.rows)


def test_checksums_and_memory_give_a_row_each(checkpoint: Checkpoint) -> None:
    files = sorted(checkpoint.folder.iterdir())

    done = run(checkpoint, options(checkpoint, "checksums", "memory", ours=OURS, peers=()))

    rows = by_name(done.rows)
    assert done.failures == []
    assert rows["recycled: added by checksums"].target == 0.05
    for setting in ("warm", "recycled"):
        # More than the tensors alone: the peak was seen.
        assert rows[f"{setting}: load_state_dict, peak memory beyond the tensors"].value > 0
    assert sorted(checkpoint.folder.iterdir()) == files


def test_mapped_files_do_not_count_as_memory_of_ones_own(checkpoint: Checkpoint) -> None:
    tensors = MAPPED.prepare(checkpoint, None)()
    assert isinstance(tensors, dict)

    wrong = wrong_tensors(checkpoint, tensors)

    assert len(wrong) == len(checkpoint.places)
    assert wrong[0].endswith("is a mapping of the file, not memory of its own")


def test_ratios_are_of_neighbours_in_a_round() -> None:
    contenders = [
        Contender(name="limit", kind="limit", prepare=breaks),
        Contender(name="we", kind="ours", prepare=breaks),
        Contender(name="they", kind="peer", prepare=breaks),
        Contender(name="others", kind="peer", prepare=breaks),
    ]
    outcome = Outcome(
        seconds={"limit": [1.0, 9.0, 1.0], "we": [2.0, 10.0, 4.0], "they": [3.0, 30.0, 1.0], "others": [9.0, 9.0, 9.0]},
        states=dict.fromkeys(("limit", "we", "they", "others"), "ok"),
        wrong=dict.fromkeys(("limit", "we", "they", "others"), 0),
    )

    rows, best_peer = setting_rows(1_000_000_000, "cold", contenders, outcome)

    assert best_peer == "they"
    assert by_name(rows)["cold: we / limit"].samples == [0.5, 0.9, 0.25]
    assert by_name(rows)["cold: we / best peer"].value == 1.5


@pytest.fixture
def file_on_disk() -> Iterator[Path]:
    # The checkout is on a disk; a folder for temporary files may live in memory.
    folder = Path(__file__).parents[3] / "build"
    folder.mkdir(exist_ok=True)
    path = folder / "page-cache-test.bin"
    path.write_bytes(bytes(parse_bytes("4MiB")))
    yield path
    path.unlink()


def test_files_leave_the_page_cache_and_come_back(file_on_disk: Path) -> None:
    try:
        evict([file_on_disk])
    except PageCacheError as error:
        pytest.skip(str(error))
    assert resident_share([file_on_disk]) < 0.01

    fill([file_on_disk])
    assert resident_share([file_on_disk]) == 1.0


def test_a_folder_in_memory_is_refused_for_cold_reads() -> None:
    path = Path("/dev/shm/megamind-page-cache-test.bin")
    path.write_bytes(b"x")
    try:
        with pytest.raises(PageCacheError, match="tmpfs has no page cache to leave"):
            evict([path])
    finally:
        path.unlink()
