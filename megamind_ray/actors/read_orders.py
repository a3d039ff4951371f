"""Who reads what beside the plan: reads done again, and those that slow nodes give away (docs/design/0026, 0029)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from megamind_ray.actors.load_agents import LoadAgents
from megamind_ray.actors.transfer import Transfer
from megamind_ray.config import StragglerConfig
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.ids import NodeId
from megamind_ray.core.stragglers import StragglerWatch

__all__ = ["ReadOrders"]


class ReadOrders:
    """Gives orders about reading to the agents of a load, and looks whether one of them is slow. Used by one thread.

    Args:
        agents: Of the load.
        config: When a node is slow.
        clock: Monotonic.
    """

    def __init__(self, agents: LoadAgents, config: StragglerConfig, *, clock: Callable[[], float]) -> None:
        self._agents, self._clock = agents, clock
        self._watch = StragglerWatch(config)

    def look(self) -> list[ev.Event]:
        """Whether a node holds the load up, by what all last said."""
        slow = self._watch.look(self._clock(), self._agents.reads, heard=self._agents.heard)
        return [] if slow is None else [ev.ReaderSlow(node=slow.node, paces=slow.paces)]

    def again(self, order: ins.ReadAgain, transfer: Transfer, homes: Collection[NodeId]) -> list[ev.Event]:
        """Has extents read once more; ``homes`` are the nodes of the ranks that they are for."""
        load, node, ranks = transfer.load, order.node, order.ranks
        relay = dict.fromkeys(sorted(set(homes) - {node}), lambda agent: agent.relay_from.remote(load, (node,)))
        lost = self._agents.tell(relay, "relaying")
        fragment = transfer.agent_program(node, extents=order.extents, ranks=ranks)
        return [
            *lost,
            *self._agents.tell({node: lambda agent: agent.read_again.remote(fragment, ranks)}, "reading again"),
        ]

    def take_back(self, order: ins.TakeBack) -> list[ev.Event]:
        """Asks a node for what it has not begun; that it is lost, or what it will not read any more."""
        extents, lost = self._agents.take_back(order.node, order.keep_bytes)
        return lost or [ev.ReadsTakenBack(node=order.node, extents=extents)]

    def instead(
        self, order: ins.ReadInstead, transfer: Transfer, sources: Mapping[NodeId, tuple[NodeId, ...]]
    ) -> list[ev.Event]:
        """Has extents read by another node than planned, and their blocks handed on along the line; who was lost.

        Args:
            order: What the load machine said.
            transfer: With these readers.
            sources: By node, from whom it takes their blocks.
        """
        load = transfer.load

        def relay(peers: tuple[NodeId, ...]) -> Callable[[Any], Any]:
            return lambda agent: agent.relay_from.remote(load, peers, True)

        lost = self._agents.tell({node: relay(peers) for node, peers in sources.items()}, "relaying")
        fragment = transfer.agent_program(order.node, extents=order.extents)
        read = {order.node: lambda agent: agent.read_instead.remote(fragment)}
        return [*lost, *self._agents.tell(read, "reading instead of another node")]
