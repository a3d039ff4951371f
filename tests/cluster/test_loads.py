"""Checkpoints loaded by ranks on several hosts, from storage that all reach and from one host's own disk."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megamind_ray as mm
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.rated_server import Served
from megamind_ray.testing.testbed import Bed, Program

BOUND_S = 90.0
_LOAD = """
import json, sys
import megamind_ray as mm
from megamind_ray.testing.digests import rank_digests
uri, mesh, settings = sys.argv[1], *map(json.loads, sys.argv[2:])
with mm.connect(config=mm.load_config(overrides=settings)) as cluster:
    model = cluster.load(uri, mm.Parallel(**mesh), keep=False)
    print(json.dumps({"report": model.report.to_json(), "held": model.run(rank_digests)}))
"""
# Several extents of these small files, and all of them through the pool.
_SETTINGS: Mapping[str, object] = {
    "io": {"chunk_bytes": 128 * 1024, "extent_bytes": 256 * 1024},
    "routing": {"force_pool": True},
}


def start(bed: Bed, host: str, uri: str, mesh: Mapping[str, int]) -> Program:
    """Starts a driver on a host, which loads."""
    return bed.host(host).start(sys.executable, "-c", _LOAD, uri, json.dumps(mesh), json.dumps(_SETTINGS))


def answer_of(driver: Program) -> Any:
    """Its report, and what the ranks hold."""
    done = driver.wait(BOUND_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def require_right(answer: Any, folder: Path, parallel: mm.Parallel) -> mm.LoadReport:
    """Every rank, each on a host of its own, holds what it should; the report."""
    report = mm.LoadReport.from_json(answer["report"])
    assert len({rank.node for rank in report.ranks}) == parallel.world
    for rank in parallel.ranks:
        assert answer["held"][rank] == json.loads(json.dumps(digest_all(expected_state_dict(folder, parallel, rank))))
    return report


def weight_bytes_sent(served: Served, folder: Path) -> int:
    """Bytes that storage sent of the weights, headers left out."""
    begins = {}
    for path in folder.glob("*.safetensors"):
        (header_bytes,) = struct.unpack("<Q", path.read_bytes()[:8])
        begins[path.name] = 8 + header_bytes
    return sum(max(0, one.end - max(one.begin, begins[one.path])) for one in served.sent if one.path in begins)


def test_storage_sends_every_byte_once_and_the_hosts_exchange_it(two_hosts: Bed, llama: Path) -> None:
    server = two_hosts.serve(llama)
    mark = two_hosts.counters()

    answer = answer_of(start(two_hosts, "n0", server.uri, {"tp": 2}))

    report = require_right(answer, llama, mm.Parallel(tp=2))

    served = server.served()
    assert report.bytes_from_storage == report.bytes_total == weight_bytes_sent(served, llama)
    assert set(served.bytes_by_client()) == {host.address for host in two_hosts.hosts}, "both hosts read"
    moved = two_hosts.counters().since(mark).hosts
    received = sum(traffic.received_bytes for traffic in moved.values())
    # From storage, and from each other; Ray's own words are the rest.
    assert received > served.bytes_sent + report.bytes_over_network
    assert report.bytes_over_network > 0


def test_a_worker_killed_on_one_host_is_replaced_and_all_ranks_get_what_they_need(two_hosts: Bed, llama: Path) -> None:
    """The whole model goes to both hosts, and its second half is held back while one of them loses its worker."""
    server = two_hosts.serve(llama)
    server.hold_after(2_500_000)
    driver = start(two_hosts, "n0", server.uri, {"dp": 2})
    assert server.wait_until_holding(BOUND_S), driver.errors

    two_hosts.host("n1").kill("worker", "GpuWorker")
    server.release()

    report = require_right(answer_of(driver), llama, mm.Parallel(dp=2))
    assert [fault.kind for fault in report.faults] == ["worker_lost"]


def test_a_checkpoint_that_one_host_has_is_read_there_and_reaches_all(two_hosts: Bed, llama: Path) -> None:
    path = two_hosts.host("n1").give_folder(llama)

    answer = answer_of(start(two_hosts, "n1", str(path), {"tp": 2}))

    report = require_right(answer, llama, mm.Parallel(tp=2))

    assert report.faults == ()
    assert report.bytes_from_storage == report.bytes_total
    assert any("lack the files" in note for note in report.notes)
