"""What all tests share. Fixtures of one area live beside its tests."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Examples are found and replayed the same way everywhere: no deadline (speed is measured in benchmarks/), and no
# random seed where a build must not fail by chance.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# What a developer measured on this machine is none of the tests' business, nor of the processes that they start.
os.environ["MEGAMIND_PROFILE"] = "off"

# A run in the background of a shell (``nohup ... &``) ignores interrupts, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none, unless ``MEGAMIND_REQUIRE_GPU`` is set: then they run, and
    fail. What else a machine may lack is looked at beside the tests that need it.
    """
    if os.environ.get("MEGAMIND_REQUIRE_GPU") or _has_cuda(items):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_cuda(items: list[pytest.Item]) -> bool:
    # Only asked for where a test cares: importing torch takes seconds.
    if not any(item.get_closest_marker("gpu") for item in items):
        return False
    import torch

    return torch.cuda.is_available()
