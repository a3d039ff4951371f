"""How Ray is started on a host, and how its head is asked which nodes live."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megamind_ray.core.topology import Node
from megamind_ray.errors import ClusterError
from megamind_ray.testing.testbed.namespaces import Namespaces

__all__ = ["GCS_PORT", "RaySettings", "Watcher", "start_command"]

GCS_PORT: Final = 6379
_BOUND_S: Final = 60.0
_CLOSE_S: Final = 5.0
# Private calls of Ray: the public ones need a driver, which starts workers and takes seconds.
_WATCH: Final = """
import json, sys, time
from ray._raylet import GcsClient
deadline = time.monotonic() + 60
while True:
    try:
        client = GcsClient(address=sys.argv[1])
        client.get_all_node_info(timeout=5)
        break
    except Exception as error:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.1)
print("ready", flush=True)
for line in sys.stdin:
    nodes = client.get_all_node_info(timeout=10).values()
    print(json.dumps([[node.node_manager_address, node.state == 0] for node in nodes]), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Settings of every Ray node of a bed.

    A node that is silent is dead after ``health_failures`` checks in a row, each lost after ``health_timeout_ms`` and
    followed by the next after ``health_period_ms``: 11.2 s. A cut of 5 s then kills nobody: TCP sends again at
    intervals that double, so that a connection may be silent for twice as long as the cut (docs/design/0022). A killed
    raylet refuses checks at once, and is dead after 1 to 2 s.

    Attributes:
        num_cpus: Logical CPUs of each host.
        health_period_ms: Between two checks of a node by the head.
        health_timeout_ms: A check without an answer for so long has failed.
        health_failures: So many failures in a row, and the node is dead.
        environment: More variables for Ray and for the programs that run on hosts.
    """

    num_cpus: int = 1
    health_period_ms: int = 300
    health_timeout_ms: int = 2500
    health_failures: int = 4
    environment: Mapping[str, str] = field(default_factory=dict)

    def variables(self, head: str, token: Path) -> dict[str, str]:
        """The environment of Ray and of programs on a host.

        Args:
            head: Address of the head, without its port.
            token: File with the cluster's token.
        """
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {
            **variables,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_ADDRESS": f"{head}:{GCS_PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_initial_delay_ms": str(self.health_period_ms),
            "RAY_health_check_period_ms": str(self.health_period_ms),
            "RAY_health_check_timeout_ms": str(self.health_timeout_ms),
            "RAY_health_check_failure_threshold": str(self.health_failures),
            # Every host sees the memory of the whole machine: each would kill workers for what the others use.
            "RAY_memory_monitor_refresh_ms": "0",
            **self.environment,
        }


def start_command(node: Node, address: str, head: str, folder: Path, settings: RaySettings) -> list[str]:
    """What starts Ray on a host and stays with it.

    Args:
        node: The host.
        address: Its own.
        head: The head's address; the same one makes it the head.
        folder: Ray's files; short, as there are sockets below it.
        settings: Of the cluster.
    """
    command = ["ray", "start", "--block", f"--node-ip-address={address}", "--disable-usage-stats"]
    if address == head:
        command += ["--head", f"--port={GCS_PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
    else:
        command += [f"--address={head}:{GCS_PORT}"]
    return [
        *command,
        f"--num-cpus={settings.num_cpus}",
        f"--num-gpus={len(node.gpus)}",
        f"--object-store-memory={node.pool_bytes}",
    ]


class Watcher:
    """Asks the head which nodes live.

    Args:
        host: Where to ask from; the head.
        address: ``HOST:PORT`` of the GCS.
        environment: Of Ray's programs.
        errors: File for what goes wrong in it.
    """

    def __init__(self, host: Namespaces, address: str, environment: Mapping[str, str], errors: Path) -> None:
        self._errors = errors
        pipe = subprocess.PIPE
        with errors.open("wb") as log:
            self._process = subprocess.Popen(
                host.enter(sys.executable, "-c", _WATCH, address),
                env=dict(environment),
                stdin=pipe,
                stdout=pipe,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Waits until the head answers.

        Raises:
            ClusterError: It does not within a minute.
        """
        self._answer()

    def alive(self) -> set[str]:
        """Addresses of the nodes that the head takes for alive.

        Raises:
            ClusterError: The head does not answer.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ClusterError(f"nobody asks the head any more: {self._tail()}") from error
        return {address for address, is_alive in json.loads(self._answer()) if is_alive}

    def close(self) -> None:
        """Ends it; its host may be frozen, or gone already."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_BOUND_S)
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _BOUND_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise ClusterError(f"the head's GCS does not answer within {_BOUND_S:g} s: {self._tail()}")
        return line

    def _tail(self) -> str:
        return self._errors.read_text(errors="replace")[-2000:]
