"""The command line and Ray jobs against a head that was started as the README says, with token authentication."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.range_server import RangeServer

BIN = Path(sys.executable).parent
BOUND_S = 120.0


@dataclass(frozen=True)
class Head:
    """A running head node.

    Attributes:
        address: Of its GCS.
        dashboard: Where jobs are submitted.
        environment: For its clients: token and PATH.
    """

    address: str
    dashboard: str
    environment: dict[str, str]

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=BOUND_S, check=False
        )

    def megamind(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("megamind", *arguments, "--address", self.address)

    def json(self, *arguments: str) -> Any:
        done = self.megamind(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def actors(self) -> list[str]:
        """Names of the living actors."""
        done = self.run(sys.executable, "-c", _LIST_ACTORS, self.address)
        assert done.returncode == 0, done.stderr
        return [str(name) for name in json.loads(done.stdout.splitlines()[-1])]


_LIST_ACTORS = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print(json.dumps([row["name"] for row in ray.util.list_named_actors(all_namespaces=True)]))
"""
_KILL_ORPHAN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
ray.kill(ray.get_actor("orphan/planner", namespace="megamind"))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    # Not pytest's folder: the path of a socket in it would be longer than the system allows.
    folder = Path(tempfile.mkdtemp(prefix="mm-"))
    port, dashboard_port = free_port(), free_port()
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
    }
    environment.pop("RAY_ADDRESS", None)
    (folder / "token").write_text("0123456789abcdef" * 4)
    command = [
        *("ray", "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}", "--num-gpus=2", "--num-cpus=4"),
        *(f"--object-store-memory={256 << 20}", f"--temp-dir={folder}/ray"),
    ]
    log = (folder / "head.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        found = Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}", environment)
        _wait_for_jobs(found, process, folder / "head.log")
        yield found
    finally:
        # Its own children end with `ray start --block`; the group is only for what would not.
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            log.close()
            shutil.rmtree(folder, ignore_errors=True)


def _wait_for_jobs(head: Head, process: subprocess.Popen[bytes], log: Path) -> None:
    """The dashboard answers some seconds after the node does."""
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if head.run("ray", "job", "list", "--address", head.dashboard).returncode == 0:
            return
    raise AssertionError(f"the head does not answer: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("head") / "tiny-llama", num_layers=20)


def submit(head: Head, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return head.run("ray", "job", "submit", "--address", head.dashboard, "--working-dir", ".", "--", *command, cwd=cwd)


def test_a_job_loads_with_the_command_line_and_imports_its_own_modules(
    head: Head, folder: Path, tmp_path: Path
) -> None:
    """Its folder has a module named like one of the links at the top of this repository: it must stay its own."""
    (tmp_path / "policies.py").write_text("ANSWER = 42\n")
    report = tmp_path / "report.json"
    script = "import policies; assert policies.ANSWER == 42; print('mine', policies.__file__)\n"
    (tmp_path / "check.py").write_text(script)
    done = submit(
        head,
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


def test_the_example_runs_as_a_job(head: Head, folder: Path, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "load_job.py"
    shutil.copy(example, tmp_path)
    done = submit(head, tmp_path, "python", "load_job.py", str(folder), "--tp", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1" in done.stdout
    assert "lm_head.weight" in done.stdout


def test_a_detached_model_stays_until_it_is_unloaded_and_its_fleet_until_down(head: Head, folder: Path) -> None:
    loaded = head.json("load", str(folder), "--tp", "2", "--detach", "--name", "stays")
    assert loaded["model"] == "stays"
    assert [model["name"] for model in head.json("models")["models"]] == ["stays"]
    head.json("unload", "stays")
    assert head.json("models")["models"] == []
    assert len(head.json("down")["ended"]) == 4  # planner, agent, two workers
    assert head.actors() == []


def test_down_ends_a_fleet_whose_planner_is_gone(head: Head, folder: Path) -> None:
    head.json("load", str(folder), "--tp", "2", "--detach", "--fleet", "orphan")
    assert head.run(sys.executable, "-c", _KILL_ORPHAN, head.address).returncode == 0
    head.json("down", "--fleet", "orphan")
    assert head.actors() == []


def test_commands_that_only_ask_start_nothing(head: Head) -> None:
    done = head.megamind("models")
    assert done.returncode == 2
    assert "no fleet 'default'" in done.stderr
    assert head.actors() == []


@contextmanager
def load_held_in_the_middle(head: Head, folder: Path) -> Iterator[subprocess.Popen[str]]:
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
    head: Head, folder: Path, sent: signal.Signals
) -> None:
    with load_held_in_the_middle(head, folder) as load:
        load.send_signal(sent)
        stdout, stderr = load.communicate(timeout=BOUND_S)
    assert load.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert head.actors() == []


def test_a_killed_driver_takes_its_fleet_with_it(head: Head, folder: Path) -> None:
    with load_held_in_the_middle(head, folder) as load:
        load.kill()
        load.wait(BOUND_S)
        wait_until_gone(head)


def wait_until_gone(head: Head) -> None:
    """Ray notices the end of a driver by its connection; asking again is the wait."""
    left: Sequence[str] = head.actors()
    deadline = time.monotonic() + BOUND_S
    while left and time.monotonic() < deadline:
        left = head.actors()
    assert left == []
