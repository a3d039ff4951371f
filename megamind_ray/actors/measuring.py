"""Measuring the nodes of a running fleet, each by its own agent, all at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any, Final

import ray

from megamind_ray.actors.boundary import settle, wait_for, wait_for_all
from megamind_ray.actors.dataplane import RayObjectStore
from megamind_ray.actors.names import NAMESPACE, agent_name
from megamind_ray.actors.runtime import fleet_actors
from megamind_ray.actors.wire_choice import measure_pair, pairs_to_measure
from megamind_ray.config import Config
from megamind_ray.core.exchange import RANK_BATCH
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Topology
from megamind_ray.core.wires import WireName
from megamind_ray.engine.measure import MeasureRequest, NodeMeasurement
from megamind_ray.engine.measure_figures import Figure
from megamind_ray.errors import ClusterError

__all__ = ["measure_fleet", "measure_fleet_wires"]

_CALLS: Final = 20
_BATCHES: Final = 5


def measure_fleet(fleet: str, request: MeasureRequest, config: Config) -> dict[NodeId, NodeMeasurement]:
    """Has every node of a fleet measured.

    A load that runs meanwhile spoils the figures, and they slow it down. Nodes that share a disk measure their part.

    Args:
        fleet: Its name; this process is connected to its cluster.
        request: What each node measures; the folder is one on each of them.
        config: Deadlines.

    Raises:
        RequestError: A folder cannot be written to, or a node is being measured already.
        CapacityError: A temporary file does not fit.
        ClusterError: A node did not answer in time.
    """
    agents = _running_agents(fleet)
    if not agents:
        raise ClusterError(f"fleet {fleet!r}: no node agent runs; load a model, or look at `ray status`")
    calls = {node: _call_figures(agent, config) for node, agent in agents.items()}
    asked = [agent.measure.remote(request) for agent in agents.values()]
    try:
        # A figure that is begun is taken to its end, and the first puts of a pool are slow.
        found: list[NodeMeasurement] = wait_for_all(
            asked,
            timeout_s=2 * request.seconds + config.deadlines.call_s,
            what=f"measuring {len(agents)} nodes of fleet {fleet!r}",
        )
    except BaseException:
        _stop(agents, asked, config)
        raise
    return {node: _with_calls(one, calls[node]) for node, one in zip(agents, found, strict=True)}


def measure_fleet_wires(fleet: str, topology: Topology, config: Config) -> tuple[Mapping[WireName, float], str]:
    """Has some pairs of nodes of a fleet measure what each wire brings from one to the other.

    Args:
        fleet: Its name; this process is connected to its cluster.
        topology: Of the fleet.
        config: Size of blocks, bounds, deadlines.

    Returns:
        Bytes per second by wire, of the slowest pair; and what there is to say about one that is missing.

    Raises:
        ClusterError: A node did not answer in time.
    """
    agents = _running_agents(fleet)
    pools = {node.id: node.pool_bytes for node in topology.nodes}
    pairs = [pair for pair in pairs_to_measure(topology) if all(node in agents for node in pair)]
    if not pairs:
        return {}, "wires: not measured, the fleet has one node"
    refs = [agents[node].lacks_nixl.remote(config.wire) for node in dict.fromkeys(itertools.chain(*pairs))]
    lacking = wait_for_all(refs, timeout_s=config.deadlines.call_s, what="asking node agents for NIXL")
    why = next((str(answer) for answer in lacking if answer), "")
    wires: tuple[WireName, ...] = ("ray",) if why else ("ray", "nixl")
    found = [
        measure_pair(agents[source], agents[target], config, pool_bytes=min(pools[source], pools[target]), wires=wires)
        for source, target in pairs
    ]
    return {wire: min(one[wire] for one in found) for wire in wires}, f"wire NIXL: not measured, {why}" if why else ""


def _running_agents(fleet: str) -> dict[NodeId, Any]:
    """Handles by node. Of an agent that was replaced a moment ago the name may still be there."""
    agents: dict[NodeId, Any] = {}
    for name in fleet_actors(fleet):
        parts = name.split("/")
        if len(parts) == 4 and name == agent_name(fleet, NodeId(parts[2]), parts[3]):
            try:
                agents[NodeId(parts[2])] = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:  # it ended between listing and asking
                continue
    return agents


def _call_figures(agent: Any, config: Config) -> tuple[Figure, Figure]:
    """What a call costs that hands one block over, and each further block. One after the other: that is measured."""
    try:
        one, most = (_hand_over_s(agent, num_blocks, config) for num_blocks in (1, RANK_BATCH))
    finally:
        settle(
            [agent.hand.remote(0)], timeout_s=config.deadlines.call_s, what="giving up blocks that were measured with"
        )
    further = tuple(max(0.0, (b - a) / (RANK_BATCH - 1)) for a, b in zip(sorted(one), sorted(most), strict=True))
    return (
        Figure(name="a call that hands over a block", unit="s", samples=one),
        Figure(name="each further block of a call", unit="s", samples=further),
    )


def _hand_over_s(agent: Any, num_blocks: int, config: Config) -> tuple[float, ...]:
    call_s = config.deadlines.call_s
    samples = []
    for _ in range(_BATCHES + 1):
        begin_s = perf_counter()
        for _ in range(_CALLS):
            handles = wait_for(agent.hand.remote(num_blocks), timeout_s=call_s, what="measuring a call")
            RayObjectStore().get(handles, timeout_s=call_s)
        samples.append((perf_counter() - begin_s) / _CALLS)
    # The first calls make the connection, and put the blocks.
    return tuple(samples[1:])


def _with_calls(found: NodeMeasurement, calls: tuple[Figure, Figure]) -> NodeMeasurement:
    host = replace(found.host, call_s=calls[0].value, take_s=calls[1].value)
    return replace(found, host=host, figures=(*found.figures, *calls))


def _stop(agents: Mapping[NodeId, Any], asked: list[Any], config: Config) -> None:
    """Waits, for a while, until all have stopped: what they wrote is gone then."""
    stops = [agent.stop_measuring.remote() for agent in agents.values()]
    settle([*stops, *asked], timeout_s=config.deadlines.close_s, what="stopping to measure")
