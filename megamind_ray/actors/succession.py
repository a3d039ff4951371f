"""How a planner takes over a fleet: makes itself the one to obey, and finds out what there is (0027)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megamind_ray import __version__
from megamind_ray.actors.boundary import settle, wait_for
from megamind_ray.actors.fencing import Epoch, SupersededError, commanded
from megamind_ray.actors.fleet import Fleet, GpuKey
from megamind_ray.actors.holdings import AgentHoldings, WorkerHoldings
from megamind_ray.actors.journal import KeptJournal, Snapshot, unpickled
from megamind_ray.actors.spawner import Spawner
from megamind_ray.actors.transfer import Transfer
from megamind_ray.core.ids import LoadId, NodeId
from megamind_ray.errors import MegamindError, RequestError

__all__ = ["Estate", "free_strays", "take_over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estate:
    """What a planner finds.

    Attributes:
        epoch: Its own, from now on.
        is_new: There was nobody: the fleet begins.
        agents: Handle and answer by node.
        workers: Handle and answer by GPU.
        snapshot: The newest that an agent has; None where there is none.
        transfer: Of the load under way; None where there is none, or nobody has its plan any more.
    """

    epoch: Epoch
    is_new: bool
    agents: Mapping[NodeId, tuple[Any, AgentHoldings]] = field(default_factory=dict)
    workers: Mapping[GpuKey, tuple[Any, WorkerHoldings]] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    transfer: Transfer | None = None

    def adopted_by(self, fleet: Fleet) -> None:
        """The actors become a fleet's."""
        fleet.adopt(
            {node: (handle, held.facts) for node, (handle, held) in self.agents.items()},
            {key: (handle, held.facts) for key, (handle, held) in self.workers.items()},
        )


def take_over(spawner: Spawner, fleet: str, planner: str, *, call_s: float) -> Estate:
    """Takes command of all actors of a fleet that answer, and ends those that do not.

    Args:
        spawner: Knows them.
        fleet: Its name.
        planner: What the planner calls itself.
        call_s: Longest wait for an answer.

    Raises:
        RequestError: They are of another release.
        SupersededError: Another planner takes over at the same time, and its orders count.
    """
    members = spawner.members()
    what = f"fleet {fleet!r}: taking over its {len(members)} agents and workers"
    heard = settle([handle.epoch.remote() for _, handle in members], timeout_s=call_s, what=what)
    latest = max((one for one in heard if isinstance(one, Epoch)), default=Epoch())
    epoch = Epoch(latest.number + 1, planner)
    spawner.take_command(epoch)
    orders = [(name, commanded(handle, epoch)) for name, handle in members]
    agents: dict[NodeId, tuple[Any, AgentHoldings]] = {}
    workers: dict[GpuKey, tuple[Any, WorkerHoldings]] = {}
    answers = settle([handle.serve.remote() for _, handle in orders], timeout_s=call_s, what=what)
    for (_, handle), held in zip(orders, answers, strict=True):
        match held:
            case SupersededError():
                raise held
            case AgentHoldings() | WorkerHoldings() if held.release != __version__:
                raise RequestError(
                    f"fleet {fleet!r} runs megamind-ray {held.release}, this is {__version__}; use the same release, "
                    f"or end the fleet with `megamind down --fleet {fleet}` and start it anew"
                )
            case AgentHoldings():
                agents[held.facts.node] = handle, held
            case WorkerHoldings():
                workers[held.facts.node, held.facts.gpu] = handle, held
            case _:
                spawner.kill(handle)
    kept = _newest(agents, call_s=call_s, what=what)
    snapshot = None if kept.snapshot is None else unpickled(Snapshot, kept.snapshot)
    abandoned = frozenset[str]().union(*(held.abandoned for _, held in agents.values()))
    if snapshot is not None and snapshot.load is not None and snapshot.load.ticket in abandoned:
        snapshot = replace(snapshot, load=None)
    return Estate(
        epoch=epoch,
        is_new=not members,
        agents=agents,
        workers=workers,
        snapshot=snapshot,
        transfer=None if kept.transfer is None else unpickled(Transfer, kept.transfer),
    )


def free_strays(estate: Estate, known: frozenset[LoadId], *, call_s: float, close_s: float) -> None:
    """Frees what nobody has in their books: a model that was being unloaded, a load whose plan is lost.

    Args:
        estate: What there is.
        known: Loads that are under way, or became models.
        call_s: Longest wait for an answer.
        close_s: Longest wait for user code that holds tensors.
    """
    refs = []
    for agent, held in estate.agents.values():
        for load in {*held.loads, *held.kept_bytes} - known:
            refs += [agent.close_load.remote(load, False), agent.unload.remote(load)]
    for worker, has in estate.workers.values():
        for load in set(has.ranks) - known:
            refs += [worker.abort.remote(load), worker.unload.remote(load)]
    settle(refs, timeout_s=call_s + close_s, what="freeing what nobody knows of")


def _newest(agents: Mapping[NodeId, tuple[Any, AgentHoldings]], *, call_s: float, what: str) -> KeptJournal:
    """The newest copy of the journal, from somebody who has the plan of the load under way if anybody does."""
    ranked = sorted(agents.values(), key=lambda one: (one[1].stamp, one[1].has_transfer), reverse=True)
    for handle, held in ranked:
        if held.stamp != ranked[0][1].stamp:
            break
        try:
            kept: KeptJournal = wait_for(handle.kept_journal.remote(), timeout_s=call_s, what=what)
        except MegamindError:
            continue  # it answered a moment ago; the next one has the same
        if kept.load is None or kept.transfer is not None:
            return kept
        return _with_transfer(kept, [one for one, _ in ranked], call_s=call_s, what=what)
    return KeptJournal()


def _with_transfer(kept: KeptJournal, agents: list[Any], *, call_s: float, what: str) -> KeptJournal:
    """Whoever has an older snapshot of the same load may have its plan."""
    for answer in settle([agent.kept_journal.remote() for agent in agents], timeout_s=call_s, what=what):
        if isinstance(answer, KeptJournal) and answer.load == kept.load and answer.transfer is not None:
            return KeptJournal(stamp=kept.stamp, snapshot=kept.snapshot, load=kept.load, transfer=answer.transfer)
    return kept
