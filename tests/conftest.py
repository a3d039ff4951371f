"""What all tests share. Fixtures of one area live beside its tests."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# Examples are found and replayed the same way everywhere: no deadline (speed is measured in benchmarks/), and no
# random seed where a build must not fail by chance.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# What a developer measured on this machine is none of the tests' business, nor of the processes that they start.
os.environ["MEGAMIND_PROFILE"] = "off"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need what the machine lacks are skipped and say what it lacks, unless ``MEGAMIND_REQUIRE_GPU`` or
    ``MEGAMIND_REQUIRE_CLUSTER`` is set: then they run, and fail.
    """
    missing = {
        "gpu": None if _has_cuda(items) else "no CUDA device",
        "cluster": None if sys.platform == "linux" and os.geteuid() == 0 else "needs root on Linux",
    }
    for item in items:
        for marker, reason in missing.items():
            required = os.environ.get(f"MEGAMIND_REQUIRE_{marker.upper()}")
            if reason and not required and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda(items: list[pytest.Item]) -> bool:
    # Only asked for where a test cares: importing torch takes seconds.
    if not any(item.get_closest_marker("gpu") for item in items):
        return False
    import torch

    return torch.cuda.is_available()
