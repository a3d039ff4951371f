"""Whole loads through a network that fails at random: exact bytes or a SourceError, without a storm of requests."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megamind_ray as mm
from megamind_ray.config import Config, IoConfig, RetryConfig
from megamind_ray.errors import SourceError
from megamind_ray.testing.fault_server import Fault, FaultProxy, FaultServer, seeded
from megamind_ray.testing.range_server import RangeServer
from megamind_ray.testing.s3_server import S3Server

# A drip is as slow as the least rate allows, seconds for each chunk: it has tests of its own.
FAULTS = [fault for fault in Fault if fault is not Fault.DRIP]
RETRY = RetryConfig(attempts=4, first_wait_s=0.005, max_wait_s=0.02, request_s=0.4)
# A busy machine is not taken for a fault.
PATIENT = replace(RETRY, request_s=10.0)
NUM_FILES, FILE_BYTES = 2, 1_500_000
# Looking at the folder and listing it, looking for the sidecar; looking at the index and at config.json, opening and
# reading them; for each file an opening for its header and one for its bytes, and the header's two reads.
NUM_OTHER_REQUESTS = 4 + 1 + 2 * 3 + 4 * NUM_FILES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder with an index, and what is in it."""
    import json

    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("served") / "models" / "m"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(7)
    tensors = {f"w{number}": generator.integers(0, 256, FILE_BYTES, np.uint8) for number in range(NUM_FILES)}
    weight_map = {}
    for number, (name, data) in enumerate(tensors.items()):
        path = f"model-{number}.safetensors"
        save_file({name: data}, folder / path)
        weight_map[name] = path
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return folder, tensors


@pytest.fixture
def web(checkpoint: Any) -> Iterator[RangeServer]:
    with RangeServer(checkpoint[0].parents[1], slow_s=0.05) as server:
        yield server


@pytest.fixture(scope="module")
def s3_proxy(checkpoint: Any) -> Iterator[tuple[S3Server, FaultProxy]]:
    with S3Server() as s3:
        s3.make_bucket("models")
        s3.put_folder("models", "m", checkpoint[0])
        with FaultProxy(s3.uri, slow_s=0.05) as proxy:
            yield s3, proxy


@pytest.fixture
def s3(s3_proxy: tuple[S3Server, FaultProxy], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    server, proxy = s3_proxy
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in server.environment(proxy.uri).items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.faults = None


def run(
    uri: str, server: FaultServer, chunk_bytes: int, tensors: dict[str, np.ndarray], retry: RetryConfig = RETRY
) -> str:
    """One load: its outcome, once its requests were counted."""
    io = IoConfig(chunk_bytes=chunk_bytes, extent_bytes=4 * chunk_bytes, remote_threads=8)
    num_ranges = NUM_FILES * math.ceil(FILE_BYTES / chunk_bytes)
    num_steps = num_ranges + NUM_OTHER_REQUESTS
    num_requests = server.num_requests
    try:
        loaded = mm.load_state_dict(uri, config=Config(io=io, retry=retry))
        outcome = "loaded"
        assert loaded.keys() == tensors.keys()
        for name, data in tensors.items():
            assert np.array_equal(loaded[name].numpy(), data), f"{name} is wrong"
    except SourceError:
        outcome = "SourceError"
    assert server.num_requests - num_requests <= num_steps * retry.attempts
    return outcome


@pytest.mark.parametrize("chunk_bytes", [64 << 10, 1 << 20])
@pytest.mark.parametrize("kind", ["web", "s3"])
def test_without_faults_each_range_is_one_request(
    kind: str, chunk_bytes: int, checkpoint: Any, request: pytest.FixtureRequest
) -> None:
    server: FaultServer = request.getfixturevalue(kind)
    uri = "s3://models/m" if kind == "s3" else f"{server.uri}/models/m"
    num_requests = server.num_requests

    assert run(uri, server, chunk_bytes, checkpoint[1], PATIENT) == "loaded"

    num_ranges = NUM_FILES * math.ceil(FILE_BYTES / chunk_bytes)
    assert num_ranges <= server.num_requests - num_requests <= num_ranges + NUM_OTHER_REQUESTS


@pytest.mark.parametrize(("seed", "share"), [(0, 0.2), (1, 0.2), (2, 0.2), (3, 0.6), (4, 0.6), (5, 0.6)])
@pytest.mark.parametrize("kind", ["web", "s3"])
def test_requests_fail_at_random(
    kind: str, seed: int, share: float, checkpoint: Any, request: pytest.FixtureRequest
) -> None:
    server: FaultServer = request.getfixturevalue(kind)
    uri = "s3://models/m" if kind == "s3" else f"{server.uri}/models/m"
    server.faults = seeded(seed, share, FAULTS)

    run(uri, server, (64 << 10) << (2 * (seed % 3)), checkpoint[1])

    assert server.given.total() > 0


@pytest.mark.parametrize("kind", ["web", "s3"])
def test_few_faults_are_made_good(kind: str, checkpoint: Any, request: pytest.FixtureRequest) -> None:
    server: FaultServer = request.getfixturevalue(kind)
    uri = "s3://models/m" if kind == "s3" else f"{server.uri}/models/m"
    left = [*FAULTS, *FAULTS]
    count = iter(range(1 << 30))
    # Every fourth request: no range meets four in a row.
    server.faults = lambda _request: left.pop() if left and next(count) % 4 == 3 else None

    assert run(uri, server, 64 << 10, checkpoint[1]) == "loaded"
    assert not left


@pytest.mark.parametrize("kind", ["web", "s3"])
@pytest.mark.parametrize("fault", [Fault.STALL, Fault.TRUNCATED, Fault.UNAVAILABLE], ids=lambda it: it.name)
def test_storage_that_fails_for_good_is_a_source_error(
    kind: str, fault: Fault, checkpoint: Any, request: pytest.FixtureRequest
) -> None:
    server: FaultServer = request.getfixturevalue(kind)
    uri = "s3://models/m" if kind == "s3" else f"{server.uri}/models/m"
    server.faults = lambda it: fault if it.path.endswith("1.safetensors") and it.method == "GET" else None

    assert run(uri, server, 256 << 10, checkpoint[1]) == "SourceError"
