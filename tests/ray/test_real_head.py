"""The command line and Ray jobs against a head that was started as the README says, with token authentication."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

_LOSE_PLANNER_AND_RAY = """
import os, signal, sys, ray
import megamind_ray as mm
said = []
cluster = mm.connect(sys.argv[1])
cluster.load(sys.argv[2])
planner = ray.get_actor("default/planner", namespace="megamind")
os.kill(ray.get(planner.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
try:
    cluster.load(sys.argv[2])
except mm.ClusterError as error:
    assert "planner" in str(error), error
    said.append("lost")
again = mm.connect(sys.argv[1])
again.load(sys.argv[2])
said.append("loaded again")
ray.shutdown()
try:
    again.models()
except mm.ClusterError:
    said.append("left")
print(*said, ray.is_initialized(), sep=", ")
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


def test_down_ends_a_fleet_whose_planner_is_gone(head: RealCluster, folder: Path) -> None:
    head.megamind_json("load", str(folder), "--tp", "2", "--detach", "--fleet", "orphan")
    head.python(_KILL_ORPHAN, head.address)
    refused = head.megamind("load", str(folder), "--detach", "--fleet", "orphan")
    assert refused.returncode != 0
    assert "megamind down --fleet orphan" in " ".join(refused.stderr.split())
    head.megamind_json("down", "--fleet", "orphan")
    assert head.actors() == []


def test_a_process_outlives_its_planner_and_its_connection(head: RealCluster, folder: Path) -> None:
    """The planner is killed from outside, as by the kernel for want of memory; later the user calls ray.shutdown()."""
    output = head.python(_LOSE_PLANNER_AND_RAY, head.address, str(folder))
    assert output.splitlines()[-1] == "lost, loaded again, left, False", output
    assert head.actors() == []


def test_commands_that_only_ask_start_nothing(head: RealCluster) -> None:
    done = head.megamind("models")
    assert done.returncode == 2
    assert "no fleet 'default'" in done.stderr
    assert head.actors() == []


@contextmanager
def load_held_in_the_middle(head: RealCluster, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A ``megamind load`` that has read the first half of its weights and waits for the other."""
    with RangeServer(folder, hold_after_bytes=2 << 20) as server:
        command = ["megamind", "load", f"{server.uri}/model.safetensors", "--tp", "2", "--address", head.address]
        with subprocess.Popen(
            command, env=head.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as load:
            try:
                if not server.wait_until_holding():
                    load.kill()
                    raise AssertionError(f"the load did not get so far: {load.communicate()}")
                yield load
            finally:
                load.kill()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupt_in_the_middle_leaves_nothing_and_exits_130(
    head: RealCluster, folder: Path, sent: signal.Signals
) -> None:
    with load_held_in_the_middle(head, folder) as load:
        load.send_signal(sent)
        stdout, stderr = load.communicate(timeout=BOUND_S)
    assert load.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert head.actors() == []


def test_a_killed_driver_takes_its_fleet_with_it(head: RealCluster, folder: Path) -> None:
    with load_held_in_the_middle(head, folder) as load:
        load.kill()
        load.wait(BOUND_S)
        head.wait_until_no_actors()
