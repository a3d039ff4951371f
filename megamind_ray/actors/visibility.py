"""Which nodes can read the files of a checkpoint: a path may lead to them on one node alone (docs/design/0023)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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


class Agents(Protocol):
    """The node agents of a fleet."""

    @property
    def agents(self) -> Mapping[NodeId, Any]:
        """Handle by node."""

    @property
    def here(self) -> NodeId:
        """The planner's own node."""

    @property
    def leaving(self) -> Collection[NodeId]:
        """Nodes that are to leave: they are not asked."""

    def add_agent_here(self) -> NodeId | None:
        """As ``Fleet.add_agent_here``."""


def look_around(fleet: Agents, manifest: Manifest, config: Config) -> Visibility:
    """Asks every node's agent for the files of a checkpoint that lies on a path.

    Where no node with GPUs can read it, the planner's own node is to: it read the manifest there. An agent that does
    not answer counts as one that cannot read them: others do, and if it is lost the load finds out.

    Args:
        fleet: Whose agents.
        manifest: The checkpoint, as the planner's node has it.
        config: Settings of the load.

    Raises:
        RequestError: No node can read it.
        ClusterError: The planner's own node should, and has no agent.
    """
    agents = {node: agent for node, agent in fleet.agents.items() if node not in fleet.leaving}
    if config.io.is_remote(manifest.root) or agents.keys() == {fleet.here}:
        return Visibility()  # the manifest was read there
    lacking = _lacking(agents, manifest, config)
    if not lacking:
        return Visibility()
    if len(lacking) == len(agents):
        if config.io.mirrors:  # which each of them asks in place of the checkpoint's own files
            return Visibility()
        here = fleet.add_agent_here()
        if here is not None:
            agents[here] = fleet.agents[here]
            lacking |= _lacking({here: agents[here]}, manifest, config)
    if len(lacking) == len(agents):
        node, reason = next(iter(lacking.items()))
        raise RequestError(
            f"{masked(manifest.uri)}: none of {len(agents)} nodes can read it (node {short_node(node)}: "
            f"{reason}); put it where one of them can, or on storage that all reach"
        )
    readers = frozenset(agents.keys() - lacking.keys())
    names = listed(sorted(map(short_node, readers)))
    return Visibility(readers, (f"{len(lacking)} of {len(agents)} nodes lack the files: all is read by {names}",))


def _lacking(agents: Mapping[NodeId, Any], manifest: Manifest, config: Config) -> dict[NodeId, str]:
    """By node that cannot read the checkpoint, why."""
    answers = settle(
        [agent.lacks.remote(manifest.root, manifest.files) for agent in agents.values()],
        timeout_s=config.deadlines.call_s,
        what=f"asking {len(agents)} node agents for {masked(manifest.uri)}",
    )
    return {node: str(answer) for node, answer in zip(agents, answers, strict=True) if answer != ""}
