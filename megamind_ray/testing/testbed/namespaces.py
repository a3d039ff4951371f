"""The namespaces of one host, which live as long as the first process in them, and that as long as ours.

Network, mounts, processes, host name and System V IPC are the host's own. Its first process reads a pipe that this
process holds: when we end, in whatever way, it ends, the kernel kills every process of the host, and with the last of
them go interfaces, links, queues and mounts. Nothing has a name outside that somebody would have to remove.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from megamind_ray.errors import ClusterError
from megamind_ray.testing.testbed.leavings import record_process

__all__ = ["Namespaces", "call"]

_BOUND_S: Final = 20.0
# The first process: says its id out there (its /proc is still the old one), then waits for orphans and its end.
_INIT: Final = """
import os, signal, socket, sys
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, reap)
socket.sethostname(sys.argv[1])
print(os.readlink("/proc/self"), flush=True)
while os.read(0, 4096):
    pass
"""
# IPv6 would put packets of its own on the links that are counted.
_SETUP: Final = """
set -e
mount -t proc proc /proc
ip link set lo up
for setting in /proc/sys/net/ipv6/conf/*/disable_ipv6; do
    [ ! -e "$setting" ] || echo 1 > "$setting"
done
"""


def call(command: Sequence[str], *, what: str, text: str | None = None) -> str:
    """Runs a short command to its end; its standard output.

    Args:
        command: Program and arguments.
        what: What it is for, for the error message.
        text: Its standard input.

    Raises:
        ClusterError: It failed, or did not end in time.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_BOUND_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{what}: {' '.join(command)} took more than {_BOUND_S:g} s") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise ClusterError(f"{what}: {' '.join(command)} failed with {done.returncode}: {said}")
    return done.stdout


class Namespaces:
    """Namespaces with one process in them, which does nothing.

    Attributes:
        name: Host name inside.
        pid: Of that process, as it is seen from outside.

    Args:
        name: Host name.
        folder: Of the bed: what has to be ended when the bed cannot do so itself is noted there.
    """

    def __init__(self, name: str, folder: Path) -> None:
        """Makes them; the network has a loopback interface that is up.

        Raises:
            ClusterError: The kernel refuses.
        """
        self.name = name
        command = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        command += [sys.executable, "-I", "-S", "-c", _INIT, name]
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C is for the bed, which ends its hosts in order.
        self._keeper = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self._keeper.stdout is not None
        assert self._keeper.stderr is not None
        ready, _, _ = select.select([self._keeper.stdout], [], [], _BOUND_S)
        line = self._keeper.stdout.readline() if ready else b""
        if not line:
            self._keeper.kill()
            said = self._keeper.stderr.read().decode(errors="replace").strip()
            self.close()
            raise ClusterError(f"host {name}: no namespaces ({said}); they need root on Linux")
        self.pid = int(line)
        record_process(folder, self.pid)
        try:
            self.call("sh", "-c", _SETUP)
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._keeper.poll() is None

    def enter(self, *command: str) -> list[str]:
        """A command that runs another one inside, as a child of the first process there."""
        flags = ("--net", "--mount", "--uts", "--ipc", "--pid")
        return ["nsenter", f"--target={self.pid}", *flags, "--", *command]

    def call(self, *command: str) -> str:
        """Runs a short command inside; its standard output.

        Raises:
            ClusterError: It failed, or did not end in time.
        """
        return call(self.enter(*command), what=f"host {self.name}")

    def network(self, lines: Sequence[str], *, program: str = "ip") -> None:
        """Runs lines of ``ip`` or ``tc`` in the network of these namespaces.

        Raises:
            ClusterError: One failed.
        """
        command = ["nsenter", f"--target={self.pid}", "--net", "--", program, "-batch", "-"]
        call(command, what=f"host {self.name}: {'; '.join(lines)}", text="\n".join(lines) + "\n")

    def outside(self, path: Path) -> Path:
        """Where a path of the inside is found from outside; through it files are put there and looked at."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def interfaces(self) -> dict[str, tuple[int, int]]:
        """Bytes received and sent by interface."""
        found = {}
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()[2:]:
            name, _, fields = line.partition(":")
            numbers = fields.split()
            found[name.strip()] = (int(numbers[0]), int(numbers[8]))
        return found

    def end(self) -> None:
        """Has the kernel kill all that runs inside, without waiting for it."""
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()

    def close(self) -> None:
        """Ends all that runs inside, and with it the namespaces. Does nothing the second time.

        The kernel ends them when each process of them was waited for; what entered from outside is waited for there.
        """
        self.end()
        keeper = self._keeper
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        try:
            keeper.wait(_BOUND_S)
        except subprocess.TimeoutExpired:
            keeper.send_signal(signal.SIGKILL)  # its child goes with it
            keeper.wait(_BOUND_S)
        finally:
            keeper.stdout.close()
            keeper.stderr.close()
