"""Waits end with what was waited for, or with the deadline."""

from __future__ import annotations

import itertools

import pytest

from megamind_ray.device.waiting import wait_until
from megamind_ray.errors import ClusterError


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps_s.append(seconds)
        self.now_s += seconds


def test_what_is_done_soon_costs_no_sleep() -> None:
    clock = _Clock()
    looks = itertools.count()

    wait_until(lambda: next(looks) == 10, deadline_s=1, what="x", clock=clock, sleep=clock.sleep)

    assert clock.sleeps_s == []


def test_sleeps_grow_to_a_millisecond() -> None:
    clock = _Clock()
    looks = itertools.count()

    wait_until(lambda: next(looks) == 40, deadline_s=1, what="x", clock=clock, sleep=clock.sleep)

    assert clock.sleeps_s == sorted(clock.sleeps_s)
    assert clock.sleeps_s[0] < 1e-4
    assert clock.sleeps_s[-1] == 1e-3


def test_a_silent_device_is_named_after_the_deadline() -> None:
    clock = _Clock()

    with pytest.raises(ClusterError, match=r"device cuda:3: a copy did not end within 5 s.*nvidia-smi"):
        wait_until(lambda: False, deadline_s=5, what="device cuda:3: a copy", clock=clock, sleep=clock.sleep)

    assert 5 <= clock.now_s < 5.1
