"""Every rank of every mesh holds, bit for bit, what the safetensors library and slicing give; all in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from megamind_ray.config import Config
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.local_load import load_plan
from megamind_ray.io import open_manifest
from megamind_ray.planning.build import build_plan
from megamind_ray.planning.demands import build_demands
from megamind_ray.testing.checkpoints import (
    gpt_oss_checkpoint,
    llama_checkpoint,
    llama_fp8_checkpoint,
    mixtral_checkpoint,
)
from megamind_ray.testing.oracle import expected_state_dict

# With 12 KV heads every tp works; with 4, grouped-query attention is there and tp = 3 is refused.
DENSE = {
    "llama-tied": partial(llama_checkpoint, kv_heads=12),
    "llama-gqa": partial(llama_checkpoint, kv_heads=4),
    "llama-3-files": partial(llama_checkpoint, kv_heads=12, tied=False, num_files=3),
    "llama-fp8": partial(llama_fp8_checkpoint, kv_heads=12),
}
EXPERTS = {
    "mixtral": partial(mixtral_checkpoint, kv_heads=12),
    "gpt_oss-mxfp4": partial(gpt_oss_checkpoint, kv_heads=12),
}
CHECKPOINTS = DENSE | EXPERTS
BUDGET_BYTES = 32 << 20


def _meshes(name: str) -> list[Parallel]:
    """tp 1-4, pp 1-2, dp 1-2, and for experts ep 1, 2, 4 where it divides dp x tp."""
    tps = (1, 2, 4) if name == "llama-gqa" else (1, 2, 3, 4)
    sizes = itertools.product(tps, (1, 2), (1, 2), (1, 2, 4) if name in EXPERTS else (1,))
    return [Parallel(tp=tp, pp=pp, dp=dp, ep=ep) for tp, pp, dp, ep in sizes if dp * tp % ep == 0]


CASES = [(name, parallel) for name in CHECKPOINTS for parallel in _meshes(name)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("matrix")
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = CHECKPOINTS[name](root / name)
        return written[name]

    return get


@pytest.fixture(scope="module")
def two_nodes() -> Topology:
    gpus = tuple(Gpu(index=index, memory_bytes=1 << 30, free_bytes=1 << 30) for index in range(8))
    return Topology(
        nodes=tuple(Node(id=f"n{index}", gpus=gpus, memory_bytes=8 << 30, pool_bytes=1 << 30) for index in range(2))
    )


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    # Random bits hold NaNs, which equal nothing: bytes are compared.
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(it.contiguous().reshape(-1).view(torch.uint8) for it in (left, right)))


@pytest.mark.parametrize(("name", "parallel"), CASES, ids=[f"{name}-{parallel}" for name, parallel in CASES])
def test_every_rank_holds_exactly_its_slices(
    name: str, parallel: Parallel, folder_of: Callable[[str], Path], two_nodes: Topology, config: Config
) -> None:
    folder = folder_of(name)
    manifest = open_manifest(folder)
    demands = build_demands(manifest, parallel, allow_replication=True)
    plan = build_plan(manifest, demands, two_nodes, config=config)

    load = load_plan(plan, manifest, config, [HostArena(BUDGET_BYTES) for _ in parallel.ranks])

    assert load.report.bytes_from_storage == plan.bytes_from_storage
    for rank, session in enumerate(load.sessions):
        expected, held = expected_state_dict(folder, parallel, rank), session.state_dict()
        assert held.keys() == expected.keys()
        wrong = [key for key, tensor in expected.items() if not _same_bits(held[key], tensor)]
        assert wrong == [], f"rank {rank}"
