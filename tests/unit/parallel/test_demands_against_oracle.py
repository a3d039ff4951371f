"""Every rank's tensors, bit for bit, against the slow and independent oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megamind_ray.core.demands import Demands
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.planning.demands import build_demands
from megamind_ray.testing.checkpoints import CHECKPOINTS
from megamind_ray.testing.oracle import expected_state_dict

Checkpoint = Callable[[str], Manifest]
Execute = Callable[[Demands, Manifest], list[dict[str, tuple[tuple[int, ...], bytes]]]]

MESHES = [
    Parallel(),
    *(Parallel(tp=tp) for tp in (2, 3, 4)),
    Parallel(tp=2, pp=2),
    Parallel(dp=2, tp=2),
    Parallel(dp=2, tp=3, pp=2),
]
MOE_MESHES = [
    Parallel(tp=2, ep=2),
    Parallel(tp=4, ep=2),
    Parallel(tp=4, ep=4, pp=2),
    Parallel(dp=2, tp=2, ep=4),
    Parallel(dp=2, tp=2, ep=2, pp=2),
]
MOE = [name for name in CHECKPOINTS if name.startswith(("mixtral", "qwen3_moe", "deepseek", "gpt_oss", "switch"))]
# 4 key and value heads cannot be shared by 3 ranks; neither can 2.
NOT_BY_THREE = {"llama", "llama-kv2", "mistral", "mixtral", "qwen3_moe", "gpt_oss"}

CASES = [
    (name, mesh)
    for name in CHECKPOINTS
    for mesh in [*MESHES, *(MOE_MESHES if name in MOE else [])]
    if mesh.tp != 3 or name not in NOT_BY_THREE
]


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=[f"{name}-{mesh}" for name, mesh in CASES])
def test_every_rank_gets_what_slicing_whole_tensors_gives(
    name: str, mesh: Parallel, checkpoint: Checkpoint, execute: Execute
) -> None:
    manifest = checkpoint(name)
    ranks = execute(build_demands(manifest, mesh), manifest)
    for rank, got in enumerate(ranks):
        expected = expected_state_dict(manifest.root, mesh, rank)
        assert {n: shape for n, (shape, _) in got.items()} == {n: tuple(t.shape) for n, t in expected.items()}
        for tensor_name, tensor in expected.items():
            assert got[tensor_name][1] == tensor.flatten().view(torch.uint8).numpy().tobytes(), (rank, tensor_name)
