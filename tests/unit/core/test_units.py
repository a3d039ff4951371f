from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.errors import RequestError
from megamind_ray.units import format_bytes, format_duration, format_rate, parse_bytes, parse_duration, parse_rate

SCALES = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "Gi": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("8GiB", 8 << 30), ("500 MB", 500_000_000), (" 1.5k ", 1500), (".5MiB", 1 << 19), ("0", 0), (7, 7)],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@given(st.integers(0, 10**6 - 1), st.integers(0, 999), st.sampled_from(sorted(SCALES)))
def test_sizes_are_exact(whole: int, thousandths: int, unit: str) -> None:
    exact = (whole + Fraction(thousandths, 1000)) * SCALES[unit]

    assert parse_bytes(f"{whole}.{thousandths:03d}{unit}") == int(exact)


def test_a_count_of_bytes_beyond_the_precision_of_a_float() -> None:
    assert parse_bytes("9007199254740993") == 9007199254740993


@pytest.mark.parametrize("value", ["", "8 apples", "-1", "1e3", "GiB", "9" * 5000, "²", 1.5, None, True])
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(RequestError, match="^budget: .* is not a size"):
        parse_bytes(value, what="budget")  # type: ignore[arg-type]


def test_a_negative_size() -> None:
    with pytest.raises(RequestError, match="budget: -1 is negative"):
        parse_bytes(-1, what="budget")


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("25GB/s", 25e9),
        ("25GBps", 25e9),
        ("200Gbit/s", 25e9),
        ("200Gbps", 25e9),
        ("200Gb/s", 25e9),
        ("8 Mbps", 1e6),
        ("1KiB/s", 1024),
        (5, 5.0),
    ],
)
def test_rates(text: str | float, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize("value", ["25GB", "0B/s", 0, -1.0, float("inf"), float("nan"), True, None, 10**400])
def test_what_is_no_rate(value: object) -> None:
    with pytest.raises(RequestError, match="^disk: "):
        parse_rate(value, what="disk")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (1 << 40, "1.00 TiB"),
        (3 << 50, "3.00 PiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("rate", "text"), [(2.5e9, "2.50 GB/s"), (3e6, "3.00 MB/s"), (4e3, "4.00 kB/s"), (5, "5 B/s")])
def test_rates_for_people(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0042, "4.2 ms"), (1.5, "1.50 s"), (222, "3 min 42 s"), (7322, "2 h 2 min")]
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2ms", 0.002),
        ("100us", 1e-4),
        ("100 \u00b5s", 1e-4),
        ("100\u03bcs", 1e-4),
        ("250ns", 2.5e-7),
        (" 1.5 s ", 1.5),
        ("3min", 180.0),
        ("2h", 7200.0),
        ("0s", 0.0),
        (0.25, 0.25),
        (3, 3.0),
    ],
)
def test_durations(text: float | str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("value", ["", "2", "2 apples", "-1s", "1e-3s", "5m", "2MS", True, None])
def test_what_is_no_duration(value: object) -> None:
    with pytest.raises(RequestError, match=r"^call: .* is not a duration; write seconds or for example '2ms'"):
        parse_duration(value, what="call")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, -0.5, float("inf"), float("nan"), 10**400])
def test_a_duration_that_cannot_be(value: float) -> None:
    with pytest.raises(RequestError, match="^call: .* must be 0 seconds or more"):
        parse_duration(value, what="call")
