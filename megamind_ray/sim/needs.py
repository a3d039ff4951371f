"""What a plan needs of each resource, however it is executed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from megamind_ray.planning.cost import Resource
from megamind_ray.sim.shares import FloatArray
from megamind_ray.sim.work import Unit, Work
from megamind_ray.sim.world import World

__all__ = ["Bound", "plan_bound", "units_needed"]

_Key = tuple[str | int, ...]


def units_needed(world: World) -> FloatArray:
    """Units of each resource that every execution of the plan takes."""
    needed = np.zeros(len(world.model.resources))
    nbytes: defaultdict[_Key, int] = defaultdict(int)
    for unit in world.work.units:
        _count(unit, world.work, nbytes, is_referenced=world.is_referenced)
    for key, size in nbytes.items():
        for resource, units in world.step(*key).uses:
            needed[resource] += units * size
    return needed


def _count(unit: Unit, work: Work, nbytes: defaultdict[_Key, int], *, is_referenced: bool) -> None:
    nbytes["read", unit.node] += unit.nbytes
    if is_referenced:
        nbytes["verify", unit.node] += unit.nbytes
    for block in unit.blocks:
        if unit.rank is not None:
            nbytes["place", unit.rank] += block.nbytes
            continue
        for run_bytes, size in block.cuts:
            nbytes["cut", unit.node, run_bytes] += size
        for rank, size in block.bytes_of.items():
            nbytes["copy", rank] += size
        for node in {work.node_of_rank[rank] for rank in block.bytes_of} - {unit.node}:
            nbytes["wire", unit.node, node] += block.nbytes
            nbytes["put", node] += block.nbytes


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time that anything can take.

    Attributes:
        seconds: That time.
        resource: What it is the time of; None where nothing is moved.
    """

    seconds: float
    resource: Resource | None


def plan_bound(world: World) -> Bound:
    """The longest time that any one resource needs for its part of the plan."""
    resources = world.model.resources
    seconds = units_needed(world) / np.array([resource.capacity for resource in resources])
    if not seconds.any():
        return Bound(0.0, None)
    return Bound(float(seconds.max()), resources[int(seconds.argmax())])
