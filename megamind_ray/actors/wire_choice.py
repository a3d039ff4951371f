"""The wire of a load: asks the nodes what they have, measures where nothing is known, and keeps that (0030)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Protocol

from megamind_ray.actors.boundary import settle, wait_for
from megamind_ray.actors.messages import LoadRequest
from megamind_ray.actors.nixl_endpoint import NIXL_MISSING, nixl_is_installed
from megamind_ray.actors.node_wires import WireMeasureRequest, WireTimes
from megamind_ray.config import Config
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Topology
from megamind_ray.core.tracks import short_node
from megamind_ray.core.wires import Ceilings, WireChoice, WireName, choose_wire, known_ceilings, with_wire
from megamind_ray.errors import ClusterError, MegamindError
from megamind_ray.units import MIB

__all__ = ["AgentNodes", "Nodes", "WireChooser", "measure_pair", "pairs_to_measure"]

# One after the other, as neighbours of a line share no link: the links of a cluster are alike, as a rule.
_MOST_PAIRS: Final = 2
_POOL_SHARE: Final = 0.125  # of the smaller pool, for the blocks of one wire
_BLOCK_S: Final = 10.0
# A load that moves less than so many times what measuring moves is over before the better wire has paid.
_WORTH: Final = 4


class Nodes(Protocol):
    """The nodes that a load may use."""

    def lacking(self, nodes: Sequence[NodeId], config: Config) -> Mapping[NodeId, str]:
        """By node that cannot use NIXL, why."""

    def measure(self, source: NodeId, target: NodeId, config: Config) -> Mapping[WireName, float]:
        """Bytes per second from one node to another by each wire.

        Raises:
            MegamindError: It could not be measured.
        """


@dataclass(slots=True)
class _Pair:
    """What was measured between two nodes; None: measuring failed, with the reason."""

    rates: Mapping[WireName, float] | None
    problem: str = ""


class WireChooser:
    """Chooses for one load after the other; used by one thread.

    What was measured stays as long as the planner: a pair of nodes is measured once.

    Args:
        nodes: Of the fleet.
        is_installed: Whether NIXL is there, in this process; where not, nodes are not asked.
    """

    def __init__(self, nodes: Nodes, is_installed: Callable[[], bool] = nixl_is_installed) -> None:
        self._nodes = nodes
        self._is_installed = is_installed
        self._pairs: dict[tuple[NodeId, NodeId], _Pair] = {}

    def decide(self, topology: Topology, request: LoadRequest, num_bytes: int) -> tuple[Topology, LoadRequest]:
        """A load's request with its wire settled (``wire.use`` is ``ray`` or ``nixl``), and the topology to plan with.

        Args:
            topology: The fleet, with what a topology file says of its links.
            request: What was asked for.
            num_bytes: Of the checkpoint.

        Raises:
            RequestError: ``wire.use`` is ``nixl``, and a node cannot use it.
        """
        choice = self._choose(topology, request.config, num_bytes)
        config = replace(request.config, wire=replace(request.config.wire, use=choice.wire))
        return with_wire(topology, choice), replace(request, config=config, wire=choice)

    def _choose(self, topology: Topology, config: Config, num_bytes: int) -> WireChoice:
        wire, nodes = config.wire, tuple(node.id for node in topology.nodes)
        known = known_ceilings(topology.links, config.plan.topology or "the topology file")
        if wire.use == "ray":
            return choose_wire("ray", lacking="", ceilings=known, faster=wire.faster)
        if len(nodes) < 2:
            return WireChoice(wire="ray", reason="one node has no other to bring blocks to")
        lacking = self._lacking(nodes, config)
        if lacking or known is not None or wire.use == "nixl":
            return choose_wire(wire.use, lacking=lacking, ceilings=known, faster=wire.faster)
        if num_bytes < _WORTH * wire.measure_bytes:
            return WireChoice(wire="ray", reason="the checkpoint is too small to measure for")
        ceilings, problem = self._measured(topology, config)
        if ceilings is None:
            return WireChoice(wire="ray", reason=f"NIXL could not be measured: {problem}")
        return choose_wire("auto", lacking="", ceilings=ceilings, faster=wire.faster)

    def _lacking(self, nodes: Sequence[NodeId], config: Config) -> str:
        """Why NIXL cannot be used between these nodes, in words."""
        if not self._is_installed():
            return NIXL_MISSING
        found = self._nodes.lacking(nodes, config)
        if not found:
            return ""
        node, why = next(iter(sorted(found.items())))
        return f"{len(found)} of {len(nodes)} nodes cannot use NIXL (node {short_node(node)}: {why})"

    def _measured(self, topology: Topology, config: Config) -> tuple[Ceilings | None, str]:
        """The slowest of each wire over the pairs that count; none where one of them could not be measured."""
        rates: list[Mapping[WireName, float]] = []
        for source, target in pairs_to_measure(topology):
            if (source, target) not in self._pairs:
                try:
                    self._pairs[source, target] = _Pair(self._nodes.measure(source, target, config))
                except MegamindError as error:
                    self._pairs[source, target] = _Pair(None, str(error))
            pair = self._pairs[source, target]
            if pair.rates is None:
                return None, pair.problem
            rates.append(pair.rates)
        return slowest(rates), ""


def slowest(rates: Sequence[Mapping[WireName, float]]) -> Ceilings:
    """Of each wire the slowest of all pairs that were measured."""
    pairs = f"{len(rates)} pair{'s' if len(rates) > 1 else ''} of nodes"
    return Ceilings(
        ray_bytes_per_s=min(rate["ray"] for rate in rates),
        nixl_bytes_per_s=min(rate["nixl"] for rate in rates),
        origin=f"measured between {pairs}",
    )


def pairs_to_measure(topology: Topology) -> list[tuple[NodeId, NodeId]]:
    """Neighbours by rack and address, from the first to the second and so on: some, not all."""
    nodes = sorted(topology.nodes, key=lambda node: (node.rack or "", node.address, node.id))
    return [(one.id, other.id) for one, other in pairwise(nodes)][:_MOST_PAIRS]


def measure_pair(
    source: Any, target: Any, config: Config, *, pool_bytes: int, wires: tuple[WireName, ...] = ("ray", "nixl")
) -> dict[WireName, float]:
    """Bytes per second from one node's agent to another's by each wire.

    Args:
        source: Actor handle of the one that has the blocks.
        target: Actor handle of the one that takes them.
        config: Size of blocks, bounds.
        pool_bytes: Of the smaller pool of the two.
        wires: Which.

    Raises:
        ClusterError: One of them does not answer, or NIXL did not bring every block.
    """
    room = max(1, int(pool_bytes * _POOL_SHARE))
    block_bytes = min(config.io.extent_bytes, config.wire.measure_bytes, max(room // 4, MIB))
    request = WireMeasureRequest(
        wires=wires,
        block_bytes=block_bytes,
        num_blocks=max(1, min(config.wire.measure_bytes, 4 * room) // block_bytes),
        seconds=config.wire.measure_s,
        timeout_s=_BLOCK_S,
    )
    try:
        found: tuple[WireTimes, ...] = wait_for(
            target.measure_wires.remote(source, request, config),
            timeout_s=config.wire.measure_s + 2 * _BLOCK_S + config.deadlines.call_s,
            what="measuring the wires between two nodes",
        )
    finally:
        settle(
            [source.lay_out.remote("ray", 0, 0, config)],
            timeout_s=config.deadlines.call_s,
            what="giving up blocks that a wire was measured with",
        )
    if not all(times.carried for times in found):
        raise ClusterError("NIXL did not bring every block")
    return {times.wire: times.bytes_per_s for times in found}


class AgentNodes:
    """The nodes of a fleet, by their agents."""

    def __init__(self, fleet: _Agents) -> None:
        self._fleet = fleet

    def lacking(self, nodes: Sequence[NodeId], config: Config) -> Mapping[NodeId, str]:
        agents = {node: self._fleet.agents[node] for node in nodes if node in self._fleet.agents}
        answers = settle(
            [agent.lacks_nixl.remote(config.wire) for agent in agents.values()],
            timeout_s=config.deadlines.call_s,
            what=f"asking {len(agents)} node agents for NIXL",
        )
        return {node: str(answer) for node, answer in zip(agents, answers, strict=True) if answer != ""}

    def measure(self, source: NodeId, target: NodeId, config: Config) -> Mapping[WireName, float]:
        facts = self._fleet.agent_facts
        if source not in self._fleet.agents or target not in self._fleet.agents:
            raise ClusterError("a node agent is gone")
        return measure_pair(
            self._fleet.agents[source],
            self._fleet.agents[target],
            config,
            pool_bytes=min(facts[source].pool_bytes, facts[target].pool_bytes),
        )


class _Agents(Protocol):
    @property
    def agents(self) -> Mapping[NodeId, Any]:
        """Handle by node."""

    @property
    def agent_facts(self) -> Mapping[NodeId, Any]:
        """Their latest answers."""
