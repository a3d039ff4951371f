"""Ray nodes as their users start them: ``ray start --block`` as child processes, with token authentication."""

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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["RealCluster"]

_BOUND_S = 120.0
_ADDRESS = "127.0.0.1"

_LIST_ACTORS = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print(json.dumps([row["name"] for row in ray.util.list_named_actors(all_namespaces=True)]))
"""
_COUNT_NODES = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print(sum(row["Alive"] for row in ray.nodes()))
"""


class RealCluster:
    """A head and, with ``add_node``, more nodes, all on this machine; ``close`` ends them by their process ids.

    Attributes:
        address: Of the head's GCS, ``HOST:PORT``.
        dashboard: Where jobs are submitted.
        environment: For its clients: token, and the interpreter's folder on PATH.
    """

    def __init__(self, *, num_gpus: int, pool_bytes: int) -> None:
        """Starts the head and waits until it takes jobs.

        Raises:
            AssertionError: It does not come up; the text has the end of its log.
        """
        # Not a test's own folder: the path of a socket in it would be longer than the system allows.
        self._folder = Path(tempfile.mkdtemp(prefix="mm-"))
        self._nodes: list[subprocess.Popen[bytes]] = []
        port, dashboard_port = _free_port(), _free_port()
        self.address = f"{_ADDRESS}:{port}"
        self.dashboard = f"http://{_ADDRESS}:{dashboard_port}"
        token = self._folder / "token"
        token.write_text(os.urandom(32).hex())
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }
        self.environment.pop("RAY_ADDRESS", None)
        try:
            self._start(
                *("--head", f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"),
                *(f"--num-gpus={num_gpus}", f"--object-store-memory={pool_bytes}"),
                f"--temp-dir={self._folder}/ray",
            )
            self._wait(lambda: self.run("ray", "job", "list", "--address", self.dashboard).returncode == 0)
        except BaseException:
            self.close()
            raise

    def add_node(self, *, num_gpus: int, pool_bytes: int) -> None:
        """Starts another node and waits until it has joined."""
        wanted = len(self._nodes) + 1
        self._start(f"--address={self.address}", f"--num-gpus={num_gpus}", f"--object-store-memory={pool_bytes}")
        self._wait(lambda: int(self.python(_COUNT_NODES, self.address).splitlines()[-1]) == wanted)

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a client command to its end."""
        return subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=_BOUND_S, check=False
        )

    def python(self, code: str, *arguments: str) -> str:
        """Runs Python code as a client; its standard output.

        Raises:
            AssertionError: It failed.
        """
        done = self.run(sys.executable, "-c", code, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def megamind(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the command line against this cluster."""
        return self.run("megamind", *arguments, "--address", self.address)

    def megamind_json(self, *arguments: str) -> Any:
        """The JSON document that a command prints.

        Raises:
            AssertionError: The command failed.
        """
        done = self.megamind(*arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def submit(self, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command as a Ray job with a folder as its working directory.

        The head takes jobs some seconds before it has an agent that can run them: until then it is asked again.
        """
        job = ("ray", "job", "submit", "--address", self.dashboard, "--working-dir", ".", "--")
        deadline = time.monotonic() + _BOUND_S
        while True:
            done = self.run(*job, *command, cwd=cwd)
            if "No available agent" not in done.stdout + done.stderr or time.monotonic() > deadline:
                return done

    def actors(self) -> list[str]:
        """Names of the living actors."""
        return [str(name) for name in json.loads(self.python(_LIST_ACTORS, self.address).splitlines()[-1])]

    def wait_until_no_actors(self) -> None:
        """Waits for actors whose driver is gone; Ray notices by its connection."""
        self._wait(lambda: not self.actors())

    def close(self) -> None:
        """Ends all nodes and removes their files."""
        for node in reversed(self._nodes):
            node.send_signal(signal.SIGTERM)
        for node in reversed(self._nodes):
            try:
                node.wait(30)
            finally:
                # The processes of a node end with its `ray start --block`; this is for what would not.
                with suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, *options: str) -> None:
        # Its default is one fixed port: the agent of a second cluster on the machine would not come up, and no job run.
        agent_port = f"--dashboard-agent-listen-port={_free_port()}"
        command = ("ray", "start", "--block", f"--node-ip-address={_ADDRESS}", "--num-cpus=2", agent_port, *options)
        with self._log.open("ab") as log:
            self._nodes.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )

    def _wait(self, reached: Any) -> None:
        """Asks until the answer is yes; each question takes a second or more by itself."""
        deadline = time.monotonic() + _BOUND_S
        while time.monotonic() < deadline and all(node.poll() is None for node in self._nodes):
            if reached():
                return
        raise AssertionError(f"not reached within {_BOUND_S:g} s: {_tail(self._log)}")

    @property
    def _log(self) -> Path:
        return self._folder / "nodes.log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        return int(probe.getsockname()[1])


def _tail(log: Path, num_chars: int = 2000) -> Sequence[str]:
    return log.read_text(errors="replace")[-num_chars:] if log.exists() else "no log"
