"""A host of a bed: programs that run on it, files that only it has, and what can happen to it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from megamind_ray.core.topology import Node
from megamind_ray.errors import ClusterError, RequestError
from megamind_ray.testing.testbed.namespaces import Namespaces
from megamind_ray.testing.testbed.network import Link, Traffic
from megamind_ray.testing.testbed.processes import HostProcess, Role, processes_of, state_of, wait_until_gone
from megamind_ray.testing.testbed.programs import Program
from megamind_ray.units import MIB

__all__ = ["Host"]

_GONE_S: Final = 20.0
_LEAVE_S: Final = 30.0
_POLL_S: Final = 0.01
_SHM_SPARE_BYTES: Final = 64 * MIB
_RAY_BYTES: Final = 512 * MIB
_programs = itertools.count()


class Host:
    """Made by ``Bed``.

    Attributes:
        name: As in the topology; its host name too, which all hosts of the bed resolve.
        address: IP address.
        node: What the topology says of it.
        link: Its cable: ``cut``, ``mend``, ``set_rate``.
        local: A folder at the same path on every host, with contents of each one's own.
    """

    def __init__(self, node: Node, address: str, folder: Path, plug: Callable[[Namespaces], Link]) -> None:
        self.name, self.node, self.address = str(node.id), node, address
        self.local = folder / "local"
        self._folder = folder
        self._environment: Mapping[str, str] = os.environ
        self._programs: list[Program] = []
        self._ray: Program | None = None
        self.namespaces = Namespaces(self.name, folder)
        try:
            self._mount()
            self.link = plug(self.namespaces)
        except BaseException:
            self.namespaces.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it has not been switched off."""
        return self.namespaces.is_alive

    def traffic(self) -> Traffic:
        """Bytes on its link so far."""
        return self.link.traffic()

    # Programs.

    def start(self, *command: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> Program:
        """Starts a program with the environment of the cluster.

        Args:
            command: Program and arguments.
            cwd: Working directory; None: ``/``.
            environment: More variables.
        """
        inside = ["env", f"--chdir={cwd or '/'}", *command]
        output = self._folder / f"{self.name}-{next(_programs)}.out"
        program = Program(self.namespaces.enter(*inside), {**self._environment, **(environment or {})}, output)
        self._programs.append(program)
        return program

    def run(
        self,
        *command: str,
        timeout_s: float = 60.0,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end.

        Raises:
            ClusterError: It runs longer than ``timeout_s``, and was killed; the text ends with what it said.
        """
        return self.start(*command, cwd=cwd, environment=environment).wait(timeout_s)

    def python(self, code: str, *arguments: str, timeout_s: float = 60.0) -> str:
        """Runs Python code; its standard output.

        Raises:
            ClusterError: It failed, or did not end in time; the text has what it said.
        """
        done = self.run(sys.executable, "-c", code, *arguments, timeout_s=timeout_s)
        if done.returncode != 0:
            raise ClusterError(f"host {self.name}: a program ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    # Files.

    def give_folder(self, source: Path, name: str | None = None) -> Path:
        """Gives it a folder that no other host has, at a path that does not exist on the others.

        Args:
            source: The files, which are not copied.
            name: Of the folder below ``local``; None: as the source.

        Returns:
            The path.
        """
        path = self.local / (name or source.name)
        self.namespaces.call("mkdir", str(path))
        self.namespaces.call("mount", "--bind", str(source.resolve()), str(path))
        return path

    def outside(self, path: Path) -> Path:
        """Where a path of this host is found from outside, to look at or to write to."""
        return self.namespaces.outside(path)

    # What can happen to it.

    def processes(self, role: Role | None = None, title: str = "") -> list[HostProcess]:
        """Its processes: all, or those of a role whose title contains a text."""
        found = processes_of(self.namespaces.pid) if self.is_alive else []
        return [one for one in found if role in (None, one.role) and title in one.title]

    def kill(self, role: Role, title: str = "") -> list[HostProcess]:
        """Kills processes by their role and title, as ``kill("worker", "GpuWorker")``; waits until they are gone.

        Raises:
            RequestError: There is none; the text lists what there is.
        """
        found = self.processes(role, title)
        if not found:
            there = sorted({one.title[:60] for one in self.processes(None if role == "other" else role)})
            raise RequestError(f"host {self.name} has no {role} {title!r}; it has {', '.join(there) or 'none at all'}")
        self._kill([one.pid for one in found])
        return found

    def kill_inner(self, inner_pid: int) -> None:
        """Kills the process that knows itself by this id (``os.getpid()`` in it); waits until it is gone.

        Raises:
            RequestError: There is none.
        """
        pids = [one.pid for one in self.processes() if one.inner_pid == inner_pid]
        if not pids:
            raise RequestError(f"host {self.name} has no process {inner_pid}")
        self._kill(pids)

    def kill_all(self) -> None:
        """Kills all its processes; the kernel ends their connections, so that others notice at once."""
        self._kill([one.pid for one in self.processes()])

    def power_off(self) -> None:
        """It is gone without a word: no connection is ended, its packets just stop."""
        if self.is_alive:
            self.link.cut()
        self.close()

    def freeze(self) -> None:
        """Stops all its processes, until ``thaw``.

        Raises:
            ClusterError: Some still run after a while.
        """
        until_s = time.monotonic() + _GONE_S
        # Some may start others while they are being stopped.
        while running := [one.pid for one in self.processes() if state_of(one.pid) not in (None, "T", "t", "Z", "X")]:
            if time.monotonic() > until_s:
                raise ClusterError(f"host {self.name}: processes {running} do not stop")
            self._signal(running, signal.SIGSTOP)
            time.sleep(_POLL_S)

    def thaw(self) -> None:
        """Lets them go on."""
        self._signal([one.pid for one in self.processes()], signal.SIGCONT)
        for program in self._programs:
            program.resume()

    def leave(self) -> None:
        """Its Ray node ends as by ``SIGTERM`` from whoever started it, and says so to the head; the host stays.

        Raises:
            RequestError: It has no Ray node.
            ClusterError: It does not end within 30 s.
        """
        if self._ray is None or not self._ray.is_running:
            raise RequestError(f"host {self.name} has no Ray node that could leave")
        self._signal([one.pid for one in self.processes("other", "ray start --block")], signal.SIGTERM)
        self._ray.wait(_LEAVE_S)

    def close(self) -> None:
        """Ends it, and all that runs there. Does nothing the second time."""
        self.namespaces.end()
        for program in self._programs:
            program.kill()
        self.namespaces.close()

    # For the bed.

    def set_environment(self, environment: Mapping[str, str]) -> None:
        """The environment of all programs from now on."""
        self._environment = environment

    def start_ray(self, *command: str) -> None:
        """Starts its Ray node; it may have had one before."""
        self._ray = self.start(*command)

    def require_ray(self) -> None:
        """Looks whether its Ray node is still there.

        Raises:
            ClusterError: It ended; the text has the end of what it said.
        """
        if self._ray is not None and not self._ray.is_running:
            said = (self._ray.output + self._ray.errors)[-3000:]
            raise ClusterError(f"host {self.name}: its Ray node ended: {said}")

    def _mount(self) -> None:
        """What is its own: shared memory, Ray's files, local files. Its hosts file is the bed's."""
        shm_bytes = self.node.pool_bytes + _SHM_SPARE_BYTES
        ray = self._folder / "ray"
        for line in (
            f"mount -t tmpfs -o size={shm_bytes} tmpfs /dev/shm",
            f"mount -t tmpfs -o size={_RAY_BYTES} tmpfs {ray}",
            f"mount -t tmpfs tmpfs {self.local}",
            f"mount --bind {self._folder / 'hosts'} /etc/hosts",
        ):
            self.namespaces.call(*line.split())

    def _kill(self, pids: list[int]) -> None:
        self._signal(pids, signal.SIGKILL)
        wait_until_gone(pids, _GONE_S)

    @staticmethod
    def _signal(pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
