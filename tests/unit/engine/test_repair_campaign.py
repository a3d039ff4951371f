"""A small run of what ``benchmarks/integrity.py`` does at length."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megamind_ray.testing.blind_spots import TRIALS
from megamind_ray.testing.campaign import DAMAGES, REMEDIES, Bench, run_campaign, run_clean

NUM_INJECTIONS = 60


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.make(tmp_path_factory.mktemp("recorded"), through_pool=True)


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench.make(tmp_path_factory.mktemp("unrecorded"), recorded=False, through_pool=True).without_mirror()


def test_every_damage_is_repaired_where_a_good_source_is_left_and_refused_where_none_is(bench: Bench) -> None:
    result = run_campaign(bench, NUM_INJECTIONS, seed=3)

    assert result.found == NUM_INJECTIONS
    assert {key: bool(number) for key, number in result.outcomes.items()} == {
        (kind, remedy, "refused" if remedy == "none" else "repaired"): True for kind in DAMAGES for remedy in REMEDIES
    }


def test_ranks_that_read_themselves_repair_as_well(tmp_path: Path) -> None:
    result = run_campaign(Bench.make(tmp_path), 18, seed=4)

    assert (result.count(outcome="repaired"), result.count(outcome="refused")) == (12, 6)


def test_loads_without_damage_raise_no_alarm(bench: Bench) -> None:
    assert run_clean(bench, 20) == {"harmless": 20}


def test_the_campaign_sees_what_slips_through(unrecorded: Bench) -> None:
    result = run_campaign(unrecorded, 9, seed=5)

    assert result.count(outcome="unnoticed") == 9
    assert result.found == 0


def test_the_campaign_sees_that_nothing_is_repaired_where_there_is_no_mirror(bench: Bench) -> None:
    result = run_campaign(bench.without_mirror(), 9, seed=6)

    assert result.count(remedy="mirror", outcome="repaired") == 0
    assert result.count(remedy="mirror", outcome="refused") == 3


FOUND_WITHOUT_CHECKSUMS = {
    "the file ends too early",
    "a read is cut short, and storage says so",
    "the file is written over during the load",
    "a bit of a block flips between cut and arrival",
}
FOUND_BY_NOBODY = {"a bit flips in the staging buffer after the check", "a bit flips in device memory after arrival"}
# A damaged header can be a valid one; a changed time is seen if the look falls before it is set back.
FOUND_SOMETIMES = {"a bit of the header rots in storage", "as before, and its time is set back"}


@pytest.mark.parametrize("name", TRIALS)
def test_what_recorded_checksums_find(bench: Bench, name: str, tmp_path: Path) -> None:
    outcome = TRIALS[name](bench.without_mirror(), tmp_path, random.Random(1))

    assert (outcome in ("refused", "repaired")) == (name not in FOUND_BY_NOBODY), outcome


@pytest.mark.parametrize("name", sorted(TRIALS.keys() - FOUND_SOMETIMES))
def test_what_is_found_without_them(unrecorded: Bench, name: str, tmp_path: Path) -> None:
    outcome = TRIALS[name](unrecorded, tmp_path, random.Random(1))

    assert (outcome in ("refused", "repaired")) == (name in FOUND_WITHOUT_CHECKSUMS), outcome
