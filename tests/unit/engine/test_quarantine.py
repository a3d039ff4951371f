from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.engine.quarantine import Quarantine


def _after(reads: str, *, share: float = 0.25, min_reads: int = 4) -> Quarantine:
    """A quarantine after some reads: ``.`` worked, ``x`` failed."""
    quarantine = Quarantine(share=share, min_reads=min_reads)
    for read in reads:
        quarantine.count("a", failed=read == "x")
    return quarantine


@pytest.mark.parametrize(
    ("reads", "held"),
    [
        ("", False),
        ("....", False),
        ("x", False),
        ("xxx", False),  # too few to judge
        ("xxxx", True),
        ("x...", True),  # a quarter of four
        ("x....", True),  # decided at the fourth, and it stays
        (".x..", True),
        ("....x", False),  # a fifth
        ("....xx", True),
    ],
)
def test_a_source_is_held_from_its_share_of_failures_on(reads: str, held: bool) -> None:
    assert _after(reads).holds("a") == held


def test_the_read_that_decides_it_says_so_once() -> None:
    quarantine = _after(".x.")

    decided = [quarantine.count("a", failed=True) for _ in range(3)]

    assert decided[0] is not None
    assert (decided[0].num_reads, decided[0].num_failed) == (4, 2)
    assert decided[1:] == [None, None]


def test_sources_are_counted_apart() -> None:
    quarantine = _after("xxxx")

    assert not quarantine.holds("b")
    assert all(quarantine.count("b", failed=False) is None for _ in range(100))


def test_a_source_that_dies_late_is_held_within_a_few_reads() -> None:
    quarantine = _after("." * 100_000, min_reads=16)

    reads = next(number for number in range(1, 1000) if quarantine.count("a", failed=True))

    assert reads < 2 * 16


def test_a_source_below_the_share_is_never_held() -> None:
    assert not _after("....x" * 2000, min_reads=16).holds("a")


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 10), st.floats(0.05, 1))
def test_while_nothing_fades_it_is_the_share_of_all_reads(failures: list[bool], min_reads: int, share: float) -> None:
    quarantine = Quarantine(share=share, min_reads=min_reads)
    expected = False
    for number, failed in enumerate(failures[: 4 * min_reads], 1):
        quarantine.count("a", failed=failed)
        expected = expected or (number >= min_reads and sum(failures[:number]) >= share * number)
        assert quarantine.holds("a") == expected


def test_no_count_is_lost_between_threads() -> None:
    quarantine = Quarantine(share=1.0, min_reads=8000)

    def count(_number: int) -> int:
        return sum(quarantine.count("a", failed=True) is not None for _ in range(1000))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(count, range(8))) == 1
