"""Processes of hosts, as /proc shows them: a host's own are those of its PID namespace."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from megamind_ray.errors import ClusterError

__all__ = ["HostProcess", "Role", "group_of", "processes_of", "started", "state_of", "wait_until_gone"]

Role = Literal["raylet", "gcs", "worker", "other"]
_PROC: Final = Path("/proc")
_INNER_PID: Final = re.compile(r"^NSpid:.*\s(\d+)$", re.MULTILINE)
_POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """A process of a host.

    Attributes:
        pid: Its id out here, for ``os.kill``.
        inner_pid: What ``os.getpid()`` says in it.
        role: ``raylet``, ``gcs``, ``worker`` (of Ray, with an actor or task or idle), or ``other``.
        title: Its command line; of a worker what Ray makes of it, as ``ray::GpuWorker`` or ``ray::IDLE``.
    """

    pid: int
    inner_pid: int
    role: Role
    title: str


def processes_of(init_pid: int) -> list[HostProcess]:
    """The living processes of the PID namespace that a process is the first of, itself left out."""
    space = _namespace(init_pid)
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == init_pid:
            continue
        pid = int(entry.name)
        if space is None or _namespace(pid) != space:
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            inner = _INNER_PID.search((entry / "status").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
        # A zombie has no command line.
        if words[0] and inner:
            title = b" ".join(words).decode(errors="replace").strip()
            found.append(HostProcess(pid=pid, inner_pid=int(inner[1]), role=_role(title), title=title))
    return sorted(found, key=lambda process: process.inner_pid)


def group_of(leader: int) -> list[int]:
    """The processes of a process group, the leader's own id included if it lives."""
    found = []
    for entry in _PROC.iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdigit() else None
        if fields is not None and fields[0] not in "ZX" and int(fields[2]) == leader:
            found.append(int(entry.name))
    return found


def started(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None if there is none."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def state_of(pid: int) -> str | None:
    """The kernel's letter for what a process does, ``T`` where it is stopped; None if there is none."""
    fields = _stat(pid)
    return None if fields is None else fields[0]


def wait_until_gone(pids: Iterable[int], timeout_s: float) -> None:
    """Waits until none of the processes runs any more; one that nobody has waited for counts as gone.

    Raises:
        ClusterError: Some are still there; the text has their ids.
    """
    until_s = time.monotonic() + timeout_s
    left = set(pids)
    while left:
        left = {pid for pid in left if started(pid) is not None}
        if left and time.monotonic() > until_s:
            raise ClusterError(f"processes {sorted(left)} are still there {timeout_s:g} s after they were killed")
        if left:
            time.sleep(_POLL_S)


def _stat(pid: int) -> list[str] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _namespace(pid: int) -> Path | None:
    try:
        return (_PROC / str(pid) / "ns" / "pid").readlink()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # not even root may look at every process
        return None


def _role(title: str) -> Role:
    if title.startswith("ray::"):
        return "worker"
    name = title.split(" ", 1)[0].rpartition("/")[2]
    return "raylet" if name == "raylet" else "gcs" if name == "gcs_server" else "other"
