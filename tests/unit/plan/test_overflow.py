"""Models larger than their GPUs: what stays in host memory, and when that is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megamind_ray.config import Config
from megamind_ray.core.manifest import FileInfo, Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.errors import CapacityError, RequestError
from megamind_ray.planning import build_demands
from megamind_ray.planning.overflow import OverflowPlan, plan_overflow

MIB, GIB = 1 << 20, 1 << 30
MakeNode = Callable[..., Node]


def model(layers: int, *, dense_mib: int, expert_mib: int = 0, num_experts: int = 0, active: int = 0) -> Manifest:
    """Layers of one dense matrix and some experts each, in one file."""
    infos: dict[str, TensorInfo] = {}
    at = 1000

    def add(name: str, mib: int) -> None:
        nonlocal at
        infos[name] = TensorInfo(name, DType.U8, (1024, mib * 1024), 0, at, at + mib * MIB)
        at += mib * MIB

    for layer in range(layers):
        add(f"model.layers.{layer}.mlp.up.weight", dense_mib)
        for expert in range(num_experts):
            add(f"model.layers.{layer}.mlp.experts.{expert}.weight", expert_mib)
    config: dict[str, object] = {"num_experts": num_experts, "num_experts_per_tok": active} if num_experts else {}
    files = (FileInfo(path="model.safetensors", size_bytes=at, data_begin=1000),)
    return Manifest(uri="file:///m", root="/m", files=files, tensors=infos, config=config)


def overflow(manifest: Manifest, *nodes: Node, parallel: Parallel = Parallel()) -> OverflowPlan:  # noqa: B008
    demands = build_demands(manifest, parallel, allow_replication=True)
    return plan_overflow(manifest, demands, Topology(nodes=nodes), config=Config())


def test_nothing_overflows_where_everything_fits(node: MakeNode) -> None:
    plan = overflow(model(4, dense_mib=100), node("n0", [1]))

    assert plan.host_bytes == 0
    assert plan.nodes == ()
    assert plan.pass_s == 0
    assert plan.ranks[0].device_bytes == plan.ranks[0].need_bytes == 400 * MIB


def test_what_does_not_fit_beside_two_slots_stays_in_the_pool(node: MakeNode) -> None:
    plan = overflow(model(16, dense_mib=100), node("n0", [1]))  # 1,600 MiB onto 1,024

    (rank,) = plan.ranks
    assert rank.slot_bytes == 2 * 100 * MIB
    assert rank.device_bytes + rank.slot_bytes == 1024 * MIB
    assert rank.device_bytes + rank.host_bytes == 1600 * MIB
    assert plan.nodes[0].host_bytes == rank.host_bytes


def test_experts_go_first_and_take_slots_of_one_expert(node: MakeNode) -> None:
    plan = overflow(model(4, dense_mib=100, expert_mib=10, num_experts=40, active=4), node("n0", [1]))

    (rank,) = plan.ranks
    assert rank.need_bytes == 4 * 500 * MIB
    assert rank.slot_bytes == 2 * 10 * MIB
    assert rank.host_bytes == rank.expert_bytes == (2000 + 20 - 1024) * MIB


def test_one_token_waits_for_the_experts_that_it_needs_alone(node: MakeNode) -> None:
    plan = overflow(model(4, dense_mib=100, expert_mib=10, num_experts=40, active=4), node("n0", [1]))

    assert plan.token_s is not None
    assert plan.token_s == pytest.approx(plan.pass_s * 4 / 40)


def test_streaming_takes_what_the_link_takes(node: MakeNode) -> None:
    slow = node("n0", [1])
    slow = replace(slow, gpus=tuple(replace(gpu, pcie_bytes_per_s=1e9) for gpu in slow.gpus))

    plan = overflow(model(16, dense_mib=100), slow)

    assert plan.pass_s == pytest.approx(plan.host_bytes / 1e9)


def test_replicas_on_one_node_share_the_pool(node: MakeNode) -> None:
    one = overflow(model(16, dense_mib=100), node("n0", [1]))
    two = overflow(model(16, dense_mib=100), node("n0", [1, 1]), parallel=Parallel(dp=2))

    assert two.host_bytes == one.host_bytes
    assert [rank.host_bytes for rank in two.ranks] == [one.host_bytes] * 2


def test_a_pool_that_is_too_small_says_how_large_an_object_store_it_takes(node: MakeNode) -> None:
    plan = overflow(model(16, dense_mib=100), node("n0", [1], pool_gib=0.5))

    (pool,) = plan.nodes
    assert pool.host_bytes == (1600 + 200 - 1024) * MIB
    assert pool.room_bytes == int(0.5 * GIB * 0.75)
    assert not pool.fits
    assert pool.needed_pool_bytes == pytest.approx(pool.host_bytes / 0.75, abs=1)


def test_a_node_without_memory_for_what_overflows_is_refused(node: MakeNode) -> None:
    small = replace(node("n0", [1], pool_gib=0.5), memory_bytes=GIB)

    with pytest.raises(CapacityError, match=r"node n0: .* overflow into its pool") as refused:
        overflow(model(16, dense_mib=100), small)

    assert refused.value.free_bytes == GIB


def test_a_gpu_without_room_for_two_units_is_refused(node: MakeNode) -> None:
    with pytest.raises(CapacityError, match="two slots"):
        overflow(model(2, dense_mib=800), node("n0", [1]))


def test_more_ranks_than_gpus_are_refused(node: MakeNode) -> None:
    with pytest.raises(RequestError, match="needs 2 GPUs"):
        overflow(model(2, dense_mib=10), node("n0", [1]), parallel=Parallel(dp=2))


def test_a_gpu_that_is_partly_taken_keeps_less(node: MakeNode) -> None:
    taken = node("n0", [1])
    taken = replace(taken, gpus=(Gpu(index=0, memory_bytes=80 * GIB, free_bytes=GIB // 2),))

    free, less = overflow(model(16, dense_mib=100), node("n0", [1])), overflow(model(16, dense_mib=100), taken)

    assert less.host_bytes - free.host_bytes == GIB // 2
