"""What a bed needs of its machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Final

__all__ = ["missing"]

_COMMANDS: Final = ("ip", "tc", "unshare", "nsenter", "mount")
_BOUND_S: Final = 20.0
# What a container without the capability, or a kernel without the module, refuses.
_PROBE: Final = """
set -e
mount -t tmpfs tmpfs /mnt
ip link add name bed type bridge
ip link add name port type veth peer name eth0
ip link set dev port master bed
tc qdisc add dev port root tbf rate 8mbit burst 100000 limit 300000
"""


@cache
def missing(commands: Sequence[str] = _COMMANDS, *, uid: int | None = None, platform: str = sys.platform) -> str | None:
    """Why no bed can be made here; None if one can.

    Args:
        commands: Programs that it calls.
        uid: Of the user; None: of this process.
        platform: As ``sys.platform``.
    """
    if platform != "linux":
        return f"network namespaces need Linux, this is {platform}"
    if (os.geteuid() if uid is None else uid) != 0:
        return "network namespaces need root"
    lacking = [command for command in commands if shutil.which(command) is None]
    if lacking:
        return f"not on PATH: {', '.join(lacking)} (Debian: apt-get install iproute2 util-linux)"
    probe = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", _PROBE]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=_BOUND_S, check=False)
    except subprocess.TimeoutExpired:
        return f"making namespaces took more than {_BOUND_S:g} s"
    if done.returncode != 0:
        return f"the kernel refuses namespaces, bridges or tbf: {' '.join(done.stderr.split())}"
    return None
