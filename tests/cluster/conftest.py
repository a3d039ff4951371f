"""Hosts in network namespaces. A bed takes a part of a second, Ray on it some: files share what they can."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.testbed import Bed, missing, switched

# Tests of wires alone take little of it; a load over slow links would take long.
NIC_BYTES_PER_S = 62.5e6


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without namespaces tests are skipped and say why, unless ``MEGAMIND_REQUIRE_NETNS`` is set: then they fail."""
    ours = [item for item in items if "/tests/cluster/" in str(item.path)]
    reason = None if not ours or os.environ.get("MEGAMIND_REQUIRE_NETNS") else missing()
    for item in ours:
        item.add_marker(pytest.mark.cluster)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


# Not of the session: other tests look for clusters on the machine, and two beds with Ray are too much for a small one.
@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Bed]:
    """Two hosts with Ray and a GPU each, for tests that leave them as they were."""
    topology = switched(num_hosts=2, nic_bytes_per_s=NIC_BYTES_PER_S, storage_bytes_per_s=20e6)
    with Bed(topology) as bed:
        bed.start_ray()
        yield bed


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 5 MB in two files."""
    return llama_checkpoint(tmp_path_factory.mktemp("cluster") / "llama", num_layers=6, num_files=2)
