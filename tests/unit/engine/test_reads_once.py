"""What is read from storage, counted at the read calls, is what the ranks demand: once, whatever the mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamind_ray.config import load_config
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.local_load import load_plan
from megamind_ray.io import open_manifest
from megamind_ray.planning import build_demands, build_plan
from megamind_ray.testing.checkpoints import llama_checkpoint

MESHES = [Parallel(tp=4), Parallel(tp=4, dp=2), Parallel(tp=2, pp=2), Parallel(dp=2)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """168 MiB: an embedding that several extents share, column and row slices, two layers, two files."""
    return llama_checkpoint(tmp_path_factory.mktemp("once") / "llama", total_bytes=176 * 10**6, num_files=2)


@pytest.mark.parametrize("force_pool", [False, True], ids=["direct where it can", "pool"])
@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_each_byte_is_read_once(large: Path, parallel: Parallel, force_pool: bool) -> None:
    config = load_config(overrides={"routing": {"force_pool": force_pool}}, environ={})
    manifest = open_manifest(large)
    gpus = tuple(Gpu(index=index, memory_bytes=1 << 30, free_bytes=1 << 30) for index in range(4))
    nodes = tuple(Node(id=f"n{index}", gpus=gpus, memory_bytes=8 << 30, pool_bytes=1 << 30) for index in range(2))
    demands = build_demands(manifest, parallel)
    plan = build_plan(manifest, demands, Topology(nodes=nodes), config=config)
    load = load_plan(plan, manifest, config, [HostArena(256 << 20) for _ in parallel.ranks])
    for session in load.sessions:
        session.release()
    assert load.report.bytes_from_storage == demands.bytes_total == manifest.nbytes > 64 << 20
    assert load.report.bytes_retried == 0


def test_a_part_of_the_checkpoint_costs_a_part_of_the_reads(large: Path) -> None:
    """Chunks that are partly demanded are partly read: the union of the ranges, not the chunks around them."""
    config = load_config(environ={})
    manifest = open_manifest(large)
    demands = build_demands(manifest, Parallel(), include=["*.mlp.*"])
    node = Node(
        id="n0", gpus=(Gpu(index=0, memory_bytes=1 << 30, free_bytes=1 << 30),), memory_bytes=0, pool_bytes=1 << 30
    )
    plan = build_plan(manifest, demands, Topology(nodes=(node,)), config=config)
    load = load_plan(plan, manifest, config, [HostArena(256 << 20)])
    wanted = sum(tensor.nbytes for name, tensor in manifest.tensors.items() if ".mlp." in name)
    assert demands.bytes_total == wanted < manifest.nbytes / 2
    assert wanted <= load.report.bytes_from_storage <= wanted * 1.01
