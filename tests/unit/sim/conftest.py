"""Plans of checkpoints that need not exist, and hardware for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megamind_ray.config import Config, IoConfig, PlacementConfig, RoutingConfig
from megamind_ray.core.ids import NodeId
from megamind_ray.core.manifest import FileChecksums, FileInfo, Manifest, Reference
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.core.topology import Disk, Gpu, Host, Nic, Node, Topology
from megamind_ray.planning import build_demands, build_plan
from megamind_ray.units import GIB, MIB

HIDDEN, LAYERS = 1024, 4
SHAPES = {
    "model.embed_tokens.weight": (8192, HIDDEN),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
            "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (3 * HIDDEN, HIDDEN),
            "mlp.up_proj": (3 * HIDDEN, HIDDEN),
            "mlp.down_proj": (HIDDEN, 3 * HIDDEN),
            "input_layernorm": (HIDDEN,),
        }.items()
    },
    "lm_head.weight": (8192, HIDDEN),
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
CONFIG = Config(io=IoConfig(chunk_bytes=MIB, extent_bytes=4 * MIB), placement=PlacementConfig(policy="first_fit"))


@pytest.fixture(scope="session")
def config() -> Config:
    """Small chunks and extents."""
    return CONFIG


def llama(*, root: str = "/models/llama", referenced: bool = False) -> Manifest:
    """A llama of 131 MB in one file."""
    tensors, offset = {}, 1000
    for name, shape in SHAPES.items():
        elements = 1
        for size in shape:
            elements *= size
        tensors[name] = TensorInfo(name, DType.BF16, shape, 0, offset, offset + 2 * elements)
        offset += 2 * elements
    file = FileInfo(path="model.safetensors", size_bytes=offset, data_begin=1000)
    num_chunks = -(-(offset - 1000) // MIB)
    sums = FileChecksums(header_crc32=0, chunks_crc32=(0,) * num_chunks)
    reference = Reference(origin="sidecar", chunk_bytes=MIB, files=(sums,))
    return Manifest(
        uri=root, root=root, files=(file,), tensors=tensors, config=LLAMA, reference=reference if referenced else None
    )


def make_topology(num_nodes: int = 2, gpus: int = 2, *, disk: float = 1e9, pool: int = GIB, **host: float) -> Topology:
    """Equal nodes; processors and memory are those of a recent server unless ``host`` says otherwise."""
    node = Node(
        id=NodeId("n0"),
        gpus=tuple(Gpu(index=index, memory_bytes=8 * GIB, free_bytes=8 * GIB) for index in range(gpus)),
        memory_bytes=64 * GIB,
        pool_bytes=pool,
        disks=(Disk(name="nvme0", bytes_per_s=disk),),
        nics=(Nic(name="eth0", bytes_per_s=10e9),),
        host=replace(Host(), **host),  # type: ignore[arg-type]
    )
    return Topology(nodes=tuple(replace(node, id=NodeId(f"n{number}")) for number in range(num_nodes)), name="small")


def make_plan(
    parallel: Parallel,
    topology: Topology,
    *,
    root: str = "/models/llama",
    referenced: bool = False,
    force_pool: bool = False,
    keep: bool = False,
    config: Config = CONFIG,
) -> Plan:
    """A plan of ``llama``."""
    manifest = llama(root=root, referenced=referenced)
    config = replace(config, routing=RoutingConfig(force_pool=force_pool, min_direct_bytes=0))
    return build_plan(manifest, build_demands(manifest, parallel), topology, config=config, keep=keep)


@pytest.fixture(scope="session")
def topology_of() -> Callable[..., Topology]:
    return make_topology


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., Plan]:
    return make_plan


@pytest.fixture(scope="session")
def manifest_of() -> Callable[..., Manifest]:
    return llama
