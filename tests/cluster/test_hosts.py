"""Hosts: programs on them, files of their own, and what can happen to them. None of these needs Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megamind_ray as mm
from megamind_ray.testing.rated_server import RatedServer, Rates
from megamind_ray.testing.testbed import Bed, missing, remove_leavings, switched
from megamind_ray.testing.testbed.processes import started, state_of

BOUND_S = 30.0

_COUNT_UP = """
import os, time
for number in range(10**9):
    print(os.getpid(), number, flush=True)
    time.sleep(0.005)
"""
_GET = """
import sys, urllib.request
uri, begin, end = sys.argv[1:]
request = urllib.request.Request(uri, headers={"Range": f"bytes={begin}-{int(end) - 1}"})
with urllib.request.urlopen(request, timeout=30) as answer:
    print(len(answer.read()))
"""
_BED_OF_ANOTHER = """
import sys, time
from megamind_ray.testing.testbed import Bed, switched
bed = Bed(switched(num_hosts=1))
bed.host("n0").start("sleep", "1000")
while not bed.host("n0").processes(title="sleep"):
    time.sleep(0.01)
print(bed.folder, bed.host("n0").namespaces.pid, bed.host("n0").processes(title="sleep")[0].pid, flush=True)
sys.stdin.read()
"""


def wait_for(reached: Callable[[], bool]) -> None:
    until_s = time.monotonic() + BOUND_S
    while not reached():
        assert time.monotonic() < until_s, "not reached"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with Bed(switched(num_hosts=2)) as bed:
        yield bed


def test_a_program_has_the_clusters_environment_and_its_output_comes_back(bed: Bed, tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['RAY_ADDRESS'], os.environ['RAY_AUTH_MODE'], os.getcwd(), os.environ['A'])"
    code += "; print('oh', file=sys.stderr); sys.exit(3)"

    done = bed.host("n1").run(sys.executable, "-c", code, cwd=tmp_path, environment={"A": "b"})

    assert done.stdout.split() == [bed.ray_address, "token", str(tmp_path), "b"]
    assert (done.stderr, done.returncode) == ("oh\n", 3)


def test_a_program_ends_at_its_deadline_with_all_it_started(bed: Bed) -> None:
    with pytest.raises(mm.ClusterError, match=r"longer than 0.3 s; it said: before"):
        bed.host("n0").run("sh", "-c", "echo before; sleep 1000 & sleep 1001", timeout_s=0.3)
    wait_for(lambda: not bed.host("n0").processes(title="sleep 100"))


def test_a_folder_is_only_on_the_host_it_was_given_to(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("here")

    path = bed.host("n1").give_folder(tmp_path, "model")

    assert bed.host("n1").run("cat", f"{path}/weights").stdout == "here"
    assert bed.host("n1").outside(path / "weights").read_text() == "here"
    assert "No such file" in bed.host("n0").run("ls", str(path)).stderr
    assert not path.exists()
    assert bed.host("n0").local == bed.host("n1").local == path.parent


def test_shared_memory_is_each_hosts_own(bed: Bed) -> None:
    bed.host("n0").python("open('/dev/shm/mine', 'w').write('x')")

    assert bed.host("n1").run("test", "-e", "/dev/shm/mine").returncode == 1
    assert not Path("/dev/shm/mine").exists()


def test_a_process_is_killed_by_the_id_that_it_knows(bed: Bed) -> None:
    host = bed.host("n0")
    victim, other = (host.start(sys.executable, "-c", _COUNT_UP) for _ in range(2))
    wait_for(lambda: "\n" in victim.output and "\n" in other.output)

    host.kill_inner(int(victim.output.split()[0]))

    assert victim.wait(BOUND_S).returncode == -signal.SIGKILL
    assert other.is_running
    other.kill()
    with pytest.raises(mm.RequestError, match=r"n0 has no raylet ''; it has none"):
        host.kill("raylet")


def test_a_frozen_host_does_nothing_until_it_is_thawed(bed: Bed) -> None:
    frozen, other = bed.host("n0"), bed.host("n1")
    still, moves = (host.start(sys.executable, "-c", _COUNT_UP) for host in (frozen, other))
    wait_for(lambda: "\n" in still.output and "\n" in moves.output)

    frozen.freeze()
    before, began = still.output, len(moves.output)
    wait_for(lambda: len(moves.output) > began + 100)
    assert {state_of(one.pid) for one in frozen.processes()} == {"T"}
    assert still.output == before
    frozen.thaw()

    wait_for(lambda: len(still.output) > len(before))
    for program in (still, moves):
        program.signal(signal.SIGTERM)
        assert program.wait(BOUND_S).returncode == -signal.SIGTERM


@pytest.mark.parametrize("is_frozen", [False, True], ids=["running", "frozen"])
def test_a_host_that_is_switched_off_is_gone_without_a_word(is_frozen: bool) -> None:
    with Bed(switched(num_hosts=2)) as bed:
        victim = bed.host("n1")
        program = victim.start(sys.executable, "-c", _COUNT_UP)
        wait_for(lambda: "\n" in program.output)
        pids = [one.pid for one in victim.processes()]
        if is_frozen:
            victim.freeze()

        victim.power_off()

        assert pids
        assert [started(pid) for pid in pids] == [None] * len(pids)
        assert not victim.is_alive
        assert victim.processes() == []
        assert set(bed.counters().hosts) == {"n0"}


def test_storage_counts_what_it_sends_to_whom(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(3 << 20))
    mark = bed.counters()
    server = bed.serve(tmp_path)

    assert bed.host("n0").python(_GET, f"{server.uri}/a.bin", "0", str(2 << 20)) == f"{2 << 20}\n"
    assert bed.host("n1").python(_GET, f"{server.uri}/a.bin", str(1 << 20), str(3 << 20)) == f"{2 << 20}\n"

    served = server.served()
    assert (served.num_requests, served.bytes_sent) == (2, 4 << 20)
    assert [(one.client, one.path, one.begin, one.end) for one in served.sent] == [
        (bed.host("n0").address, "a.bin", 0, 2 << 20),
        (bed.host("n1").address, "a.bin", 1 << 20, 3 << 20),
    ]
    assert served.bytes_by_client() == {host.address: 2 << 20 for host in bed.hosts}
    assert bed.counters().since(mark).hosts["n0"].received_bytes > 2 << 20


def test_storage_keeps_its_rate_and_holds_back_when_told_to(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(2 << 20))
    with RatedServer(tmp_path, Rates(bytes_per_s=10e6, latency_s=0.05)) as server:
        begin_s = time.perf_counter()
        urllib.request.urlopen(f"{server.uri}/a.bin", timeout=BOUND_S).read()
        assert time.perf_counter() - begin_s > 0.05 + (2 << 20) / 10e6 - 0.03

        server.hold_after(3 << 20)
        code = "import sys, urllib.request; print(len(urllib.request.urlopen(sys.argv[1], timeout=30).read()))"
        with subprocess.Popen(
            [sys.executable, "-c", code, f"{server.uri}/a.bin"], stdout=subprocess.PIPE, text=True
        ) as client:
            assert server.wait_until_holding(BOUND_S)
            assert server.served().bytes_sent == 3 << 20
            assert client.poll() is None
            server.release()
            assert client.communicate(timeout=BOUND_S)[0] == f"{2 << 20}\n"
        assert server.served().bytes_sent == 4 << 20


@pytest.fixture
def abandoned() -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts processes that make a bed each."""
    made = []

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        made.append(subprocess.Popen([sys.executable, "-c", _BED_OF_ANOTHER], stdin=pipe, stdout=pipe, text=True))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate(timeout=BOUND_S)
    remove_leavings()


def test_hosts_end_with_the_process_that_made_them_however_it_ends(
    abandoned: Callable[[], subprocess.Popen[str]],
) -> None:
    other = abandoned()
    assert other.stdout is not None
    folder, init, inside = other.stdout.readline().split()
    assert remove_leavings() == [], "its process lives"

    other.kill()

    wait_for(lambda: started(int(init)) is None and started(int(inside)) is None)
    other.wait(BOUND_S)
    assert [str(left) for left in remove_leavings()] == [folder]
    assert not Path(folder).exists()


def test_leavings_that_still_run_are_ended_by_the_next_bed(abandoned: Callable[[], subprocess.Popen[str]]) -> None:
    """A host whose first process cannot see that its bed is gone."""
    other = abandoned()
    assert other.stdout is not None
    folder, init, inside = other.stdout.readline().split()
    os.kill(int(init), signal.SIGSTOP)
    other.kill()
    other.wait(BOUND_S)
    assert started(int(inside)) is not None

    with Bed(switched(num_hosts=1)):
        assert started(int(init)) is None
        assert started(int(inside)) is None
        assert not Path(folder).exists()


def test_a_closed_bed_leaves_nothing() -> None:
    with Bed(switched(num_hosts=1)) as bed:
        program = bed.host("n0").start("sleep", "1000")
        wait_for(lambda: bool(bed.host("n0").processes(title="sleep")))
        pids = [bed.host("n0").namespaces.pid, *(one.pid for one in bed.host("n0").processes())]

    assert [started(pid) for pid in pids] == [None] * len(pids)
    assert not program.is_running
    assert not bed.folder.exists()
    bed.close()


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"platform": "darwin"}, "need Linux, this is darwin"),
        ({"uid": 1000}, "need root"),
        ({"commands": ("ip", "no-such-program")}, "not on PATH: no-such-program"),
    ],
    ids=str,
)
def test_what_is_missing_is_said(facts: dict[str, object], reason: str) -> None:
    said = missing(**facts)  # type: ignore[arg-type]

    assert said is not None
    assert reason in said
