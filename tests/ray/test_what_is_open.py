"""A local fleet asks for its token, opens no port of its own to the network, and has no dashboard."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import ray

import megamind_ray as mm

BOUND_S = 90.0
_JOIN = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False); print(len(ray.nodes()))"
# With which Ray names the processes of our actors.
OURS = ("ray::Planner", "ray::NodeAgent", "ray::GpuWorker", "ray::Nursery")


def join(variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Another process that asks the cluster for its nodes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    address = ray.get_runtime_context().gcs_address
    return subprocess.run(
        [sys.executable, "-c", _JOIN, address],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )


def test_who_has_the_token_comes_in_and_others_do_not(cluster: mm.Cluster) -> None:
    assert cluster.models() == []
    assert join({"RAY_AUTH_MODE": "token"}).returncode == 0, "the token of this user's file"
    assert join({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}).returncode != 0
    assert join({"RAY_AUTH_MODE": "disabled"}).returncode != 0


def descendants() -> dict[int, str]:
    """Processes that this one started, and those that they did: pid -> title."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, title = (folder / "stat").read_text(), (folder / "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
        titles[int(folder.name)] = title.replace(b"\0", b" ").decode(errors="replace")
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: titles[pid] for pid in found - {os.getpid()}}


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss of iproute2")
def test_no_actor_of_ours_listens_beyond_what_ray_opens_for_it(cluster: mm.Cluster) -> None:
    assert cluster.models() == []
    ours = {pid for pid, title in descendants().items() if title.startswith(OURS)}
    assert ours
    lines = subprocess.run(["ss", "-lntupH"], capture_output=True, text=True, timeout=BOUND_S, check=True).stdout
    sockets: dict[int, list[str]] = {pid: [] for pid in ours}
    for line in lines.splitlines():
        for pid in {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & ours:
            sockets[pid].append(f"{line.split()[0]} {line.split()[4]}")
    for pid, opened in sockets.items():
        assert len(opened) == 1, (pid, opened)
        assert opened[0].startswith("tcp "), "Ray's own, one for each process, which asks for the token"


def test_there_is_no_dashboard(cluster: mm.Cluster) -> None:
    assert cluster.models() == []
    from ray._private.worker import _global_node  # no public call tells its address after ray.init

    assert not _global_node.address_info["webui_url"]
