"""A host for which storage is much slower than for the others: the others read what it has not begun."""

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

BOUND_S = 120.0
TWO = mm.Parallel(dp=2)
SLOW_BYTES_PER_S = 100e3  # a half of 5 MB would take 25 s
_LOAD = """
import json, sys
import megamind_ray as mm
from megamind_ray.testing.digests import rank_digests
settings = {
    "io": {"chunk_bytes": 1 << 16, "extent_bytes": 1 << 16, "pool_extent_bytes": 1 << 16, "remote_threads": 2},
    "routing": {"force_pool": True},
    "straggler": {"window_s": 0.5, "gain_s": 0.5},
}
with mm.connect(config=mm.load_config(overrides=settings)) as cluster:
    model = cluster.load(sys.argv[1], mm.Parallel(dp=2), keep=False, record=sys.argv[2])
    print(json.dumps({"report": model.report.to_json(), "held": model.run(rank_digests)}))
"""


def test_a_slow_host_gives_its_reading_away_and_nothing_is_read_twice(llama: Path) -> None:
    topology = switched(num_hosts=2, nic_bytes_per_s=62.5e6, storage_bytes_per_s=20e6)
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

    for rank in TWO.ranks:
        assert answer["held"][rank] == json.loads(json.dumps(digest_all(expected_state_dict(llama, TWO, rank))))
    report = mm.LoadReport.from_json(answer["report"])
    assert {fault.kind for fault in report.faults} == {"straggler"}
    assert report.bytes_retried == 0
    assert report.bytes_from_storage == report.bytes_total
    assert sent[slow.address] < 0.5 * sent[bed.hosts[1].address]
    assert check(EventLog.from_jsonl(events)) is None
