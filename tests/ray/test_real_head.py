"""The command line and Ray jobs against a head that was started as the README says, with token authentication."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest

from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.range_server import RangeServer
from megamind_ray.testing.real_cluster import RealCluster

BOUND_S = 120.0

_KILL_ORPHAN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
ray.kill(ray.get_actor("orphan/planner", namespace="megamind"))
"""

_KILL_PLANNER = """
import os, signal, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
planner = ray.get_actor(sys.argv[2] + "/planner", namespace="megamind")
os.kill(ray.get(planner.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
"""

_LOSE_PLANNER_AND_RAY = """
import os, signal, sys, ray
import megamind_ray as mm
said = []
cluster = mm.connect(sys.argv[1])
cluster.load(sys.argv[2], name="first")
planner = ray.get_actor("default/planner", namespace="megamind")
os.kill(ray.get(planner.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
cluster.unload("first")
cluster.load(sys.argv[2], name="second")
said += [model.name for model in mm.connect(sys.argv[1]).models()]
ray.shutdown()
try:
    cluster.models()
except mm.ClusterError:
    said.append("left")
print(*said, ray.is_initialized(), sep=", ")
"""

# Loads into a fleet of its own that is taken down meanwhile.
_LOSE_FLEET = """
import sys, threading
import megamind_ray as mm
from megamind_ray.testing.background import Background
from megamind_ray.testing.range_server import RangeServer
from pathlib import Path
settings = mm.load_config(overrides={"deadlines": {"call_s": 4.0, "planner_s": 5.0}})
with (
    mm.connect(sys.argv[1], fleet="gone", lifetime="detached", config=settings) as client,
    RangeServer(Path(sys.argv[2]), hold_after_bytes=2 << 20) as server,
):
    load = Background(lambda: client.load(server.uri + "/model.safetensors"))
    assert server.wait_until_holding()
    mm.down(sys.argv[1], fleet="gone")
    load.wait(60)
    print(type(load.error).__name__, load.error)
"""


@pytest.fixture(scope="module")
def head() -> Iterator[RealCluster]:
    with RealCluster(num_gpus=2, pool_bytes=256 << 20) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("head") / "tiny-llama", num_layers=20)


def test_a_job_loads_with_the_command_line_and_imports_its_own_modules(
    head: RealCluster, folder: Path, tmp_path: Path
) -> None:
    """Its folder has a module named like one of the links at the top of this repository: it must stay its own."""
    (tmp_path / "policies.py").write_text("ANSWER = 42\n")
    report = tmp_path / "report.json"
    script = "import policies; assert policies.ANSWER == 42; print('mine', policies.__file__)\n"
    (tmp_path / "check.py").write_text(script)
    done = head.submit(
        tmp_path,
        "sh",
        "-c",
        f"python check.py && megamind load {folder} --tp 2 --report {report}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine" in done.stdout
    document = json.loads(report.read_text())
    assert document["bytes_from_storage"] == document["bytes_total"] > 0
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert head.actors() == []


def test_the_example_runs_as_a_job(head: RealCluster, folder: Path, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "load_job.py"
    shutil.copy(example, tmp_path)
    done = head.submit(tmp_path, "python", "load_job.py", str(folder), "--tp", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1" in done.stdout
    assert "lm_head.weight" in done.stdout


def test_a_detached_model_stays_until_it_is_unloaded_and_its_fleet_until_down(head: RealCluster, folder: Path) -> None:
    loaded = head.megamind_json("load", str(folder), "--tp", "2", "--detach", "--name", "stays")
    assert loaded["model"] == "stays"
    assert [model["name"] for model in head.megamind_json("models")["models"]] == ["stays"]
    head.megamind_json("unload", "stays")
    assert head.megamind_json("models")["models"] == []
    assert len(head.megamind_json("down")["ended"]) == 4  # planner, agent, two workers
    assert head.actors() == []


def test_a_detached_fleet_without_a_planner_is_taken_over_by_the_next_client(head: RealCluster, folder: Path) -> None:
    """The planner was ended for good, as it is with its node; `down` ends such a fleet, too."""
    head.megamind_json("load", str(folder), "--tp", "2", "--detach", "--fleet", "orphan", "--name", "stays")
    head.python(_KILL_ORPHAN, head.address)
    assert len(head.actors()) == 3
    document = head.megamind_json("load", str(folder), "--detach", "--fleet", "orphan", "--name", "more")
    assert document["faults"] == []
    assert [one["name"] for one in head.megamind_json("models", "--fleet", "orphan")["models"]] == ["stays", "more"]
    head.python(_KILL_ORPHAN, head.address)
    assert len(head.megamind_json("down", "--fleet", "orphan")["ended"]) == 3
    assert head.actors() == []


def test_a_process_outlives_its_planner_and_its_connection(head: RealCluster, folder: Path) -> None:
    """The planner is killed from outside, as by the kernel for want of memory; later the user calls ray.shutdown()."""
    output = head.python(_LOSE_PLANNER_AND_RAY, head.address, str(folder))
    assert output.splitlines()[-1] == "second, left, False", output
    assert head.actors() == []


def test_a_fleet_that_is_taken_down_under_a_load_is_not_started_anew(head: RealCluster, folder: Path) -> None:
    said = head.python(_LOSE_FLEET, head.address, str(folder)).splitlines()[-1]
    assert said.startswith("ClusterError")
    assert "no planner could be had again" in said
    assert "connect again" in said
    assert head.actors() == []


def test_commands_that_only_ask_start_nothing(head: RealCluster) -> None:
    done = head.megamind("models")
    assert done.returncode == 2
    assert "no fleet 'default'" in done.stderr
    assert head.actors() == []


@dataclass(frozen=True, slots=True)
class Held:
    process: subprocess.Popen[str]
    server: RangeServer


@contextmanager
def load_held_in_the_middle(head: RealCluster, folder: Path, *options: str) -> Iterator[Held]:
    """A ``megamind load`` that has read the first half of its weights and waits for the other."""
    with RangeServer(folder, hold_after_bytes=2 << 20) as server:
        command = ["megamind", "load", f"{server.uri}/model.safetensors", "--tp", "2", "--address", head.address]
        with subprocess.Popen(
            [*command, *options], env=head.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as load:
            try:
                if not server.wait_until_holding():
                    load.kill()
                    raise AssertionError(f"the load did not get so far: {load.communicate()}")
                yield Held(load, server)
            finally:
                load.kill()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupt_in_the_middle_leaves_nothing_and_exits_130(
    head: RealCluster, folder: Path, sent: signal.Signals
) -> None:
    with load_held_in_the_middle(head, folder) as held:
        held.process.send_signal(sent)
        stdout, stderr = held.process.communicate(timeout=BOUND_S)
    assert held.process.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert head.actors() == []


def test_a_killed_driver_takes_its_fleet_with_it(head: RealCluster, folder: Path) -> None:
    with load_held_in_the_middle(head, folder) as held:
        held.process.kill()
        held.process.wait(BOUND_S)
        head.wait_until_no_actors()


def test_a_detached_load_goes_on_without_its_driver_also_where_its_planner_is_killed_too(
    head: RealCluster, folder: Path
) -> None:
    with load_held_in_the_middle(head, folder, "--detach", "--name", "alone", "--fleet", "alone") as held:
        held.process.kill()
        held.process.wait(BOUND_S)
        head.python(_KILL_PLANNER, head.address, "alone")
        held.server.release()
        deadline = monotonic() + BOUND_S
        while not (models := head.megamind_json("models", "--fleet", "alone")["models"]) and monotonic() < deadline:
            pass  # each question takes a second
    assert [model["name"] for model in models] == ["alone"]
    assert len(head.actors()) == 4
    head.megamind_json("down", "--fleet", "alone")
    assert head.actors() == []


def test_the_command_line_outlives_the_planner(head: RealCluster, folder: Path) -> None:
    with load_held_in_the_middle(head, folder, "--json") as held:
        head.python(_KILL_PLANNER, head.address, "default")
        held.server.release()
        stdout, stderr = held.process.communicate(timeout=BOUND_S)
    assert held.process.returncode == 0, stderr
    document = json.loads(stdout)
    assert [fault["kind"] for fault in document["faults"]] == ["planner_lost"]
    assert document["bytes_from_storage"] == document["bytes_total"]
    assert head.actors() == []
