"""Hardware and models at random, for comparing placements: seeded, so that every run asks the same questions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from megamind_ray.core.demands import Demands
from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import FileInfo, Manifest
from megamind_ray.core.parallel import Parallel, Replicate, Rule, Shard
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.core.topology import Disk, Gpu, Nic, Node, Rack, Storage, Switch, Topology
from megamind_ray.planning import build_demands
from megamind_ray.planning.presets import preset, preset_names
from megamind_ray.units import GIB, MIB

__all__ = ["Case", "preset_cases", "random_cases"]

_GB = 10**9
_MAX_STAGES = 16
_MODEL_MIB = (4096, 16384, 65536)
_RULES = (
    Rule(pattern="*.norm", placement=Replicate()),
    Rule(pattern="*.row", placement=Shard(dim=0)),
    Rule(pattern="*.column", placement=Shard(dim=1)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster."""

    name: str
    manifest: Manifest
    demands: Demands
    topology: Topology


def random_cases(number: int, seed: int, *, small: bool = False) -> Iterator[Case]:
    """Clusters of mixed nodes with a mesh that fits them.

    Args:
        number: How many.
        seed: Of the generator.
        small: At most six ranks on ten GPUs, for the exact search.
    """
    generator = random.Random(seed)
    made = 0
    while made < number:
        topology = _topology(generator, small=small)
        parallel = _mesh(generator, topology.num_gpus, small=small)
        layers = max(parallel.pp, generator.choice((8, 12, 16)))
        manifest = _manifest(layers, generator.choice(_MODEL_MIB) // layers)
        demands = build_demands(manifest, parallel, rules=_RULES, allow_replication=True)
        name = f"{made}: {parallel} on {len(topology.nodes)} nodes of {topology.num_gpus} GPUs"
        yield Case(name, manifest, demands, topology)
        made += 1


def _mesh(generator: random.Random, num_gpus: int, *, small: bool) -> Parallel:
    limit = min(num_gpus, 6 if small else 64)
    sizes = [
        Parallel(tp=tp, pp=pp, dp=dp)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 3, 4)
        for dp in (1, 2, 4)
        if limit >= tp * pp * dp >= min(2, limit)
    ]
    return generator.choice(sizes)


def _topology(generator: random.Random, *, small: bool) -> Topology:
    """Two to eight nodes of up to three kinds, in up to three racks; disks on all nodes, or shared storage."""
    has_disks = generator.random() < 0.7
    racks = generator.randint(1, 3)
    kinds = [_node(generator, has_disks=has_disks, small=small) for _ in range(generator.randint(1, 3))]
    nodes = []
    for index in range(generator.randint(2, 3 if small else 8)):
        kind = generator.choice(kinds)
        rack = f"r{generator.randrange(racks)}" if racks > 1 else None
        nodes.append(_renamed(kind, f"n{index}", rack))
    uplinks = tuple(
        Rack(name=f"r{index}", uplink_bytes_per_s=generator.choice((12.5, 25, 100)) * _GB) for index in range(racks)
    )
    storage = None if has_disks else Storage(bytes_per_s=generator.choice((5, 20, 80)) * _GB)
    return Topology(nodes=tuple(nodes), storage=storage, racks=uplinks if racks > 1 else ())


def _renamed(node: Node, name: str, rack: str | None) -> Node:
    return Node(
        id=NodeId(name),
        gpus=node.gpus,
        memory_bytes=node.memory_bytes,
        pool_bytes=node.pool_bytes,
        disks=node.disks,
        nics=node.nics,
        rack=rack,
        switches=node.switches,
    )


def _node(generator: random.Random, *, has_disks: bool, small: bool) -> Node:
    num_gpus = generator.choice((1, 2, 4) if small else (1, 2, 4, 8))
    pcie = generator.choice((12, 25, 50)) * _GB
    is_linked = generator.random() < 0.6
    half = max(1, num_gpus // 2)
    memory = generator.choice((80, 141)) * GIB
    gpus = tuple(
        Gpu(
            index=index,
            memory_bytes=memory,
            free_bytes=generator.choice((memory, memory * 3 // 4)),
            numa=index // half,
            nvlink_group=0 if is_linked else None,
            pcie_bytes_per_s=pcie,
        )
        for index in range(num_gpus)
    )
    switches: tuple[Switch, ...] = ()
    if num_gpus >= 4 and generator.random() < 0.5:
        pairs = [tuple(range(first, first + 2)) for first in range(0, num_gpus, 2)]
        switches = tuple(Switch(gpus=pair, bytes_per_s=pcie * generator.choice((1, 1.5))) for pair in pairs)
    disks = generator.choice((1, 2, 4)) if has_disks else 0
    return Node(
        id=NodeId("n"),
        gpus=gpus,
        memory_bytes=2048 * GIB,
        pool_bytes=512 * GIB,
        disks=tuple(Disk(name=f"nvme{index}", bytes_per_s=generator.choice((3, 7)) * _GB) for index in range(disks)),
        nics=(Nic(name="eth0", bytes_per_s=generator.choice((3.125, 12.5, 25, 50)) * _GB),),
        switches=switches,
    )


def _manifest(num_layers: int, layer_mib: int) -> Manifest:
    """Layers of two matrices, split by rows and by columns, and a norm; four files."""
    infos: dict[str, TensorInfo] = {}
    sizes = [0] * 4
    for layer in range(num_layers):
        file = layer * len(sizes) // num_layers
        for leaf, mib in (("row", layer_mib * 2 // 3), ("column", layer_mib // 3), ("norm", 1)):
            shape = (1024, mib * MIB // 1024)
            name = f"model.layers.{layer}.{leaf}"
            begin = sizes[file]
            sizes[file] += mib * MIB
            infos[name] = TensorInfo(name, DType.U8, shape, file, begin, sizes[file])
    files = tuple(FileInfo(path=f"{i}.safetensors", size_bytes=size, data_begin=0) for i, size in enumerate(sizes))
    return Manifest(uri="file:///random", root="/random", files=files, tensors=infos)


def preset_cases() -> Iterator[tuple[str, Case]]:
    """(preset, case): a model that half fills the GPUs of one copy, cut in several ways."""
    for name in preset_names():
        topology = preset(name)
        tp = min(8, min(len(node.gpus) for node in topology.nodes))
        groups = topology.num_gpus // tp
        meshes = {
            (1, 1),
            (2, 1),
            (1, 2),
            (min(groups, 8), 1),
            (min(groups, 8), max(1, groups // 8)),
            (1, groups),
            (max(1, groups // 2), 1),
        }
        for pp, dp in sorted(meshes):
            width = tp if pp * dp <= groups else tp // 2
            if pp > _MAX_STAGES or width * pp * dp > topology.num_gpus or not width:
                continue
            parallel = Parallel(tp=width, pp=pp, dp=dp)
            least = min(gpu.free_bytes for node in topology.nodes for gpu in node.gpus)
            layers = 8 * max(1, pp)
            manifest = _manifest(layers, max(3, width * pp * least // 2 // layers // MIB))
            demands = build_demands(manifest, parallel, rules=_RULES, allow_replication=True)
            yield name, Case(f"{name}: {parallel}", manifest, demands, topology)
