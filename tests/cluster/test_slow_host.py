"""A host for which storage is much slower than for the others: they read what it has not begun."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import megamind_ray as mm
from megamind_ray.core.event_log import EventLog, check
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.testbed import Bed, bed_node, switched

BOUND_S = 90.0
THREE = mm.Parallel(dp=3)
SLOW_BYTES_PER_S = 40e3  # a third of 5 MB would take 40 s
_LOAD = """
import json, sys
import megamind_ray as mm
from megamind_ray.testing.digests import rank_digests
settings = {
    "io": {"chunk_bytes": 1 << 16, "extent_bytes": 1 << 16, "remote_threads": 2, "remote_gap_bytes": 0},
    "routing": {"force_pool": True},
    "straggler": {"window_s": 0.5, "gain_s": 0.5},
}
with mm.connect(config=mm.load_config(overrides=settings)) as cluster:
    model = cluster.load(sys.argv[1], mm.Parallel(dp=3), keep=False, record=sys.argv[2])
    print(json.dumps({"report": model.report.to_json(), "held": model.run(rank_digests)}))
"""


def test_a_slow_host_gives_its_reading_away_and_nothing_is_read_twice(llama: Path) -> None:
    topology = switched(num_hosts=3, nic_bytes_per_s=62.5e6, storage_bytes_per_s=20e6)
    head = bed_node("head", num_gpus=0, nic_bytes_per_s=62.5e6)
    with Bed(replace(topology, nodes=(head, *topology.nodes))) as bed:
        bed.start_ray()
        server = bed.serve(llama)
        slow = bed.hosts[-1]
        server.throttle(slow.address, SLOW_BYTES_PER_S)
        record = bed.folder / "record"
        done = bed.head.start(sys.executable, "-c", _LOAD, server.uri, str(record)).wait(BOUND_S)
        assert done.returncode == 0, done.stderr
        answer: Any = json.loads(done.stdout.splitlines()[-1])
        events = (record / "events.jsonl").read_text()
        sent = server.served().bytes_by_client()

    for rank in THREE.ranks:
        assert answer["held"][rank] == json.loads(json.dumps(digest_all(expected_state_dict(llama, THREE, rank))))
    report = mm.LoadReport.from_json(answer["report"])
    assert {fault.kind for fault in report.faults} == {"straggler"}
    assert report.bytes_retried == 0
    assert report.bytes_from_storage == report.bytes_total
    assert sent[slow.address] < 0.6 * min(sent[host.address] for host in bed.hosts[1:-1])
    assert check(EventLog.from_jsonl(events)) is None
