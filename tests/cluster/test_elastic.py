"""Hosts that join and leave: in the middle of a load, as planned, and with the last copies of what is kept."""

from __future__ import annotations

import json
import signal
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
# Does what is asked of it, one step after the other, with one fleet; ``answer`` goes back.
_DRIVER = """
import json, pathlib, sys, threading, time
import ray
import megamind_ray as mm
from megamind_ray.testing.digests import rank_digests

settings = {
    "io": {"chunk_bytes": 1 << 17, "extent_bytes": 1 << 18},
    "routing": {"force_pool": True},
    "placement": {"policy": "round_robin"},
}
folder = pathlib.Path(sys.argv[1])

def agents():
    names = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True) if "/agent/" in row["name"]]
    return {name.split("/")[2]: ray.get_actor(name, namespace="megamind") for name in names}

def held():
    refs = {node: agent.holdings.remote() for node, agent in agents().items()}
    blocks = {node: ray.get(ref, timeout=30).blocks for node, ref in refs.items()}
    return {node: sorted(one.block for kept in found.values() for one in kept) for node, found in blocks.items()}

def begin(work):
    def run():
        try:
            outcome["value"] = work()
        except mm.MegamindError as error:
            outcome["error"] = f"{type(error).__name__}: {error}"
    outcome.clear()
    outcome["thread"] = threading.Thread(target=run)
    outcome["thread"].start()

def end():
    outcome.pop("thread").join(80)
    return dict(outcome)

outcome = {}
with mm.connect(config=mm.load_config(overrides=settings)) as cluster:
    names = dict(globals())
    for number in range(1000):
        step, done = folder / f"{number}.py", folder / f"{number}.json"
        while not step.exists():
            time.sleep(0.02)
        code = step.read_text()
        if code == "end":
            break
        names["answer"] = None
        try:
            exec(code, names)
            result = {"value": names["answer"]}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        (folder / "result").write_text(json.dumps(result))
        (folder / "result").rename(done)
"""


class Driver:
    """A program on the head that has a fleet."""

    def __init__(self, bed: Bed) -> None:
        self._folder = bed.folder / "steps"
        self._folder.mkdir()
        self._number = 0
        self._program = bed.head.start(sys.executable, "-c", _DRIVER, str(self._folder))

    def ask(self, code: str) -> Any:
        """What the code's last expression gives."""
        result = self.try_to(code)
        assert "error" not in result, result["error"]
        return result["value"]

    def try_to(self, code: str) -> dict[str, Any]:
        done = self._folder / f"{self._number}.json"
        self._write(f"answer = {code}")
        until_s = time.monotonic() + BOUND_S
        while not done.exists():
            assert self._program.is_running, self._program.errors
            assert time.monotonic() < until_s, f"no answer to {code}"
            time.sleep(0.02)
        return json.loads(done.read_text())  # type: ignore[no-any-return]

    def load(self, uri: str, name: str, **mesh: int) -> mm.LoadReport:
        return mm.LoadReport.from_json(self.ask(self.load_code(uri, name, **mesh)))

    @staticmethod
    def load_code(uri: str, name: str, **mesh: int) -> str:
        return f"cluster.load({uri!r}, mm.Parallel(**{mesh}), name={name!r}).report.to_json()"

    def end(self) -> None:
        self._write("end")
        done = self._program.wait(BOUND_S)
        assert done.returncode == 0, done.stderr

    def _write(self, code: str) -> None:
        path = self._folder / f"{self._number}.py"
        path.with_suffix(".new").write_text(code)
        path.with_suffix(".new").rename(path)
        self._number += 1


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """A head without a GPU, where the planner is, and two hosts with one each; a third one may join."""
    topology = switched(num_hosts=2, nic_bytes_per_s=62.5e6, storage_bytes_per_s=20e6)
    with Bed(replace(topology, nodes=(bed_node("head", num_gpus=0), *topology.nodes))) as bed:
        bed.start_ray()
        yield bed


@pytest.fixture(scope="module")
def started(bed: Bed) -> Iterator[Driver]:
    driver = Driver(bed)
    yield driver
    driver.end()


@pytest.fixture
def driver(started: Driver) -> Driver:
    """Whatever the test before left: no model, nobody is leaving."""
    started.ask("[cluster.unload(model.name) for model in cluster.models()]")
    started.ask("[cluster.undrain(node) for node in cluster.leaving]")
    return started


@pytest.fixture
def late(bed: Bed) -> Host:
    """The third host, which has joined. What it sends takes its time."""
    if "late" not in [host.name for host in bed.hosts]:
        bed.add_host(bed_node("late", nic_bytes_per_s=1e6))
    elif "late" not in bed.alive():
        bed.start_ray_on(bed.host("late"))
    bed.wait_until_alive({"head", "n0", "n1", "late"}, timeout_s=BOUND_S)
    return bed.host("late")


def wait_for(reached: Callable[[], object]) -> None:
    until_s = time.monotonic() + BOUND_S
    while not reached():
        assert time.monotonic() < until_s, "not reached"
        time.sleep(0.02)


def addresses(bed: Bed, *names: str) -> set[str]:
    return {bed.host(name).address for name in names}


def shown(driver: Driver) -> set[str]:
    return set(driver.ask("[node.address for node in cluster.topology().nodes if node.gpus]"))


def nodes(driver: Driver) -> dict[str, str]:
    """Ray's ids by address."""
    return dict(driver.ask("{row['NodeManagerAddress']: row['NodeID'] for row in ray.nodes() if row['Alive']}"))


def actors_on(host: Host) -> list[str]:
    return [one.title for role in ("NodeAgent", "GpuWorker") for one in host.processes("worker", role)]


def test_a_host_that_joins_during_a_load_is_left_alone_by_it_and_used_by_the_next(
    bed: Bed, driver: Driver, llama: Path
) -> None:
    server = bed.serve(llama)
    server.hold_after(2_500_000)
    driver.ask(f"begin(lambda: {driver.load_code(server.uri, 'first', dp=2)})")
    assert server.wait_until_holding(BOUND_S)
    joined = bed.add_host(bed_node("late", nic_bytes_per_s=1e6))
    bed.wait_until_alive({"head", "n0", "n1", "late"}, timeout_s=BOUND_S)
    server.release()
    first = mm.LoadReport.from_json(driver.ask("end()")["value"])

    assert first.faults == ()
    assert joined.address not in server.served().bytes_by_client()
    assert shown(driver) == addresses(bed, "n0", "n1", "late")

    other = bed.serve(llama)
    second = driver.load(other.uri, "second", pp=3)
    assert len({rank.node for rank in second.ranks}) == 3
    assert joined.address in other.served().bytes_by_client(), "it reads, too"
    held = driver.ask("cluster.model('second').run(rank_digests)")
    parallel = mm.Parallel(pp=3)
    for rank in parallel.ranks:
        assert held[rank] == json.loads(json.dumps(digest_all(expected_state_dict(llama, parallel, rank))))

    joined.kill_all()
    bed.wait_until_alive({"head", "n0", "n1"}, timeout_s=BOUND_S)
    assert shown(driver) == addresses(bed, "n0", "n1")
    assert len(driver.load(other.uri, "third", dp=2).ranks) == 2


def test_a_host_with_ranks_is_drained_when_they_have_gone_elsewhere(bed: Bed, driver: Driver, llama: Path) -> None:
    server, n1 = bed.serve(llama), bed.host("n1")
    driver.load(server.uri, "old", dp=2)

    refused = bed.head.run("megamind", "drain", "n1")
    assert refused.returncode == 2, refused.stdout
    assert "it has ranks of 'old'; unload" in refused.stderr
    listed = bed.head.run("megamind", "models")
    assert f"node {nodes(driver)[n1.address]} is leaving: no load uses it" in listed.stdout
    (rank,) = driver.load(server.uri, "new").ranks
    assert rank.node != nodes(driver)[n1.address]
    too_large = driver.try_to(driver.load_code(server.uri, "both", dp=2))["error"]
    assert f"Not used, since leaving: {nodes(driver)[n1.address][:8]}" in too_large
    driver.ask("cluster.unload('old')")

    done = bed.head.run("megamind", "drain", n1.address, "--json")

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["node"], report["lost_blocks"]) == (nodes(driver)[n1.address], 0)
    wait_for(lambda: not actors_on(n1))
    assert driver.ask(f"cluster.drain({report['node'][:12]!r}).to_json()") == report, "it says the same again"
    assert shown(driver) == addresses(bed, "n0")
    assert "is the last one with GPUs" in driver.try_to("cluster.drain('n0').to_json()")["error"]

    # With actors on it Ray would wait for them, half a minute, and then kill them.
    n1.leave()
    bed.wait_until_alive({"head", "n0"}, timeout_s=BOUND_S)
    bed.start_ray_on(n1)
    bed.wait_until_alive({"head", "n0", "n1"}, timeout_s=BOUND_S)
    assert shown(driver) == addresses(bed, "n0", "n1")
    assert driver.ask("list(cluster.leaving)") == [], "it is another node by now"


def keep_on(bed: Bed, driver: Driver, llama: Path, host: Host) -> str:
    """Loads so that a host alone keeps some blocks, without a rank: its worker died. Ray's id of the host."""
    server = bed.serve(llama)
    driver.load(server.uri, "split", tp=2)
    assert len(actors_on(host)) == 2
    host.kill("worker", "GpuWorker")
    return nodes(driver)[host.address]


def test_last_copies_go_to_another_host_before_theirs_is_let_go(bed: Bed, driver: Driver, llama: Path) -> None:
    n1 = bed.host("n1")
    leaving = keep_on(bed, driver, llama, n1)
    before = driver.ask("held()")
    (other,) = before.keys() - {leaving}
    alone = set(before[leaving]) - set(before[other])
    assert alone

    report = driver.ask("cluster.drain('n1').to_json()")

    assert (report["copied_blocks"], report["lost_blocks"]) == (len(alone), 0)
    assert report["holders"] == {other: report["copied_bytes"]}
    assert driver.ask("held()") == {other: sorted({*before[other], *before[leaving]})}
    (model,) = driver.ask("[[model.kept_bytes, model.kept_by] for model in cluster.models()]")
    assert model[1] == {other: model[0]}
    driver.ask("cluster.unload('split')")
    assert driver.ask("held()") == {other: []}, "copies go with their model"


@pytest.mark.parametrize("victim", ["source", "target"])
def test_a_host_that_dies_while_copies_are_made(bed: Bed, driver: Driver, late: Host, llama: Path, victim: str) -> None:
    """The agent of one of them is killed while bytes are on their way from the host that leaves, by its slow link."""
    driver.ask("cluster.drain('n1').to_json()")
    assert shown(driver) == addresses(bed, "n0", "late")
    leaving = keep_on(bed, driver, llama, late)
    driver.ask("cluster.undrain('n1')")
    before = driver.ask("held()")
    mark = bed.counters()
    driver.ask("begin(lambda: cluster.drain('late').to_json())")
    wait_for(lambda: bed.counters().since(mark).hosts["late"].sent_bytes > 700_000)

    (late if victim == "source" else bed.host("n1")).kill("worker", "NodeAgent")
    outcome = driver.ask("end()")

    if victim == "source":
        assert "was lost while it was drained, and with it" in outcome["error"]
        assert driver.ask("list(cluster.leaving)") == [leaving]
        assert driver.ask("cluster.drain('late').to_json()")["copied_blocks"] == 0, "nothing is left there"
    else:
        n0 = nodes(driver)[bed.host("n0").address]
        assert outcome["value"]["holders"] == {n0: outcome["value"]["copied_bytes"]}
        assert set(driver.ask("held()")[n0]) == {block for blocks in before.values() for block in blocks}
    wait_for(lambda: not actors_on(late))


def test_a_load_under_way_is_waited_for_refused_or_left_in_peace(bed: Bed, driver: Driver, llama: Path) -> None:
    server = bed.serve(llama)
    server.hold_after(2_500_000)
    driver.ask(f"begin(lambda: {driver.load_code(server.uri, 'slow', dp=2)})")
    assert server.wait_until_holding(BOUND_S)

    assert "a load is under way" in driver.try_to("cluster.drain('n1', wait_s=0).to_json()")["error"]
    driver.ask("cluster.undrain('n1')")
    waiting = bed.head.start("megamind", "drain", "n1")
    wait_for(lambda: driver.ask("list(cluster.leaving)"))
    waiting.signal(signal.SIGINT)
    interrupted = waiting.wait(BOUND_S)
    assert interrupted.returncode == 130, interrupted.stderr
    assert driver.ask("list(cluster.leaving)") == [nodes(driver)[bed.host("n1").address]], "it stays marked"
    taken_back = bed.head.run("megamind", "drain", "n1", "--cancel")
    assert (taken_back.returncode, taken_back.stdout) == (0, "loads use node n1 again\n")

    server.release()
    report = mm.LoadReport.from_json(driver.ask("end()")["value"])
    assert [fault for fault in report.faults if fault.kind.endswith("_lost")] == []
    assert len({rank.node for rank in report.ranks}) == 2


def test_the_planners_host_and_strangers_are_refused(bed: Bed, driver: Driver) -> None:
    assert "the planner of fleet 'default' runs there" in driver.try_to("cluster.drain('head').to_json()")["error"]
    assert "the cluster has none of this id" in driver.try_to("cluster.drain('n7').to_json()")["error"]
    assert driver.ask("list(cluster.leaving)") == []
