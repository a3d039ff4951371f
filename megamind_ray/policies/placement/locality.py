"""How close a placement keeps ranks that talk to each other, as something that another placement can be held to.

Where weights are read faster by nodes that talk more slowly later, running wins: a load takes seconds and happens once
(docs/design/0020). So placements are compared, improved and bounded among those that are at least as close-knit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamind_ray.core.parallel import Parallel
from megamind_ray.policies.placement.domains import Level, Slot, closeness, gangs

__all__ = ["Group", "groups_of", "is_close", "is_kept"]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that stay together.

    Attributes:
        ranks: The ranks, ascending.
        level: How far apart they may be.
        num_nodes: Over how many nodes they may lie.
    """

    ranks: tuple[int, ...]
    level: Level
    num_nodes: int


def groups_of(parallel: Parallel, taken: Sequence[Slot]) -> tuple[Group, ...]:
    """What a placement keeps together: the mesh and expert-parallel stages on a node, tp gangs as close as they are.

    Args:
        parallel: The mesh.
        taken: By rank, its slot.
    """
    tp = parallel.tp
    found = [_group(tuple(range(first, first + tp)), taken) for first in range(0, parallel.world, tp)]
    larger = [tuple(parallel.ranks), *(gangs(parallel) if parallel.ep > 1 else ())]
    for ranks in dict.fromkeys(larger):
        group = _group(ranks, taken)
        if group.num_nodes == 1 and len(ranks) > tp:
            found.append(Group(ranks, Level.NODE, 1))
    return tuple(found)


def is_kept(groups: Sequence[Group], taken: Sequence[Slot]) -> bool:
    """Whether a placement keeps all groups at least so close."""
    return all(is_close(group, [taken[rank] for rank in group.ranks]) for group in groups)


def is_close(group: Group, here: Sequence[Slot]) -> bool:
    """Whether slots, of all the group's ranks or of some, are as close as the group is kept."""
    if group.level >= Level.RACK and len({slot.node_index for slot in here}) > group.num_nodes:
        return False
    return closeness(here) <= group.level


def _group(ranks: tuple[int, ...], taken: Sequence[Slot]) -> Group:
    here = [taken[rank] for rank in ranks]
    # A rank alone talks to nobody over NVLink.
    level = Level.NODE if len(ranks) == 1 else closeness(here)
    return Group(ranks, level, len({slot.node_index for slot in here}))
