"""A node whose storage or link is ten times slower than planned, in virtual time: with re-planning and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from megamind_ray.config import Config, IoConfig, StragglerConfig
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import check
from megamind_ray.core.ids import NodeId
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Topology
from megamind_ray.sim import Simulation, simulate_plan
from megamind_ray.units import MIB

MakePlan: TypeAlias = Callable[..., Plan]
MakeTopology: TypeAlias = Callable[..., Topology]
DISK = 20e6
OFF = StragglerConfig(replan=False)


@pytest.fixture
def few_in_flight(config: Config) -> Config:
    """As for checkpoints of a hundred times this size: most of a node's extents are not begun at once."""
    return replace(config, io=IoConfig(chunk_bytes=MIB, extent_bytes=MIB, agent_threads=2))


def slowed(topology: Topology, number: int, times: float = 10) -> Topology:
    """With a disk of one node so many times slower."""
    nodes = list(topology.nodes)
    (disk,) = nodes[number].disks
    nodes[number] = replace(nodes[number], disks=(replace(disk, bytes_per_s=disk.bytes_per_s / times),))
    return replace(topology, nodes=tuple(nodes))


def moved(simulation: Simulation) -> list[ins.ReadInstead]:
    return [
        one for entry in simulation.events.entries for one in entry.instructions if isinstance(one, ins.ReadInstead)
    ]


@pytest.mark.parametrize("parallel", [Parallel(dp=4), Parallel(tp=4), Parallel(pp=2, tp=2)], ids=str)
@pytest.mark.parametrize("number", [0, 1])
def test_a_slow_disk_costs_a_fraction_of_what_it_would(
    parallel: Parallel, number: int, plan_of: MakePlan, topology_of: MakeTopology, few_in_flight: Config
) -> None:
    topology = topology_of(4, 1, disk=DISK)
    plan = plan_of(parallel, topology, force_pool=True, config=few_in_flight)
    hardware = slowed(topology, number)
    planned = simulate_plan(plan, topology, few_in_flight)
    without = simulate_plan(plan, hardware, replace(few_in_flight, straggler=OFF))
    relieved = simulate_plan(plan, hardware, few_in_flight)

    assert moved(planned) == moved(without) == []
    assert without.report.seconds["total"] > 5 * planned.report.seconds["total"]
    assert relieved.report.seconds["total"] < 0.5 * without.report.seconds["total"]
    assert all(order.node != NodeId(f"n{number}") for order in moved(relieved))
    assert relieved.report.bytes_from_storage == plan.bytes_from_storage
    assert relieved.report.bytes_retried == 0
    assert relieved.report.bytes_to_device == plan.bytes_to_device
    assert {fault.kind for fault in relieved.report.faults} == {"straggler"}
    assert check(relieved.events) is None


def test_where_all_disks_are_as_slow_nothing_moves(
    plan_of: MakePlan, topology_of: MakeTopology, few_in_flight: Config
) -> None:
    topology = topology_of(4, 1, disk=DISK)
    plan = plan_of(Parallel(dp=4), topology, force_pool=True, config=few_in_flight)
    for number in range(4):
        topology = slowed(topology, number)
    with_it = simulate_plan(plan, topology, few_in_flight)
    without = simulate_plan(plan, topology, replace(few_in_flight, straggler=OFF))
    assert moved(with_it) == []
    assert with_it.report.seconds == without.report.seconds


def test_a_plan_that_knows_of_the_slow_disk_is_left_alone(
    plan_of: MakePlan, topology_of: MakeTopology, few_in_flight: Config
) -> None:
    topology = slowed(topology_of(4, 1, disk=DISK), 1)
    plan = plan_of(Parallel(dp=4), topology, force_pool=True, config=few_in_flight)
    assert moved(simulate_plan(plan, topology, few_in_flight)) == []
