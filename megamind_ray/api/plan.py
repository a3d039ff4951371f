"""Planning without a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megamind_ray.api.arguments import require_config, require_parallel
from megamind_ray.config import Config, load_config
from megamind_ray.core.ids import NodeId
from megamind_ray.core.parallel import Parallel, Rule
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.units import GIB

if TYPE_CHECKING:
    from megamind_ray.core.plan import Plan

__all__ = ["nominal_topology", "plan"]

_GPUS_PER_NODE = 8
_NOMINAL_GPU_BYTES = 80 * GIB


def plan(
    uri: str | os.PathLike[str],
    parallel: Parallel | None = None,
    topology: Topology | str | os.PathLike[str] | None = None,
    *,
    keep: bool = False,
    rules: Sequence[Rule] = (),
    allow_replication: bool = False,
    sidecar: str | os.PathLike[str] | bool | None = None,
    config: Config | None = None,
    shapes: bool = False,
    weights: str | None = None,
) -> Plan:
    """Plans a load; reads the headers of the checkpoint, and nothing else.

    Args:
        uri: Path or URI of the checkpoint; with ``shapes`` what has the model's ``config.json``, or a model's name.
        parallel: The mesh; default is one rank.
        topology: The hardware, the path of a topology file, or the name of a preset (``megamind topology --list``);
            None plans for ``nominal_topology``.
        keep: Plan for blocks that stay in the pools.
        rules: Placement rules that go before the built-in ones.
        allow_replication: Plan also if more of the checkpoint is replicated than ``plan.max_replicated_share``.
        sidecar: Recorded checksums: None uses those beside the checkpoint, a path others, False none.
        config: Settings; None reads file and environment.
        shapes: Plan for the checkpoint that the model's ``config.json`` describes; there need not be one. ``uri`` is a
            folder with that file, the file, or a name such as ``deepseek-v3`` (``planning.shapes.ready_names``).
        weights: With ``shapes``, the format of the weights: ``bf16``, ``fp8``, ``int4`` or ``mxfp4``; None is that of
            the configuration.

    Raises:
        RequestError: The checkpoint or the mesh cannot be loaded as asked.
        CapacityError: It does not fit; the message says what would.
        IntegrityError: A header is wrong.
    """
    from megamind_ray.api.shapes import open_planned
    from megamind_ray.api.whatif import Case, Study
    from megamind_ray.planning import resolve_topology

    require_parallel(parallel)
    require_config(config)
    settings = load_config(profile=False) if config is None else config
    mesh = parallel or Parallel()
    hardware = nominal_topology(mesh.world) if topology is None else resolve_topology(topology)
    manifest = open_planned(uri, shapes=shapes, weights=weights, sidecar=sidecar, config=settings)
    study = Study(manifest, rules=rules, allow_replication=allow_replication)
    return study.plan(Case(label=str(mesh), parallel=mesh, topology=hardware, config=settings, keep=keep))


def nominal_topology(num_gpus: int) -> Topology:
    """As many nodes of eight 80 GiB GPUs as it takes, for planning when no hardware is named."""
    nodes = []
    for number, first in enumerate(range(0, num_gpus, _GPUS_PER_NODE)):
        count = min(_GPUS_PER_NODE, num_gpus - first)
        gpus = tuple(
            Gpu(index=index, memory_bytes=_NOMINAL_GPU_BYTES, free_bytes=_NOMINAL_GPU_BYTES, numa=0, nvlink_group=0)
            for index in range(count)
        )
        nodes.append(Node(id=NodeId(f"node{number}"), gpus=gpus, memory_bytes=1024 * GIB, pool_bytes=300 * GIB))
    return Topology(nodes=tuple(nodes), name=f"nominal: {len(nodes)} x up to {_GPUS_PER_NODE} GPUs of 80 GiB")
