"""How long a load will take, without a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from megamind_ray import __version__
from megamind_ray.api.plan import nominal_topology
from megamind_ray.config import Config, load_config
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Topology
from megamind_ray.errors import ClusterError, RequestError

if TYPE_CHECKING:
    from megamind_ray.core.report import LoadReport
    from megamind_ray.sim import LoadFault, Simulation

__all__ = ["run_simulation", "simulate"]


def simulate(
    plan: Plan, topology: Topology | str | os.PathLike[str] | None = None, *, config: Config | None = None
) -> LoadReport:
    """Predicts a load: how long it takes, how busy what is, what the bottleneck is. No cluster is needed.

    The plan's programs run in virtual time, with the threads, pools and limits of a real load. Worker start, the
    manifest and planning are not in its seconds.

    Args:
        plan: What to move.
        topology: The hardware, the path of a topology file, or the name of a preset; None takes what the plan was made
            for. Its nodes and GPUs must be those of the plan; rates may be others.
        config: Settings; None reads file and environment.

    Raises:
        RequestError: The topology lacks a node or GPU of the plan, or is so slow that the load would be given up.
        CapacityError: The blocks of an extent do not fit a pool.
    """
    return run_simulation(plan, topology, config=config).report


def run_simulation(
    plan: Plan,
    topology: Topology | str | os.PathLike[str] | None = None,
    *,
    config: Config | None = None,
    faults: Sequence[LoadFault] = (),
    max_flows: int | None = None,
) -> Simulation:
    """As ``simulate``, with the timeline and the events of the load.

    Args:
        plan: As for ``simulate``.
        topology: As for ``simulate``.
        config: As for ``simulate``.
        faults: What is to go wrong meanwhile.
        max_flows: Of larger plans, consecutive extents are simulated as one; None: what takes about 20 s.

    Raises:
        RequestError: The topology lacks a node or GPU of the plan, or is so slow that the load would be given up, or a
            fault names what is not there.
        CapacityError: The blocks of an extent do not fit a pool.
        MegamindError: The load is given up because of the faults.
    """
    from megamind_ray.sim import MAX_FLOWS, simulate_plan

    hardware = _hardware(plan, topology)
    try:
        return simulate_plan(
            plan,
            hardware,
            load_config(profile=False) if config is None else config,
            faults=faults,
            max_flows=MAX_FLOWS if max_flows is None else max_flows,
            started_at=datetime.now(UTC).isoformat(),
            release=__version__,
        )
    except ClusterError as error:
        if faults:
            raise
        # Nothing was to go wrong: there is no cluster yet that could fail, the figures of the hardware are too small.
        raise RequestError(
            f"a load would be given up on topology {hardware.name!r}: {error.message}; correct its rates and "
            "latencies, or raise the setting"
        ) from error


def _hardware(plan: Plan, topology: Topology | str | os.PathLike[str] | None) -> Topology:
    from megamind_ray.planning import parse_topology, resolve_topology

    if topology is not None:
        return resolve_topology(topology)
    if plan.topology:
        return parse_topology(plan.topology, origin="of the plan")
    return nominal_topology(plan.parallel.world)
