"""The node agents of one load: what they are told, how they are, which of them give no sign of life."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import ray

from megamind_ray.actors.boundary import ActorLostError, Watch, settle, wait_for_all
from megamind_ray.actors.fleet import Fleet
from megamind_ray.actors.heartbeat import Listener
from megamind_ray.actors.messages import AgentStatus, Reroute
from megamind_ray.actors.transfer import Transfer
from megamind_ray.config import Config
from megamind_ray.core import events as ev
from megamind_ray.core.exchange import PLANNER_LOOK_S
from megamind_ray.core.ids import ExtentId, Generation, LoadId, NodeId, Rank
from megamind_ray.core.recorder import RecordSettings
from megamind_ray.core.report import Kept
from megamind_ray.core.stragglers import ReadProgress
from megamind_ray.errors import MegamindError

__all__ = ["LoadAgents"]

Key = TypeVar("Key", bound=Hashable)

_GONE: Final = "its node agent is gone"


@dataclass(slots=True)
class _Seen:
    """What is known of a node from its last answer."""

    status: AgentStatus
    num_failures: int = 0


class LoadAgents:
    """Used by one thread. No call waits for a node that gives no sign of life, nor for any longer than its deadline.

    Attributes:
        heard: Nodes that answered when all were last asked.

    Args:
        load: Which.
        fleet: Who does it.
        config: Of the load.
        record: How agents record it.
        clock: Monotonic.
    """

    def __init__(
        self,
        load: LoadId,
        fleet: Fleet,
        config: Config,
        *,
        record: RecordSettings | None,
        clock: Callable[[], float],
    ) -> None:
        self._load, self._fleet, self._config = load, fleet, config
        self._record, self._clock = record, clock
        # The very actors of this load: the fleet may have given a node another one before we notice a loss.
        self._handles: dict[NodeId, Any] = {}
        self._seen: dict[NodeId, _Seen] = {}
        self.heard: set[NodeId] = set()
        self._lost: dict[NodeId, AgentStatus] = {}
        self._listener = Listener(fleet.here_address, silence_s=config.deadlines.silence_s, clock=clock)
        self._watch = Watch[NodeId](
            patience_s=config.deadlines.call_s, what="asking a node agent for its status", clock=clock
        )

    def handle(self, node: NodeId) -> Any | None:
        """Of a node's agent; None where it is gone, which an event says or has said."""
        return self._handles.get(node)

    @property
    def bytes_read(self) -> int:
        """By all nodes, also by those that are lost, as far as is known."""
        return sum(status.bytes_read for status in self._statuses().values())

    @property
    def reads(self) -> dict[NodeId, ReadProgress]:
        """How far all who have a part in the load are with reading, by their last answers."""
        return {node: self._seen[node].status.reads for node in self._handles}

    def open(self, transfer: Transfer, nodes: Sequence[NodeId]) -> None:
        """Gives agents their programs, so that mailboxes are there before anybody asks.

        Raises:
            ClusterError: One did not answer in time.
        """
        wait_for_all(
            list(self._opened(transfer, nodes).values()),
            timeout_s=self._config.deadlines.call_s,
            what=f"load {self._load}: handing programs to {len(nodes)} node agents",
        )

    def join(self, transfer: Transfer, nodes: Sequence[NodeId]) -> list[ev.AgentLost]:
        """Gives programs to nodes that come to join; who did not take it is lost."""
        known = [node for node in nodes if node in self._fleet.agents]
        missing = [ev.AgentLost(node=node, reason=_GONE) for node in nodes if node not in known]
        calls = {node: (node, ref) for node, ref in self._opened(transfer, known).items()}
        return missing + self._failed(calls, "joining a load")

    def drop(self, node: NodeId, routes: Mapping[NodeId, Reroute], joined: Collection[NodeId]) -> list[ev.AgentLost]:
        """Gives a node up and tells all others; those that did not hear it are lost too."""
        handle, seen = self._handles.pop(node, None), self._seen.pop(node, _Seen(AgentStatus()))
        self._listener.forget(node)
        # What it had kept is gone with it.
        self._lost[node] = replace(seen.status, kept=Kept())
        if handle is not None:
            self._fleet.end_agent(node, handle)
        peers = {other: self._handles[other] for other in joined if other in self._handles}

        def reroute(other: NodeId) -> Callable[[Any], Any]:
            others = {name: peer for name, peer in peers.items() if name != other}
            return lambda agent: agent.reroute.remote(self._load, routes[other], others, self._config)

        return self.tell({other: reroute(other) for other in routes}, f"going past node {node}")

    def tell(self, calls: Mapping[NodeId, Callable[[Any], Any]], what: str) -> list[ev.AgentLost]:
        """Makes short calls to agents, all at a time, and waits; who fails in it, or is silent, is lost.

        Args:
            calls: By node, makes the call with the agent's handle; gives its ref.
            what: For messages.
        """
        gone = [ev.AgentLost(node=node, reason=_GONE) for node in calls if node not in self._handles]
        refs = {node: (node, call(self._handles[node])) for node, call in calls.items() if node in self._handles}
        return gone + self._failed(refs, what)

    def settle(
        self, calls: Mapping[Key, tuple[NodeId, Any]], what: str, *, timeout_s: float | None = None
    ) -> dict[Key, Any]:
        """The result of each of some calls, or the error in its place; nothing is raised.

        Args:
            calls: Node and ref of each. One on a node that is silent, or has no part any more, is not waited for.
            what: For messages.
            timeout_s: Longest wait; None: ``deadlines.call_s``.
        """
        timeout_s = self._config.deadlines.call_s if timeout_s is None else timeout_s
        waiting, answers = dict(calls), dict[Key, Any]()
        until_s = self._clock() + timeout_s
        while waiting:
            refs = {ref: key for key, (_, ref) in waiting.items()}
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=PLANNER_LOOK_S)
            for ref, answer in zip(ready, settle(ready, timeout_s=timeout_s, what=what), strict=True):
                answers[refs[ref]] = answer
                node, _ = waiting.pop(refs[ref])
                if not isinstance(answer, MegamindError):
                    self._listener.answered(node)
            silent, is_late = self._silence(), self._clock() > until_s
            for key, (node, _) in list(waiting.items()):
                if node in silent or node not in self._handles or is_late:
                    why = silent.get(node, _GONE if node not in self._handles else f"no answer within {timeout_s:g} s")
                    answers[key] = ActorLostError(f"{what}: {why}")
                    del waiting[key]
        return answers

    def reset_rank(self, node: NodeId, rank: Rank, generation: Generation) -> list[ev.AgentLost]:
        """A rank, as a new generation, has an empty mailbox there."""
        return self.tell(
            {node: lambda agent: agent.reset_rank.remote(self._load, rank, generation)},
            f"giving rank {rank} a new mailbox",
        )

    def take_back(self, node: NodeId, keep_bytes: int) -> tuple[tuple[ExtentId, ...], list[ev.Event]]:
        """What a node will not read any more, of what it has not begun; or its loss."""
        handle = self._handles.get(node)
        if handle is None:
            return (), []
        call = (node, handle.take_back.remote(self._load, keep_bytes))
        answer = self.settle({node: call}, "taking back extents")[node]
        if isinstance(answer, MegamindError):
            return (), [ev.AgentLost(node=node, reason=str(answer))]
        return answer, []

    def ask(self) -> list[ev.Event]:
        """What they have to say, and who is silent or gone."""
        asks = {node: partial(handle.status.remote, self._load) for node, handle in self._handles.items()}
        events: list[ev.Event] = []
        answers = self._watch.look(asks, timeout_s=PLANNER_LOOK_S)
        self.heard = set(answers)
        for node, answer in answers.items():
            events += self._take(node, answer)
        return events + [ev.AgentLost(node=node, reason=why) for node, why in self._silence().items()]

    def probe(self, node: NodeId) -> list[ev.Event]:
        """Asks one of them now: what broke off elsewhere may be for its loss."""
        handle = self._handles.get(node)
        if handle is None:
            return []
        call = (node, handle.status.remote(self._load))
        return self._take(node, self.settle({node: call}, "asking a node agent whether it lives")[node])

    def is_silent(self, node: NodeId) -> bool:
        """Whether it has given no sign of life for too long, or was given up."""
        return node not in self._handles or node in self._listener.silent()

    def close(self, *, keep: bool) -> dict[NodeId, Any]:
        """Begins to end the load on all nodes that remain; the refs of the calls, by node."""
        self._listener.close()
        living = {node: handle for node, handle in self._handles.items() if self._fleet.has_agent(node, handle)}
        return {node: handle.close_load.remote(self._load, keep) for node, handle in living.items()}

    def results(self, answers: Mapping[NodeId, Any]) -> dict[NodeId, AgentStatus]:
        """The last status of every node; one that did not answer has kept nothing that anybody could find again."""
        last = {node: replace(status, kept=Kept()) for node, status in self._statuses().items()}
        return last | {node: answer for node, answer in answers.items() if isinstance(answer, AgentStatus)}

    def _opened(self, transfer: Transfer, nodes: Sequence[NodeId]) -> dict[NodeId, Any]:
        self._handles |= {node: self._fleet.agents[node] for node in nodes}
        for node in nodes:
            self._seen[node] = _Seen(AgentStatus())
            self._listener.expect(node)
        return {
            node: self._handles[node].open_load.remote(
                transfer.agent_program(node),
                {peer: handle for peer, handle in self._handles.items() if peer != node},
                self._config,
                self._record,
                self._listener.pulse,
            )
            for node in nodes
        }

    def _failed(self, calls: Mapping[NodeId, tuple[NodeId, Any]], what: str) -> list[ev.AgentLost]:
        answers = self.settle(calls, what)
        return [
            ev.AgentLost(node=node, reason=str(answer))
            for node, answer in answers.items()
            if isinstance(answer, MegamindError)
        ]

    def _take(self, node: NodeId, answer: Any) -> list[ev.Event]:
        if isinstance(answer, MegamindError):
            return [ev.AgentLost(node=node, reason=str(answer))]
        self._listener.answered(node)
        seen = self._seen[node]
        seen.status = answer
        events: list[ev.Event] = [
            ev.ExtentFailed(extent=one.extent, node=one.node, error=one.error, retryable=one.retryable)
            for one in answer.failures[seen.num_failures :]
        ]
        seen.num_failures = len(answer.failures)
        if answer.error is not None:
            events.append(ev.AgentFailed(node=node, error=answer.error))
        return events

    def _silence(self) -> dict[NodeId, str]:
        limit_s = self._config.deadlines.silence_s
        return {
            node: f"no sign of life for {seconds:.1f} s (deadlines.silence_s = {limit_s:g} s)"
            for node, seconds in self._listener.silent().items()
        }

    def _statuses(self) -> dict[NodeId, AgentStatus]:
        return self._lost | {node: seen.status for node, seen in self._seen.items()}
