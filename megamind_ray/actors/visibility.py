"""Which nodes can read the files of a checkpoint: a path may lead to them on one node alone (docs/design/0023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megamind_ray.actors.boundary import settle
from megamind_ray.config import Config
from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.tracks import short_node
from megamind_ray.errors import RequestError, listed, masked

__all__ = ["Visibility", "look_around"]


@dataclass(frozen=True, slots=True)
class Visibility:
    """Who can read a checkpoint.

    Attributes:
        readers: Those nodes; None where all can.
        notes: What the report says of it.
    """

    readers: frozenset[NodeId] | None = None
    notes: tuple[str, ...] = ()


def look_around(agents: Mapping[NodeId, Any], manifest: Manifest, config: Config) -> Visibility:
    """Asks every node's agent for the files of a checkpoint that lies on a path.

    An agent that does not answer counts as one that cannot read them: others do, and if it is lost the load finds out.

    Args:
        agents: Handle by node.
        manifest: The checkpoint, as the planner's node has it.
        config: Settings of the load.

    Raises:
        RequestError: No node with GPUs can read it.
    """
    if config.io.is_remote(manifest.root) or len(agents) < 2:
        return Visibility()
    answers = settle(
        [agent.lacks.remote(manifest.root, manifest.files) for agent in agents.values()],
        timeout_s=config.deadlines.call_s,
        what=f"asking {len(agents)} node agents for {masked(manifest.uri)}",
    )
    lacking = {node: str(answer) for node, answer in zip(agents, answers, strict=True) if answer != ""}
    if not lacking:
        return Visibility()
    if len(lacking) == len(agents):
        if config.io.mirrors:  # which each of them asks in place of the checkpoint's own files
            return Visibility()
        node, reason = next(iter(lacking.items()))
        raise RequestError(
            f"{masked(manifest.uri)}: none of {len(agents)} nodes with GPUs can read it (node {short_node(node)}: "
            f"{reason}); put it where one of them can, or on storage that all reach"
        )
    readers = frozenset(agents.keys() - lacking.keys())
    names = listed(sorted(map(short_node, readers)))
    return Visibility(readers, (f"{len(lacking)} of {len(agents)} nodes lack the files: all is read by {names}",))
