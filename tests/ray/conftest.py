"""One Ray for all tests that only load and unload; clusters of their own for those that kill or inspect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import megamind_ray as mm

NUM_GPUS = 4
POOL = "256MiB"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/ray/" in str(item.path):
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def cluster() -> Iterator[mm.Cluster]:
    """A fleet of four CPU workers on a local Ray with a small pool. Tests leave it without models."""
    with mm.connect("local", num_gpus=NUM_GPUS, pool=POOL, device_memory="2GiB") as connection:
        yield connection


@pytest.fixture(autouse=True)
def no_model_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a model behind fails, and the model goes."""
    yield
    if "cluster" not in request.fixturenames:
        return
    connection: mm.Cluster = request.getfixturevalue("cluster")
    left = [model.name for model in connection.models()]
    for name in left:
        connection.unload(name)
    assert not left
