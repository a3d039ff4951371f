"""Page-locked memory of exact size, and what becomes of it."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import torch

from megamind_ray.device.pinned import pinned_buffer
from megamind_ray.testing.fake_device import FakeHostRuntime

MIB = 1 << 20


def test_no_more_is_locked_than_was_asked_for_but_for_the_last_page() -> None:
    runtime = FakeHostRuntime()

    buffer = pinned_buffer(12 * MIB + 1, runtime)

    assert buffer.nbytes == 12 * MIB + 1
    assert runtime.registered == {buffer.ctypes.data: 12 * MIB + 4096}


def test_memory_is_unlocked_with_the_last_tensor_over_it_and_before_it_goes() -> None:
    runtime = FakeHostRuntime()
    tensor = torch.from_numpy(pinned_buffer(MIB, runtime)[100:200])
    gc.collect()
    assert runtime.registered

    del tensor
    gc.collect()

    assert not runtime.registered


def test_memory_that_cannot_be_locked_is_given_as_it_is_and_the_log_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = FakeHostRuntime()
    runtime.error = 2

    with caplog.at_level(logging.WARNING):
        buffer = pinned_buffer(3 * MIB, runtime)

    buffer[:] = np.arange(3 * MIB) % 251
    assert int(buffer[-1]) == (3 * MIB - 1) % 251
    for part in ("3.00 MiB", "fake error 2", "ulimit -l", "io.extent_bytes"):
        assert part in caplog.text


def test_a_failed_unlock_is_told_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeHostRuntime()
    buffer = pinned_buffer(MIB, runtime)
    runtime.registered.clear()

    with caplog.at_level(logging.WARNING):
        del buffer
        gc.collect()

    assert "stays page-locked: fake error 713" in caplog.text


def test_nothing_needs_no_registration() -> None:
    runtime = FakeHostRuntime()

    assert pinned_buffer(0, runtime).nbytes == 0
    assert runtime.num_calls == 0
