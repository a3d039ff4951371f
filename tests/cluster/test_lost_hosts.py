"""Hosts that go in the middle of a load: switched off, frozen, cut off for some seconds. One is spare."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megamind_ray as mm
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.testbed import Bed, Host, bed_node, switched

BOUND_S = 90.0
TWO = mm.Parallel(dp=2)
# Where it runs, the planner is.
_START = """
import sys
import megamind_ray as mm
with mm.connect(lifetime="detached") as cluster:
    cluster.load(sys.argv[1], name="first", keep=False)
"""
_LOAD = """
import json, sys
import megamind_ray as mm
from megamind_ray.testing.digests import rank_digests
settings = {"io": {"chunk_bytes": 1 << 17, "extent_bytes": 1 << 18}, "routing": {"force_pool": True}}
with mm.connect(config=mm.load_config(overrides=settings)) as cluster:
    model = cluster.load(sys.argv[1], mm.Parallel(dp=2), keep=False)
    print(json.dumps({"report": model.report.to_json(), "held": model.run(rank_digests)}))
"""


@pytest.fixture
def bed() -> Iterator[Bed]:
    """A head without a GPU, where the planner is, and three hosts with one each. A test leaves one of them dead."""
    topology = switched(num_hosts=3, nic_bytes_per_s=62.5e6, storage_bytes_per_s=20e6)
    head = bed_node("head", num_gpus=0, nic_bytes_per_s=62.5e6)
    with Bed(replace(topology, nodes=(head, *topology.nodes))) as bed:
        bed.start_ray()
        yield bed


def load_through(bed: Bed, folder: Path, blow: Callable[[Host], object]) -> tuple[mm.LoadReport, Host]:
    """Strikes a host that loads when storage has sent half. The report of the load, whose bytes are right; the host."""
    server = bed.serve(folder)
    mark = bed.counters()
    server.hold_after(2_500_000)
    driver = bed.head.start(sys.executable, "-c", _LOAD, server.uri)
    assert server.wait_until_holding(BOUND_S), driver.errors
    moved = bed.counters().since(mark).hosts
    victim = max((host for host in bed.hosts if host.node.gpus), key=lambda host: moved[host.name].received_bytes)
    blow(victim)
    server.release()
    done = driver.wait(BOUND_S)
    assert done.returncode == 0, done.stderr
    answer: Any = json.loads(done.stdout.splitlines()[-1])
    for rank in TWO.ranks:
        assert answer["held"][rank] == json.loads(json.dumps(digest_all(expected_state_dict(folder, TWO, rank))))
    return mm.LoadReport.from_json(answer["report"]), victim


@pytest.mark.parametrize("blow", [Host.power_off, Host.freeze], ids=["switched off", "frozen"])
def test_a_host_that_is_lost_gives_its_rank_to_the_spare_one(
    blow: Callable[[Host], object], bed: Bed, llama: Path
) -> None:
    report, _ = load_through(bed, llama, blow)
    (fault,) = report.faults
    assert fault.kind == "node_lost"
    assert "no sign of life" in fault.where, "nobody was told of it"
    assert len({rank.node for rank in report.ranks}) == 2
    assert all(rank.node not in fault.where for rank in report.ranks)


def test_a_cut_of_five_seconds_loses_nobody(bed: Bed, llama: Path) -> None:
    def cut(host: Host) -> None:
        host.link.cut()
        time.sleep(5)  # the length of the cut, not a wait for anything
        host.link.mend()

    report, _ = load_through(bed, llama, cut)
    assert [fault for fault in report.faults if fault.kind.endswith("_lost")] == []


def test_a_planner_that_is_lost_with_its_host_is_started_on_that_of_a_client(bed: Bed, llama: Path) -> None:
    """With it goes an agent and a rank; the client waits on another host."""
    server = bed.serve(llama)
    victim = bed.hosts[-1]
    started = victim.start(sys.executable, "-c", _START, server.uri).wait(BOUND_S)
    assert started.returncode == 0, started.stderr
    server.hold_after(2_500_000)
    driver = bed.head.start(sys.executable, "-c", _LOAD, server.uri)
    assert server.wait_until_holding(BOUND_S), driver.errors
    victim.power_off()
    server.release()
    done = driver.wait(BOUND_S)
    assert done.returncode == 0, done.stderr
    answer: Any = json.loads(done.stdout.splitlines()[-1])
    for rank in TWO.ranks:
        assert answer["held"][rank] == json.loads(json.dumps(digest_all(expected_state_dict(llama, TWO, rank))))
    report = mm.LoadReport.from_json(answer["report"])
    kinds = [fault.kind for fault in report.faults]
    assert kinds[0] == "planner_lost"
    assert set(kinds) <= {"planner_lost", "node_lost"}
