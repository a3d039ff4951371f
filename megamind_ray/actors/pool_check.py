"""Whether a node's object store has the memory that it claims. Ray does not say: a store larger than its ``/dev/shm``
starts, and its user dies of SIGBUS on the page that does not exist.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from megamind_ray.actors.messages import AgentFacts
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Topology
from megamind_ray.errors import CapacityError
from megamind_ray.units import format_bytes

__all__ = ["PoolFile", "backed_bytes", "check_pool", "find_pool_file", "settled_pool_bytes"]

_SETTLE_S: Final = 2.0  # how long Ray may take to count blocks that were just let go as free
_SETTLE_EVERY_S: Final = 0.1
_NOT_OURS: Final = 0.05  # part of an object store that others may fill before it is worth that wait


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFile:
    """The shared-memory file of an object store.

    Attributes:
        folder: Where it was made.
        size_bytes: Its size; pages get memory on first touch.
        resident_bytes: Pages that have memory.
        folder_bytes: Size of the file system.
        folder_free_bytes: Free there.
    """

    folder: str
    size_bytes: int
    resident_bytes: int
    folder_bytes: int
    folder_free_bytes: int


def find_pool_file(raylet_pid: int) -> PoolFile | None:
    """Finds the object store's file among the open files of the raylet; None where it cannot be seen.

    The raylet unlinks the file at once, so the link in ``/proc`` is the only trace of it.
    """
    for descriptor in _descriptors(raylet_pid):
        try:
            target = str(descriptor.readlink())
            if "plasma" not in target or not target.startswith("/"):
                continue
            status = descriptor.stat()
            folder = str(Path(target.removesuffix(" (deleted)")).parent)
            space = os.statvfs(folder)
        except OSError:  # the descriptor was closed while we looked
            continue
        if status.st_size:
            return PoolFile(
                folder=folder,
                size_bytes=status.st_size,
                resident_bytes=status.st_blocks * 512,
                folder_bytes=space.f_blocks * space.f_frsize,
                folder_free_bytes=space.f_bavail * space.f_frsize,
            )
    return None


def _descriptors(pid: int) -> list[Path]:
    try:
        return sorted(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # no /proc (macOS), or a raylet of another user
        return []


def check_pool(facts: AgentFacts, need_bytes: int) -> None:
    """Refuses a pool that cannot hold what a load will put there.

    Args:
        facts: The node.
        need_bytes: Bytes that the load will have in its pool at a time.

    Raises:
        CapacityError: The file system is smaller than the pool, or too full.
    """
    where = f"{facts.pool_dir} of node {facts.address or facts.node}"
    if not facts.pool_dir_bytes:
        return
    if facts.pool_dir_bytes < facts.pool_bytes:
        raise CapacityError(
            f"{where}: the file system has {format_bytes(facts.pool_dir_bytes)}, Ray's object store on it claims "
            f"{format_bytes(facts.pool_bytes)} and would die of SIGBUS; enlarge it (mount -o remount,size=..., "
            "docker run --shm-size) or start Ray with a smaller --object-store-memory",
            where=where,
            needed_bytes=facts.pool_bytes,
            free_bytes=facts.pool_dir_bytes,
        )
    untouched = max(0, facts.pool_bytes - facts.pool_resident_bytes)
    fresh = min(need_bytes, untouched)
    if facts.pool_dir_free_bytes < fresh:
        raise CapacityError(
            f"{where}: {format_bytes(facts.pool_dir_free_bytes)} are free, this load needs {format_bytes(fresh)} more "
            f"for the pool; remove what else fills {facts.pool_dir} (`df {facts.pool_dir}`)",
            where=where,
            needed_bytes=fresh,
            free_bytes=facts.pool_dir_free_bytes,
        )


def backed_bytes(facts: AgentFacts) -> int:
    """Bytes that may be put into a pool without ``check_pool`` refusing them."""
    if not facts.pool_dir_bytes:
        return facts.pool_bytes
    if facts.pool_dir_bytes < facts.pool_bytes:
        return 0
    untouched = max(0, facts.pool_bytes - facts.pool_resident_bytes)
    return facts.pool_bytes if facts.pool_dir_free_bytes >= untouched else facts.pool_dir_free_bytes


def settled_pool_bytes(
    used_bytes: Callable[[], Mapping[NodeId, int]], topology: Topology, kept: Mapping[NodeId, int]
) -> Mapping[NodeId, int]:
    """What is in each object store, of whomever: with it full, our blocks would push the user's objects to disk.

    Args:
        used_bytes: Asks Ray.
        topology: The nodes.
        kept: What models of ours keep there.
    """
    until_s = monotonic() + _SETTLE_S
    while True:
        used = used_bytes()
        settled = all(
            used.get(node.id, 0) <= kept.get(node.id, 0) + _NOT_OURS * node.pool_bytes for node in topology.nodes
        )
        if settled or monotonic() > until_s:
            return used
        sleep(_SETTLE_EVERY_S)
