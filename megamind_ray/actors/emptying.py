"""Empties a node that leaves: its models, the blocks that it alone keeps, at last the fleet's actors on it (0028)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megamind_ray.actors.boundary import settle
from megamind_ray.actors.catalogue import Catalogue
from megamind_ray.actors.evacuating import carry_out
from megamind_ray.actors.fleet import Fleet
from megamind_ray.actors.kept_blocks import Holdings
from megamind_ray.actors.pool_check import backed_bytes
from megamind_ray.config import Config
from megamind_ray.core.departure import DrainReport
from megamind_ray.core.evacuation import Evacuation, LastCopy, last_copies
from megamind_ray.core.ids import ModelName, NodeId
from megamind_ray.core.node_names import NodeNames
from megamind_ray.core.progress import Progress
from megamind_ray.errors import CapacityError, ClusterError, RequestError, listed
from megamind_ray.planning import keep_budget_bytes
from megamind_ray.units import format_bytes

__all__ = ["Emptying"]


class Emptying:
    """One node. ``run`` is called once, by whoever may change the fleet; ``progress`` from any thread.

    Args:
        names: What the node is called.
        fleet: Whose it is.
        catalogue: What is loaded.
        config: Deadlines, and what pools take.
        force: Unload models with ranks there, and give up what has no room elsewhere.
    """

    def __init__(self, names: NodeNames, fleet: Fleet, catalogue: Catalogue, config: Config, *, force: bool) -> None:
        self._names, self._node = names, names.node
        self._fleet, self._catalogue, self._config = fleet, catalogue, config
        self._force = force
        self._evacuation = Evacuation([], {})

    @property
    def progress(self) -> Progress:
        """Bytes that are safe, of those that the node alone kept."""
        evacuation = self._evacuation
        return Progress(phase="transfer", bytes_done=evacuation.safe_bytes, bytes_total=evacuation.total_bytes)

    def run(self, look: Callable[[], None]) -> DrainReport:
        """Does all of it; times are left to the caller.

        Args:
            look: Called several times a second until nothing can be called off any more; what it raises ends it.

        Raises:
            RequestError: Models have ranks there.
            CapacityError: What it alone keeps has no room elsewhere.
            ClusterError: It was lost before all was safe.
        """
        look()
        self._fleet.refresh()
        unloaded, notes = self._unload()
        evacuation = self._evacuation = Evacuation(copies := self._last_copies(), self._rooms() if copies else {})
        if not self._force:
            self._require_room()
        if not evacuation.is_done:
            self._copy(look)
        if not self._force:
            self._require_nothing_lost()
        look()
        self._fleet.end_node(self._node)
        given_up = [*evacuation.homeless, *evacuation.lost]
        return DrainReport(
            fleet=self._fleet.name,
            node=self._node,
            address=self._names.address,
            copied_blocks=sum(map(len, evacuation.safe.values())),
            copied_bytes=evacuation.safe_bytes,
            holders={home: _size(taken) for home, taken in sorted(evacuation.safe.items())},
            lost_blocks=len(given_up),
            lost_bytes=_size(given_up),
            unloaded=unloaded,
            notes=notes,
        )

    def _unload(self) -> tuple[tuple[ModelName, ...], tuple[str, ...]]:
        """Models with ranks there: without ``force`` nobody unloads them but their owners."""
        names = self._catalogue.on_node(self._node)
        if names and not self._force:
            which = listed([repr(str(name)) for name in names])
            raise RequestError(
                f"node {self._names}: it has ranks of {which}; unload what has ranks there (`megamind unload NAME`), "
                "if need be after a load under another name, which goes to other nodes by now; then drain the node "
                "once more. --force unloads; --cancel lets loads use the node again"
            )
        notes = []
        for name in names:
            try:
                self._catalogue.remove(name)
            except RequestError as error:  # it is unloaded all the same
                notes.append(error.message)
        return tuple(names), tuple(notes)

    def _last_copies(self) -> list[LastCopy]:
        """What the node alone keeps of what is loaded."""
        agents = dict(self._fleet.agents)
        if self._node not in agents:  # nothing of the fleet was ever there, or it is gone by now
            return []
        answers = self._ask(agents)
        if not isinstance(answers[self._node], Holdings):
            raise ClusterError(f"node {self._names} is lost, and with it what it alone kept: {answers[self._node]}")
        held = {node: answer.blocks for node, answer in answers.items() if isinstance(answer, Holdings)}
        staying = held.keys() - self._fleet.leaving
        copies: list[LastCopy] = []
        for model in self._catalogue:
            load = model.info.load
            of_load = {node: blocks.get(load, ()) for node, blocks in held.items()}
            homes = {rank: key[0] for rank, (key, _) in model.workers.items()}
            copies += last_copies(load, of_load, homes, leaving=self._node, staying=staying)
        return copies

    def _ask(self, agents: Mapping[NodeId, Any]) -> dict[NodeId, Any]:
        answers = settle(
            [agent.holdings.remote() for agent in agents.values()],
            timeout_s=self._config.deadlines.call_s,
            what=f"asking {len(agents)} node agents what they keep",
        )
        return dict(zip(agents, answers, strict=True))

    def _rooms(self) -> dict[NodeId, int]:
        """By node that stays, what its pool takes of blocks that are kept."""
        facts, taken = self._fleet.agent_facts, self._catalogue.with_taken(self._fleet.topology())
        return {
            node.id: min(keep_budget_bytes(node, self._config), backed_bytes(facts[node.id]))
            for node in taken.nodes
            if not node.is_leaving
        }

    def _copy(self, look: Callable[[], None]) -> None:
        fleet = self._fleet
        agents = {node: agent for node, agent in fleet.agents.items() if node not in fleet.leaving}
        carry_out(
            self._evacuation,
            fleet.agents[self._node],
            agents,
            self._config.deadlines,
            look=look,
            on_kept=lambda node, load, kept: self._catalogue.now_keeps(load, node, kept.num_bytes),
            on_lost=lambda node: fleet.end_agent(node, agents[node]),
        )

    def _require_room(self) -> None:
        if not self._evacuation.homeless:
            return
        total, homeless = self._evacuation.total_bytes, _size(self._evacuation.homeless)
        raise CapacityError(
            f"node {self._names}: it alone keeps {format_bytes(total)} of blocks, and the other nodes' pools have room "
            f"for {format_bytes(total - homeless)} of them, {format_bytes(homeless)} too little; unload a model, "
            "add a node, or raise pool.keep_fraction. --force gives up what has no room: the next load of those "
            "checkpoints reads storage. Until then the node stays marked as leaving; --cancel takes that back",
            where="pools of the other nodes",
            needed_bytes=total,
            free_bytes=total - homeless,
        )

    def _require_nothing_lost(self) -> None:
        lost = self._evacuation.lost
        if lost:
            raise ClusterError(
                f"node {self._names} was lost while it was drained, and with it {format_bytes(_size(lost))} of blocks "
                f"that it alone kept, of loads {listed(sorted({copy.load for copy in lost}))}; the next load of those "
                "checkpoints reads storage"
            )
        self._require_room()


def _size(copies: Sequence[LastCopy]) -> int:
    return sum(copy.nbytes for copy in copies)
