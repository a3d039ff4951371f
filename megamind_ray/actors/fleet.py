"""The actors of a fleet: which nodes have an agent, which GPUs a worker; how they start and end."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any, Final

from megamind_ray.actors.boundary import settle, wait_for
from megamind_ray.actors.messages import AgentFacts, Lifetime, WorkerFacts
from megamind_ray.actors.names import agent_name, worker_name
from megamind_ray.actors.spawner import NodeResources, Spawner
from megamind_ray.config import Config
from megamind_ray.core.ids import NodeId
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.errors import ClusterError, MegamindError

__all__ = ["Fleet", "GpuKey"]

GpuKey = tuple[NodeId, int]

_FREED_S: Final = 10.0
_FREED_EVERY_S: Final = 0.05


class Fleet:
    """Node agents and GPU workers of one fleet. Not thread-safe: the planner calls it under its own lock.

    Attributes:
        agents: Handle by node.
        workers: Handle by (node, GPU index).
        agent_facts, worker_facts: Their latest answers.
        leaving: Nodes that are to leave: nothing is started there, and no load is planned with them.
    """

    def __init__(
        self,
        name: str,
        *,
        lifetime: Lifetime,
        config: Config,
        spawner: Spawner,
        device_memory_bytes: int | None,
    ) -> None:
        self.name = name
        self.lifetime = lifetime
        self._config = config
        self._spawner = spawner
        self._device_memory_bytes = device_memory_bytes
        self.agents: dict[NodeId, Any] = {}
        self.workers: dict[GpuKey, Any] = {}
        self.agent_facts: dict[NodeId, AgentFacts] = {}
        self.worker_facts: dict[GpuKey, WorkerFacts] = {}
        self.leaving: set[NodeId] = set()
        self._nodes: dict[NodeId, NodeResources] = {}

    @property
    def here(self) -> NodeId:
        """The node of the process that holds the fleet."""
        return self._spawner.here()

    @property
    def here_address(self) -> str:
        """The address of that node, as others reach it."""
        return self._nodes[self.here].address

    def adopt(
        self,
        agents: Mapping[NodeId, tuple[Any, AgentFacts]],
        workers: Mapping[GpuKey, tuple[Any, WorkerFacts]],
    ) -> None:
        """Takes over what an earlier planner had, handles and facts; it starts nothing."""
        self._look()
        self.agents = {node: handle for node, (handle, _) in agents.items()}
        self.agent_facts = {node: facts for node, (_, facts) in agents.items()}
        self.workers = {key: handle for key, (handle, _) in workers.items()}
        self.worker_facts = {key: facts for key, (_, facts) in workers.items()}

    def end_agent(self, node: NodeId, agent: Any) -> None:
        """Ends an agent that was given up, also one that would go on; the next load finds its node without one."""
        self._spawner.kill(agent)
        if self.agents.get(node) is agent:
            del self.agents[node]

    def end_node(self, node: NodeId) -> None:
        """Ends all that runs on a node, and returns when it is gone, or does not say so in time."""
        keys = [key for key in self.workers if key[0] == node]
        handles = [self.workers.pop(key) for key in keys]
        handles += [self.agents.pop(node)] if node in self.agents else []
        for handle in handles:
            self._spawner.kill(handle)
        # Nobody answers any more: this ends as soon as Ray knows it.
        asked = [handle.facts.remote() for handle in handles]
        settle(asked, timeout_s=self._config.deadlines.call_s, what=f"ending the actors on node {node}")
        self.agent_facts.pop(node, None)
        for key in keys:
            self.worker_facts.pop(key, None)

    def cluster_nodes(self) -> list[NodeResources]:
        """The nodes that Ray has now, also those without an actor of the fleet. Any thread may ask."""
        return self._spawner.nodes()

    def refresh(self) -> None:
        """Starts agents and workers on nodes that joined, forgets those of nodes that left, asks all for their facts.

        Raises:
            ClusterError: An actor did not start in time, on a node that is still there; what was started with it is
                ended.
        """
        self._look()
        self._forget(node for node in list(self.agents) if node not in self._nodes)
        # In place: a node may be marked at the same time.
        self.leaving.intersection_update(self._nodes)
        self._await_freed(self._ask_all())
        if self._start_missing():
            self._ask_all()

    def add_agent_here(self) -> NodeId | None:
        """Starts an agent on the planner's own node, which has no GPU, so that it can read what lies there.

        It stays for later loads.

        Returns:
            The node; None where it has an agent already, or where Ray calls it dead.

        Raises:
            ClusterError: It did not start in time.
        """
        here = self.here
        if here in self.agents or here not in self._nodes:
            return None
        agent = self._spawner.agent(agent_name(self.name, here, self._serial()), here, self.lifetime)
        try:
            facts: AgentFacts = wait_for(
                agent.facts.remote(),
                timeout_s=self._config.deadlines.actor_start_s,
                what=f"fleet {self.name!r}: starting a node agent on node {here}, which has the checkpoint",
            )
        except BaseException:
            self._spawner.kill(agent)
            raise
        self.agents[here], self.agent_facts[here] = agent, facts
        return here

    def replace_worker(self, key: GpuKey, lost: Any, *, unless: Callable[[], bool] | None = None) -> Any:
        """Ends a lost worker and gives its GPU a new one.

        Ray hands out GPUs by itself. Where workers of several GPUs of a node were lost at once, the new one may get
        another of theirs: it stays there for the replacement that is to come, and the next one is started.

        Args:
            key: The GPU.
            lost: The worker that it had, None where that was gone already; if it has another one by now, that one is
                the replacement.
            unless: Once it says so, the start is not waited for any more.

        Raises:
            ClusterError: It did not start in time, or the GPU was taken by somebody else.
        """
        if self.workers.get(key, lost) is not lost:
            return self.workers[key]
        if lost is not None:
            self._spawner.kill(lost)
        self.workers.pop(key, None)
        resources = self._nodes[key[0]]
        for _ in range(resources.num_gpus):
            got, handle = self._start_worker(resources, unless)
            if got == key:
                return handle
        raise ClusterError(f"GPU {key[0]}:{key[1]}: its new worker was given another GPU; it was taken meanwhile")

    def holds(self, key: GpuKey, worker: Any) -> bool:
        """Whether this very worker still has the GPU; a replaced one took its models with it."""
        return self.workers.get(key) is worker

    def has_agent(self, node: NodeId, agent: Any) -> bool:
        """Whether this very agent is still there; a lost one took its blocks with it."""
        return self.agents.get(node) is agent

    def pool_used_bytes(self) -> dict[NodeId, int]:
        """What is in the object store of each node now, of whomever, as Ray has it."""
        return {node.node: node.pool_used_bytes for node in self._spawner.nodes()}

    def topology(self) -> Topology:
        """The fleet as a topology, from the latest facts. Link rates are not measured here: nominal ones stand."""
        nodes = []
        for node_id in sorted(self.agent_facts):
            facts = self.agent_facts[node_id]
            gpus = tuple(
                Gpu(
                    index=gpu,
                    memory_bytes=worker.memory_bytes,
                    free_bytes=worker.free_bytes,
                    numa=worker.numa,
                    nvlink_group=worker.nvlink_group,
                    kind="cpu" if worker.device == "cpu" else "cuda",
                )
                for (node, gpu), worker in sorted(self.worker_facts.items())
                if node == node_id
            )
            nodes.append(
                Node(
                    id=node_id,
                    gpus=gpus,
                    memory_bytes=facts.memory_bytes,
                    pool_bytes=facts.pool_bytes,
                    address=facts.address,
                    is_leaving=node_id in self.leaving,
                )
            )
        return Topology(nodes=tuple(nodes), name=self.name)

    def shut_down(self) -> None:
        """Ends all workers and agents."""
        for handle in (*list(self.workers.values()), *list(self.agents.values())):
            self._spawner.kill(handle)
        self.workers.clear()
        self.agents.clear()

    def _look(self) -> None:
        self._nodes = {node.node: node for node in self._spawner.nodes()}

    def _ask_all(self) -> Counter[NodeId]:
        """Updates the facts of all actors and ends those that do not answer; the number of lost workers by node."""
        agents, workers = list(self.agents), list(self.workers)
        answers = settle(
            [self.agents[node].facts.remote() for node in agents]
            + [self.workers[key].facts.remote() for key in workers],
            timeout_s=self._config.deadlines.call_s,
            what=f"fleet {self.name!r}: asking {len(agents)} node agents and {len(workers)} GPU workers",
        )
        self.agent_facts, self.worker_facts = {}, {}
        for node, answer in zip(agents, answers, strict=False):
            if isinstance(answer, AgentFacts):
                self.agent_facts[node] = answer
            else:
                self._spawner.kill(self.agents.pop(node))
        lost: Counter[NodeId] = Counter()
        for key, answer in zip(workers, answers[len(agents) :], strict=True):
            if isinstance(answer, WorkerFacts):
                self.worker_facts[key] = answer
            else:
                self._spawner.kill(self.workers.pop(key))
                lost[key[0]] += 1
        return lost

    def _await_freed(self, lost: Counter[NodeId]) -> None:
        """Waits until Ray counts the GPUs of lost workers as free; it learns of a death a moment after we do.

        A GPU that somebody else takes in this moment does not become free: then the load does without it.
        """
        until_s = monotonic() + _FREED_S
        while lost and monotonic() < until_s:
            self._look()
            if all(node not in self._nodes or self._nodes[node].free_gpus >= num for node, num in lost.items()):
                return
            sleep(_FREED_EVERY_S)

    def _num_startable(self, node: NodeResources) -> int:
        """Free GPUs; what Ray says may be older than our own workers."""
        num_own = sum(1 for key in self.workers if key[0] == node.node)
        return min(node.free_gpus, node.num_gpus - num_own)

    def _start_missing(self) -> bool:
        """Starts what is missing; says whether anything was."""
        agents: dict[NodeId, Any] = {}
        workers: list[tuple[NodeId, Any]] = []
        for node, resources in self._nodes.items():
            if resources.num_gpus == 0 or node in self.leaving:
                continue
            if node not in self.agents:
                name = agent_name(self.name, node, self._serial())
                agents[node] = self._spawner.agent(name, node, self.lifetime)
            workers += [(node, self._spawn_worker(resources)) for _ in range(self._num_startable(resources))]
        started = [*agents.items(), *workers]
        try:
            answers = self._started(started)
        except BaseException:
            for _, handle in started:
                self._spawner.kill(handle)
            raise
        for (node, handle), answer in zip(started, answers, strict=True):
            if isinstance(answer, WorkerFacts):
                self.workers[node, answer.gpu] = handle
            elif isinstance(answer, AgentFacts):
                self.agents[node] = handle
            else:
                self._spawner.kill(handle)
        return bool(answers)

    def _started(self, started: Sequence[tuple[NodeId, Any]]) -> list[Any]:
        """The facts of actors that were just started; an error in the place of one whose node has left meanwhile.

        Raises:
            ClusterError: One did not start in time, and its node is there.
        """
        answers = settle(
            [handle.facts.remote() for _, handle in started],
            timeout_s=self._config.deadlines.actor_start_s,
            what=f"fleet {self.name!r}: starting {len(started)} node agents and GPU workers",
        )
        failed = [(node, answer) for (node, _), answer in zip(started, answers, strict=True) if _is_error(answer)]
        if failed:
            self._look()
        for node, error in failed:
            if node in self._nodes:
                raise error
        return answers

    def _spawn_worker(self, on: NodeResources) -> Any:
        name = worker_name(self.name, on.node, self._serial())
        return self._spawner.worker(name, on, self.lifetime, self._device_memory_bytes)

    def _start_worker(self, on: NodeResources, unless: Callable[[], bool] | None) -> tuple[GpuKey, Any]:
        """Starts a worker and waits until it says which GPU it got; whatever was there before has lost it."""
        handle = self._spawn_worker(on)
        try:
            facts: WorkerFacts = wait_for(
                handle.facts.remote(),
                timeout_s=self._config.deadlines.actor_start_s,
                what=f"replacing a worker on node {on.node}",
                unless=unless,
            )
        except BaseException:
            self._spawner.kill(handle)
            raise
        key = (on.node, facts.gpu)
        if key in self.workers:
            self._spawner.kill(self.workers[key])
        self.workers[key] = handle
        self.worker_facts[key] = facts
        return key, handle

    def _forget(self, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            self.agents.pop(node, None)
            for key in [key for key in self.workers if key[0] == node]:
                del self.workers[key]

    def _serial(self) -> str:
        """Sets a new actor's name apart: the name of one that was just ended may be taken for a while."""
        return self._spawner.lineage + uuid.uuid4().hex[:8]


def _is_error(answer: Any) -> bool:
    return isinstance(answer, MegamindError)
