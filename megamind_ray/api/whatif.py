"""Layouts, hardware and policies side by side, before anything is loaded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megamind_ray.config import Config
from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.outcome import Outcome
from megamind_ray.core.parallel import Parallel, Rule
from megamind_ray.core.topology import Topology
from megamind_ray.errors import CapacityError, RequestError

if TYPE_CHECKING:
    from megamind_ray.core.demands import Demands
    from megamind_ray.core.plan import Plan
    from megamind_ray.planning.overflow import OverflowPlan

__all__ = ["Case", "Study"]

_MAX_TRIES = 24  # of other layouts, when one does not work: each takes a second or two with 92,000 tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to compare.

    Attributes:
        label: For people.
        parallel: The mesh.
        topology: The hardware.
        config: Settings, with the policies.
        keep: Whether blocks stay in the pools.
    """

    label: str
    parallel: Parallel
    topology: Topology
    config: Config
    keep: bool = False


class Study:
    """Plans and simulates one checkpoint in several ways.

    Args:
        manifest: The checkpoint, or its shape.
        rules: The user's placement rules.
        allow_replication: As for ``mm.plan``.
        max_flows: As for ``run_simulation``: fewer are faster, and coarser.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        rules: Sequence[Rule] = (),
        allow_replication: bool = False,
        max_flows: int | None = None,
    ) -> None:
        self._manifest = manifest
        self._max_flows = max_flows
        self._rules = tuple(rules)
        self._allow_replication = allow_replication

    def plan(self, case: Case) -> Plan:
        """Plans a case.

        Raises:
            RequestError, CapacityError: It cannot be loaded so.
        """
        from megamind_ray.planning import build_plan

        demands, readers = self._demands(case), self._readers(case)
        return build_plan(self._manifest, demands, case.topology, config=case.config, keep=case.keep, readers=readers)

    def _readers(self, case: Case) -> list[NodeId] | None:
        """The nodes with disks, where others have none and no storage that all share; None: all.

        A checkpoint on a path can lie nowhere else.
        """
        with_disks = [node.id for node in case.topology.nodes if node.disks]
        remote = case.config.io.is_remote(self._manifest.root)
        if remote or case.topology.storage is not None or len(with_disks) in (0, len(case.topology.nodes)):
            return None
        return with_disks

    def overflow(self, case: Case) -> OverflowPlan:
        """What of each rank of a case stays in host memory, where the GPUs are too small.

        Raises:
            RequestError, CapacityError: Not even so.
        """
        from megamind_ray.planning.overflow import plan_overflow

        return plan_overflow(self._manifest, self._demands(case), case.topology, config=case.config)

    def outcome(self, case: Case) -> Outcome:
        """Plans and simulates a case; one that does not fit has the reason in ``problem``."""
        from megamind_ray.api.simulate import run_simulation

        name = case.topology.name
        try:
            plan = self.plan(case)
            report = run_simulation(plan, case.topology, config=case.config, max_flows=self._max_flows).report
        except (RequestError, CapacityError) as error:
            return Outcome(case=case.label, parallel=case.parallel, topology=name, fits=False, problem=str(error))
        return Outcome(
            case=case.label,
            parallel=case.parallel,
            topology=name,
            fits=True,
            seconds=report.seconds["total"],
            lower_bound_s=report.lower_bound_s,
            bottleneck=report.bottleneck,
            bytes_from_storage=report.bytes_from_storage,
            bytes_over_network=report.bytes_over_network,
            largest_rank_bytes=max(rank.arena_bytes for rank in report.ranks),
            num_nodes=len({rank.node for rank in report.ranks}),
        )

    def nearest(self, case: Case) -> Case | None:
        """The layout nearest to one that does not work, on the same hardware; None where none was found.

        Near means few doublings and halvings of tp, pp and dp, ep as it is where it still divides; layouts of as many
        ranks come first.
        """
        for parallel in itertools.islice(_neighbours(case.parallel, case.topology.num_gpus), _MAX_TRIES):
            other = replace(case, parallel=parallel, label=str(parallel))
            try:
                self.plan(other)
            except (RequestError, CapacityError):
                continue
            return other
        return None

    def _demands(self, case: Case) -> Demands:
        from megamind_ray.integrations.transformers import fallback_rules
        from megamind_ray.planning import build_demands

        return build_demands(
            self._manifest,
            case.parallel,
            rules=self._rules,
            fallback_rules=fallback_rules,
            max_replicated_share=case.config.plan.max_replicated_share,
            allow_replication=self._allow_replication,
        )


def _neighbours(parallel: Parallel, num_gpus: int) -> Iterator[Parallel]:
    """Other meshes of at most ``num_gpus`` ranks, nearest first."""
    powers = [1 << exponent for exponent in range(max(1, num_gpus).bit_length())]

    def distance(other: Parallel) -> tuple[bool, float]:
        steps = sum(abs(math.log2(getattr(other, axis) / getattr(parallel, axis))) for axis in ("tp", "pp", "dp"))
        return other.world != parallel.world, steps + abs(math.log2(other.ep / parallel.ep))

    found: dict[Parallel, None] = {}
    for tp, pp, dp in itertools.product({*powers, parallel.tp}, {*powers, parallel.pp}, {*powers, parallel.dp}):
        if tp * pp * dp <= num_gpus:
            found[Parallel(tp=tp, pp=pp, dp=dp, ep=math.gcd(parallel.ep, tp * dp))] = None
    found.pop(parallel, None)
    yield from sorted(found, key=distance)
