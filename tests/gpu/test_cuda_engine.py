"""What only a CUDA device can show; skipped, with the reason, where there is none."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import megamind_ray as mm
from megamind_ray.config import Config, RoutingConfig
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.program import View
from megamind_ray.core.tensor import DType
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.device.arena import POISON
from megamind_ray.device.cuda import CudaArena
from megamind_ray.device.memory import device_budget_bytes, gpu_facts
from megamind_ray.device.strided import Runs
from megamind_ray.engine.local_load import load_plan
from megamind_ray.errors import CapacityError, RequestError
from megamind_ray.io import open_manifest
from megamind_ray.planning.build import build_plan
from megamind_ray.planning.demands import build_demands
from megamind_ray.testing.checkpoints import llama_checkpoint

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def arena() -> CudaArena:
    return CudaArena(8 * MIB, poison=True)


def _view(nbytes: int, shape: tuple[int, ...], dtype: DType = DType.U8) -> View:
    return View(name="w", tensor=0, dtype=dtype, shape=shape, offset=0, nbytes=nbytes)


def test_contiguous_writes_arrive(arena: CudaArena) -> None:
    allocation = arena.allocate(MIB)
    values = torch.randn(1000)

    ticket = arena.write(allocation, Runs(0, 4000, 1, 4000), values.view(torch.uint8).numpy())
    assert ticket is not None
    ticket.wait()

    tensor = arena.tensor(allocation, _view(4000, (10, 100), DType.F32))
    assert tensor.device == torch.device("cuda:0")
    assert torch.equal(tensor.cpu().flatten(), values)
    assert tensor.untyped_storage().nbytes() == 4000


def test_strided_writes_arrive_and_touch_nothing_else(arena: CudaArena) -> None:
    allocation = arena.allocate(MIB)
    zeros = arena.write(allocation, Runs(0, 32, 1, 32), np.zeros(32, np.uint8))
    assert zeros is not None
    zeros.wait()
    source = np.arange(1, 7, dtype=np.uint8)
    source.flags.writeable = False

    ticket = arena.write(allocation, Runs(1, 2, 3, 4), source)
    assert ticket is not None
    ticket.wait()

    held = arena.tensor(allocation, _view(12, (12,))).cpu().tolist()
    assert held == [0, 1, 2, 0, 0, 3, 4, 0, 0, 5, 6, 0]


def test_memory_is_kept_while_a_tensor_lives_and_poisoned_after(arena: CudaArena) -> None:
    allocation = arena.allocate(1024, 1)
    tensor = arena.tensor(allocation, _view(16, (16,)))
    with pytest.raises(RequestError, match="still in use by 1"):
        arena.free(allocation)
    del tensor
    gc.collect()
    arena.free(allocation)

    again = arena.tensor(arena.allocate(1024, 1), _view(16, (16,)))
    assert (again == POISON).all()


def test_a_budget_larger_than_the_gpu_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="does not fit"):
        CudaArena(1 << 50)
    with pytest.raises(CapacityError, match="device cuda:0"):
        device_budget_bytes("cuda:0", 1 << 50)


def test_nvml_knows_the_gpu() -> None:
    facts = gpu_facts()

    assert facts
    assert facts[0].memory.total_bytes > 0
    assert facts[0].uuid


@pytest.mark.parametrize("force_pool", [False, True], ids=["direct", "pool"])
def test_a_plan_fills_gpu_arenas_with_the_right_bytes(tmp_path: Path, force_pool: bool) -> None:
    folder = llama_checkpoint(tmp_path, tied=False)
    config = Config(routing=RoutingConfig(force_pool=force_pool, min_direct_bytes=0))
    parallel = Parallel(tp=2)
    manifest = open_manifest(folder)
    gpus = tuple(Gpu(index=index, memory_bytes=1 << 30, free_bytes=1 << 30) for index in range(2))
    topology = Topology(nodes=(Node(id="n0", gpus=gpus, memory_bytes=8 << 30, pool_bytes=1 << 30),))
    plan = build_plan(manifest, build_demands(manifest, parallel), topology, config=config)
    arena = CudaArena(64 * MIB)

    sessions = load_plan(plan, manifest, config, [arena, arena]).sessions

    whole = mm.load_state_dict(folder)
    name = "model.layers.0.mlp.down_proj.weight"
    parts = [session.state_dict()[name].cpu().view(torch.uint8) for session in sessions]
    assert torch.equal(torch.cat(parts, 1), whole[name].view(torch.uint8))


def test_load_file_gives_gpu_tensors_with_storages_of_their_own(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(300, 7).bfloat16(), "b": torch.arange(5), "none": torch.empty(0, 3)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)

    loaded = mm.load_file(path, device="cuda")

    for name, tensor in tensors.items():
        assert loaded[name].device.type == "cuda"
        assert torch.equal(loaded[name].cpu(), tensor)
        assert loaded[name].untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("start", ["cuda", "meta"])
def test_load_into_fills_a_module_on_the_gpu(tmp_path: Path, start: str) -> None:
    source = torch.nn.Linear(64, 32)
    path = tmp_path / "x.safetensors"
    save_file({name: tensor.detach() for name, tensor in source.state_dict().items()}, path)
    with torch.device(start):
        module = torch.nn.Linear(64, 32)

    mm.load_into(module, path, device="cuda")

    assert module.weight.device.type == "cuda"
    assert torch.equal(module.weight.cpu(), source.weight)
    assert torch.equal(module.bias.cpu(), source.bias)
