"""What a simulation found: the report, the timeline, and the bottleneck in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from megamind_ray.core.ids import NodeId
from megamind_ray.core.plan import Plan
from megamind_ray.core.report import Kept, LoadReport, RankReport
from megamind_ray.core.timeline import Timeline
from megamind_ray.core.tracks import device_series
from megamind_ray.errors import masked
from megamind_ray.planning.bound import Bound
from megamind_ray.planning.cost import ResourceKind
from megamind_ray.sim.bottleneck import find_bottleneck
from megamind_ray.sim.driver import Driver
from megamind_ray.sim.world import World, network_series

__all__ = ["Outcome", "build_report", "build_timeline"]

_MAX_SPANS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A simulation that has ended well.

    Attributes:
        plan: What was moved.
        world: In what.
        driver: Who saw to it.
        bound: The least time that it can take.
        kept: What stays in the pools.
        credit_bytes: By node, what blocks on their way may take of its pool.
        started_at: For the report.
    """

    plan: Plan
    world: World
    driver: Driver
    bound: Bound
    kept: Kept
    credit_bytes: Mapping[NodeId, int]
    started_at: str

    @property
    def seconds(self) -> float:
        return self.driver.ended_s


def build_report(outcome: Outcome) -> LoadReport:
    """The report of a simulated load."""
    plan, world, driver = outcome.plan, outcome.world, outcome.driver
    runs = [driver.ranks[rank] for rank in sorted(driver.ranks)]
    agents = (*driver.agents.values(), *driver.lost)
    bytes_read = sum(agent.bytes_read for agent in agents) + sum(run.bytes_read for run in runs)
    seconds = {"manifest": 0.0, "plan": 0.0, "transfer": outcome.seconds, "total": outcome.seconds}
    utilisation = _utilisation(outcome)
    return LoadReport(
        kind="simulation",
        model=masked(plan.uri).rstrip("/").rpartition("/")[2],
        uri=masked(plan.uri),
        parallel=asdict(plan.parallel),
        started_at=outcome.started_at,
        bytes_total=plan.bytes_total,
        bytes_from_storage=bytes_read,
        bytes_retried=sum(agent.bytes_again for agent in agents),
        bytes_over_network=sum(agent.pool.bytes_sent for agent in agents),
        bytes_to_device=sum(run.bytes_done for run in runs),
        bytes_replicated=plan.bytes_replicated,
        seconds=seconds,
        throughput_bytes_per_s=bytes_read / outcome.seconds if bytes_read else 0.0,
        ranks=_rank_reports(outcome),
        faults=tuple(driver.recorded),
        kept=outcome.kept,
        verified="reference" if plan.is_referenced else "transit",
        notes=(*plan.notes, *_notes(outcome)),
        lower_bound_s=outcome.bound.seconds,
        bottleneck=find_bottleneck(world, driver, utilisation),
        utilisation={
            str(resource): share for resource, share in zip(world.model.resources, utilisation, strict=True) if share
        },
    )


def build_timeline(outcome: Outcome) -> Timeline:
    """What happened when."""
    world, driver, end_s = outcome.world, outcome.driver, outcome.seconds
    samples: dict[str, Iterable[tuple[float, float]]] = {
        name: world.history.samples(column, end_s) for column, name in enumerate(world.meters)
    }
    samples |= {world.tracks[agent.node].host: agent.pool.series for agent in (*driver.agents.values(), *driver.lost)}
    samples |= {device_series(rank): series for rank, series in driver.series.items()}
    return world.recorder.timeline(samples, _limits(outcome), max_spans=_MAX_SPANS)


def _utilisation(outcome: Outcome) -> list[float]:
    """By resource, the part of what it could have given that was taken."""
    resources = outcome.world.model.resources
    moved = outcome.world.fluid.units_moved()[: len(resources)]
    could = np.array([resource.capacity for resource in resources]) * outcome.seconds
    shares: list[float] = np.minimum(np.divide(moved, could, out=np.zeros_like(moved), where=could > 0), 1.0).tolist()
    return shares


def _rank_reports(outcome: Outcome) -> tuple[RankReport, ...]:
    plan, topology = outcome.plan, outcome.world.topology
    counts = np.bincount(plan.tables["views"]["rank"].to_numpy(), minlength=plan.parallel.world).tolist()
    reports = []
    for row in plan.tables["ranks"].to_pylist():
        run, place = outcome.driver.ranks[row["rank"]], outcome.world.places[row["rank"]]
        node = topology.nodes[place.node]
        reports.append(
            RankReport(
                **{name: row[name] for name in ("rank", "pp", "dp", "tp", "arena_bytes")},
                node=node.id,
                gpu=node.gpus[place.gpu].index,
                num_tensors=counts[row["rank"]],
                bytes_to_device=run.bytes_done,
                bytes_direct=run.bytes_direct,
                bytes_pool=run.bytes_pool,
                seconds=dict(run.seconds),
            )
        )
    return tuple(reports)


def _notes(outcome: Outcome) -> list[str]:
    parts = outcome.world.work.parts
    if parts == 1:
        return []
    note = f"up to {parts} consecutive extents of a reader were simulated as one, since there are so many"
    return [f"{note}; the beginning and the end of the load are coarser than they would be"]


def _limits(outcome: Outcome) -> dict[str, float]:
    world, limits = outcome.world, dict[str, float]()
    capacity = {(resource.kind, resource.where): resource.capacity for resource in world.model.resources}
    for node in world.tracks:
        item = world.topology.nodes[world.node_index[node]]
        incoming = capacity[ResourceKind.NIC_IN, node]
        shared = min(incoming, capacity.get((ResourceKind.STORAGE, ""), incoming))
        is_local = bool(item.disks) and not world.is_remote
        limits[world.tracks[node].storage_rate] = capacity[ResourceKind.DISK, node] if is_local else shared
        limits[network_series(node)] = incoming
        limits[world.tracks[node].host] = float(outcome.credit_bytes[node])
    for rank, place in world.places.items():
        limits[device_series(rank)] = float(world.topology.nodes[place.node].gpus[place.gpu].memory_bytes)
    return limits
