"""What a load waits for most of the time, in words, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from megamind_ray.planning.cost import Resource, ResourceKind
from megamind_ray.sim.driver import Driver
from megamind_ray.sim.world import World

__all__ = ["find_bottleneck"]

_BUSY: Final = 0.8  # a resource that is busy for longer is what everybody waits for

_REMEDIES: Final = {
    ResourceKind.STORAGE: "storage that gives more bytes a second",
    ResourceKind.REQUESTS: "larger chunks (io.chunk_bytes), or storage that answers more requests a second",
    ResourceKind.DISK: "another disk, or shared storage",
    ResourceKind.NIC_IN: "a faster or a second network interface",
    ResourceKind.NIC_OUT: "a faster or a second network interface",
    ResourceKind.RACK_IN: "a faster uplink, or fewer racks for one model",
    ResourceKind.RACK_OUT: "a faster uplink, or fewer racks for one model",
    ResourceKind.WIRE_IN: "a data plane that brings more into a node",
    ResourceKind.WIRE_OUT: "a data plane that takes more out of a node",
    ResourceKind.MEMORY: "fewer ranks on a node, or faster memory",
    ResourceKind.CPU: "more processors",
    ResourceKind.SWITCH: "fewer GPUs behind a switch",
    ResourceKind.DEVICE: "a faster link to the GPU, or more ranks",
    ResourceKind.INTERPRETER: "larger extents (io.pool_extent_bytes), so that there are fewer blocks,",
}


def find_bottleneck(world: World, driver: Driver, utilisation: Sequence[float]) -> str:
    """One sentence: the resource that is busy for longest; or else the threads that are.

    Args:
        world: With the resources.
        driver: After the load.
        utilisation: By resource, 0 to 1.
    """
    if not any(utilisation):
        return ""
    share = max(utilisation)
    busiest = world.model.resources[utilisation.index(share)]
    others = _others(world, utilisation, busiest, share)
    verb = "is" if busiest.kind in _SINGULAR else "are"
    if share >= _BUSY:
        return f"{busiest}{others} {verb} busy {share:.0%} of the time; {_REMEDIES[busiest.kind]} would help most"
    time, remedy = max(_threads(world, driver))
    who, what = remedy
    return (
        f"nothing gives more than {share:.0%} of what it could ({busiest}{others}); {who} {time:.0%} of the time: "
        f"{what} would help most"
    )


_SINGULAR: Final = frozenset(ResourceKind) - {ResourceKind.DISK, ResourceKind.REQUESTS, ResourceKind.CPU}


def _others(world: World, utilisation: Sequence[float], busiest: Resource, share: float) -> str:
    """How many more of its kind are as busy."""
    num = sum(
        resource.kind is busiest.kind and one > share - 0.05
        for resource, one in zip(world.model.resources, utilisation, strict=True)
    )
    return f" (and {num - 1} more like it)" if num > 1 else ""


def _threads(world: World, driver: Driver) -> Iterator[tuple[float, tuple[str, str]]]:
    """(part of the time, (who is at work, what would help)) for all that work on one thing at a time."""
    end_s = driver.ended_s
    of_agent, of_rank = ("io.remote_threads",) * 2 if world.is_remote else ("io.agent_threads", "io.read_threads")
    for node, agent in driver.agents.items():
        num_readers = min(world.num_threads(node), len(world.work.units_of.get(node, ())))
        if num_readers:
            who = f"threads that read for the pool of {node}"
            yield agent.reading_s / (num_readers * end_s), (f"all {who} work", f"more {of_agent}")
            yield agent.waited_s / (num_readers * end_s), (f"{who} wait for room in it", "a larger object store")
        if agent.num_relays:
            who = f"{node} takes in one block at a time of each other node"
            yield agent.relaying_s / (agent.num_relays * end_s), (who, "a faster data plane, or fewer nodes")
    for rank, run in driver.ranks.items():
        yield run.seconds["copy"] / end_s, (f"rank {rank} copies one block at a time", "more ranks")
        num_readers = min(world.num_threads(rank), len(world.work.units_of.get(rank, ())))
        if num_readers:
            who = f"all threads that read for rank {rank} work"
            yield run.seconds["read"] / (num_readers * end_s), (who, f"more {of_rank}")
    yield 0.0, ("calls between actors and latencies are", "larger chunks")
