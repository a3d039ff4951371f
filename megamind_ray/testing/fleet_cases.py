"""Loads for fleets of threads: small meshes on equal nodes, their plans, and what must hold when one has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megamind_ray.actors.transfer import Transfer
from megamind_ray.config import Config, load_config
from megamind_ray.core.event_log import EventLog, check
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.load_machine import LoadState
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.node_loss import Spare
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.io import open_manifest
from megamind_ray.planning import build_demands, build_plan
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.thread_fleet import ThreadFleet
from megamind_ray.units import GIB, MIB

__all__ = ["LAYOUTS", "Layout", "config", "plan_of", "require_right", "said", "spares_on", "transfer"]

Said = TypeVar("Said")


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh on equal nodes."""

    parallel: Parallel
    gpus_per_node: int
    force_pool: bool = True

    @property
    def nodes(self) -> list[NodeId]:
        return [NodeId(f"n{number}") for number in range(self.parallel.world // self.gpus_per_node)]


LAYOUTS = (
    Layout(Parallel(dp=3), 1),
    Layout(Parallel(dp=4), 1),
    Layout(Parallel(tp=2, dp=2), 1),
    Layout(Parallel(tp=2, dp=3), 2),
    Layout(Parallel(pp=2, tp=2), 2),
    Layout(Parallel(dp=3), 1, force_pool=False),
    Layout(Parallel(tp=4), 2, force_pool=False),
    Layout(Parallel(tp=2), 2),
)


@cache  # and so are plans: hundreds of loads are of the same few
def config(*, force_pool: bool) -> Config:
    overrides: dict[str, dict[str, object]] = {
        "io": {"chunk_bytes": 65536, "extent_bytes": 65536, "pool_extent_bytes": 65536, "read_threads": 2},
        "routing": {"force_pool": force_pool, "min_direct_bytes": 0},
        "placement": {"policy": "first_fit"},
        "deadlines": {"poll_s": 0.05, "silence_s": 5.0},
        "retry": {"first_wait_s": 0.0, "attempts": 2},
        "straggler": {"window_s": 2.0, "gain_s": 0.2},  # by a clock that counts reads (``SlowStorage``)
    }
    return load_config(overrides=overrides, environ={})


@cache
def manifest_of(folder: Path) -> Manifest:
    return open_manifest(folder)


@cache
def expected(folder: Path, parallel: Parallel, rank: Rank) -> Any:
    return digest_all(expected_state_dict(folder, parallel, rank))


@cache
def plan_of(folder: Path, layout: Layout) -> Plan:
    gpus = tuple(Gpu(index=index, memory_bytes=GIB, free_bytes=GIB) for index in range(layout.gpus_per_node))
    nodes = tuple(Node(id=name, gpus=gpus, memory_bytes=GIB, pool_bytes=64 * MIB) for name in layout.nodes)
    manifest = manifest_of(folder)
    demands = build_demands(manifest, layout.parallel)
    return build_plan(manifest, demands, Topology(nodes=nodes), config=config(force_pool=layout.force_pool))


def transfer(
    folder: Path,
    layout: Layout,
    *,
    spares: Sequence[Spare] = (),
    blocks_in_pool: int = 8,
    readers: Sequence[NodeId] = (),
) -> Transfer:
    plan = plan_of(folder, layout)
    largest = int(plan.tables["blocks"]["nbytes"].to_numpy().max())
    nodes = [*layout.nodes, *{spare.node for spare in spares}]
    return Transfer(
        load=LoadId("m#1"),
        plan=plan,
        manifest=manifest_of(folder),
        credit_bytes=dict.fromkeys(nodes, blocks_in_pool * largest),
        keep_blocks={node: np.zeros(0, np.int64) for node in layout.nodes},
        readers=tuple(readers),
        spares=tuple(spares),
    )


def spares_on(*nodes: NodeId, gpus: int = 2) -> list[Spare]:
    return [Spare(node=node, gpu=gpu, free_bytes=GIB) for node in nodes for gpu in range(gpus)]


def require_right(fleet: ThreadFleet, folder: Path, layout: Layout) -> None:
    """Every rank holds the file's bytes, no block or credit is left, and the log says the same when it is replayed."""
    assert fleet.error is None, fleet.error
    assert fleet.machine.state is LoadState.DONE
    for rank in map(Rank, layout.parallel.ranks):
        assert digest_all(fleet.sessions[rank].state_dict()) == expected(folder, layout.parallel, rank)
    assert fleet.settle() == {}
    fleet.close()
    assert fleet.live_bytes == {}
    log = EventLog(facts=fleet.machine.facts, entries=tuple(fleet.log))
    assert check(EventLog.from_jsonl(log.to_jsonl())) is None


def said(fleet: ThreadFleet, kind: type[Said]) -> list[Said]:
    return [one for entry in fleet.log for one in entry.instructions if isinstance(one, kind)]
