"""NIXL between hosts with networks of their own: it finds the way, carries the blocks, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import megamind_ray as mm
from megamind_ray.actors.nixl_endpoint import nixl_is_installed
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.testbed import Bed

pytestmark = pytest.mark.skipif(
    not nixl_is_installed(), reason="nixl is not installed (pip install megamind-ray[rdma])"
)

BOUND_S = 90.0
PARALLEL = mm.Parallel(dp=2)
# Blocks that are kept were offered to the other host, too: with the model they go.
_LOAD = """
import json, sys, time
import ray
import megamind_ray as mm
from megamind_ray.testing.digests import rank_digests
from megamind_ray.testing.store_stats import store_stats
settings = {"io": {"chunk_bytes": 1 << 17, "extent_bytes": 1 << 18}, "routing": {"force_pool": True},
            "wire": {"use": "nixl"}}
def used_bytes():
    return store_stats(ray.get_runtime_context().gcs_address).used_bytes
with mm.connect(config=mm.load_config(overrides=settings)) as cluster:
    model = cluster.load(sys.argv[1], mm.Parallel(dp=2), keep=True)
    report, held = model.report.to_json(), model.run(rank_digests)
    kept = used_bytes()
    model.unload()
    until_s = time.monotonic() + 20
    while used_bytes() > 1e6 and time.monotonic() < until_s:
        time.sleep(0.1)
    print(json.dumps({"report": report, "held": held, "kept": kept, "left": used_bytes()}))
"""


def test_nixl_carries_the_blocks_between_hosts_and_their_memory_comes_back(two_hosts: Bed, llama: Path) -> None:
    server = two_hosts.serve(llama)
    mark = two_hosts.counters()

    driver = two_hosts.host("n0").start(sys.executable, "-c", _LOAD, server.uri)
    done = driver.wait(BOUND_S)

    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    report = mm.LoadReport.from_json(answer["report"])
    for rank in PARALLEL.ranks:
        assert answer["held"][rank] == json.loads(json.dumps(digest_all(expected_state_dict(llama, PARALLEL, rank))))
    assert report.faults == ()
    assert report.bytes_by_wire["nixl"] > 0.5 * report.bytes_over_network
    received = sum(traffic.received_bytes for traffic in two_hosts.counters().since(mark).hosts.values())
    assert received > report.bytes_from_storage + report.bytes_over_network, "they did go over the links"
    assert answer["kept"] > 0.9 * report.kept.num_bytes > 0
    assert answer["left"] < 1e6
