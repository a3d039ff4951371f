"""A Ray node on every host: nodes that die, fall silent, are cut off for a while, leave and join."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

import pytest

import megamind_ray as mm
from megamind_ray.testing.testbed import Bed, bed_node, switched

BOUND_S = 60.0
HOSTS = {"n0", "n1", "n2"}

_NODES = """
import json, ray
ray.init(log_to_driver=False, logging_level="error")
rows = [row for row in ray.nodes() if row["Alive"]]
keys = ("CPU", "GPU", "object_store_memory")
print(json.dumps({row["NodeManagerAddress"]: [row["Resources"].get(key, 0) for key in keys] for row in rows}))
"""
_ASK_TWICE = """
import os, sys, time, pathlib, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(log_to_driver=False, logging_level="error")
(node,) = [row["NodeID"] for row in ray.nodes() if row["Alive"] and row["NodeManagerAddress"] == sys.argv[1]]
@ray.remote(num_cpus=0, scheduling_strategy=On(node, soft=False))
class Actor:
    def where(self):
        return os.uname().nodename, os.getpid()
actor = Actor.remote()
print(*ray.get(actor.where.remote(), timeout=30), flush=True)
go = pathlib.Path(sys.argv[2])
while not go.exists():
    time.sleep(0.05)
print(*ray.get(actor.where.remote(), timeout=30), flush=True)
"""


def wait_for(reached: Callable[[], object]) -> None:
    until_s = time.monotonic() + BOUND_S
    while not reached():
        assert time.monotonic() < until_s, "not reached"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def started_bed() -> Iterator[Bed]:
    with Bed(switched(num_hosts=3)) as bed:
        bed.start_ray()
        yield bed


@pytest.fixture
def bed(started_bed: Bed) -> Bed:
    """All three nodes live, whatever the test before did to them."""
    lost = HOSTS - started_bed.alive()
    for name in lost:
        host = started_bed.host(name)
        host.link.mend()
        host.thaw()
        host.kill_all()
        started_bed.start_ray_on(host)
    started_bed.wait_until_alive(HOSTS, timeout_s=BOUND_S)
    return started_bed


def test_every_host_is_a_node_with_the_resources_of_the_topology(bed: Bed) -> None:
    found = json.loads(bed.host("n1").python(_NODES))

    assert found == {host.address: [1, 1, host.node.pool_bytes] for host in bed.hosts if host.is_alive}
    for host in bed.hosts:
        if host.is_alive:
            assert [len(host.processes(role)) for role in ("raylet", "gcs")] == [1, int(host is bed.head)]


def test_a_cut_of_five_seconds_kills_nobody(bed: Bed) -> None:
    victim, go = bed.host("n1"), bed.folder / "go"
    driver = bed.head.start(sys.executable, "-c", _ASK_TWICE, victim.address, str(go))
    wait_for(lambda: bool(driver.output))

    victim.link.cut()
    time.sleep(5)  # the length of the cut, not a wait for anything
    victim.link.mend()
    go.touch()

    done = driver.wait(BOUND_S)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second, "the same actor, in the same process"
    assert first.split()[0] == "n1"
    assert bed.alive() == HOSTS


def test_a_killed_raylet_is_noticed_and_its_host_can_join_again(bed: Bed) -> None:
    killed = bed.host("n2").kill("raylet")

    assert [one.role for one in killed] == ["raylet"]
    bed.wait_until_alive(HOSTS - {"n2"}, timeout_s=BOUND_S)
    bed.start_ray_on(bed.host("n2"))
    bed.wait_until_alive(HOSTS, timeout_s=BOUND_S)


def test_a_host_joins_a_running_cluster_and_leaves_it(bed: Bed) -> None:
    late = bed.add_host(bed_node("late", num_gpus=0))
    bed.wait_until_alive({*HOSTS, "late"}, timeout_s=BOUND_S)

    late.leave()

    bed.wait_until_alive(HOSTS, timeout_s=BOUND_S)
    assert late.processes("raylet") == []
    assert late.is_alive, "the host stays"
    with pytest.raises(mm.RequestError, match="late has no Ray node that could leave"):
        late.leave()
    late.power_off()


def test_hosts_that_fall_silent_for_long_are_taken_for_dead(bed: Bed) -> None:
    bed.host("n1").freeze()
    bed.host("n2").link.cut()

    bed.wait_until_alive({"n0"}, timeout_s=BOUND_S)


def test_a_node_that_does_not_come_up_is_named_with_what_it_said() -> None:
    with Bed(switched(num_hosts=1)) as bed:
        bed.head.start_ray("sh", "-c", "echo no room for a store; exit 1")
        with pytest.raises(mm.ClusterError, match=r"host n0: its Ray node ended: no room for a store"):
            wait_for(bed.head.require_ray)
