"""Whole plans of small checkpoints: what is refused and why, what the tables and notes say, what stays in the pools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megamind_ray.config import Config, IoConfig, PlacementConfig, PoolConfig, RoutingConfig
from megamind_ray.core.demands import Demands, SliceTable
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.line import credit_limits
from megamind_ray.core.manifest import FileChecksums, FileInfo, Manifest, Reference
from megamind_ray.core.parallel import Parallel, Replicate, Rule, Shard
from megamind_ray.core.plan import TABLES, Plan
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.core.topology import Node, Topology
from megamind_ray.errors import CapacityError, RequestError
from megamind_ray.planning import build_demands, build_plan, choose_keep_blocks, compile_agent, compile_rank, load_facts
from megamind_ray.planning.grid import Grid, rows_of
from megamind_ray.policies.placement.base import PlacementDecision, PlacementRequest, Seat

MIB, GIB = 1 << 20, 1 << 30
LOAD = LoadId("m#1")
MakeNode = Callable[..., Node]
CHECKOUT = Path(__file__).parents[3]


def checkpoint(*sizes_mib: float, reference: bool = False) -> Manifest:
    """One file with matrices of 1024 rows of bytes."""
    infos, at = {}, 1000
    for index, size in enumerate(sizes_mib):
        nbytes = int(size * MIB)
        infos[f"t{index}"] = TensorInfo(f"t{index}", DType.U8, (1024, nbytes // 1024), 0, at, at + nbytes)
        at += nbytes
    files = (FileInfo(path="model.safetensors", size_bytes=at, data_begin=1000),)
    num_chunks = -(-(at - 1000) // (4 * MIB))
    sums = (FileChecksums(header_crc32=1, chunks_crc32=tuple(range(num_chunks))),)
    return Manifest(
        uri="file:///m",
        root="/m",
        files=files,
        tensors=infos,
        config={"num_attention_heads": 12},
        reference=Reference(origin="/m/megamind-checksums.json", chunk_bytes=4 * MIB, files=sums)
        if reference
        else None,
    )


def sharded(manifest: Manifest, parallel: Parallel, dim: int = 0) -> Demands:
    return build_demands(manifest, parallel, rules=[Rule(pattern="*", placement=Shard(dim=dim), stage="all")])


def replicated(manifest: Manifest, parallel: Parallel) -> Demands:
    return build_demands(manifest, parallel, rules=[Rule(pattern="*", placement=Replicate(), stage="all")])


def plan_of(manifest: Manifest, demands: Demands, *nodes: Node, keep: bool = False, **sections: object) -> Plan:
    return build_plan(manifest, demands, Topology(nodes=nodes), config=Config(**sections), keep=keep)  # type: ignore[arg-type]


def test_more_ranks_than_gpus_says_what_the_cluster_has(node: MakeNode) -> None:
    manifest = checkpoint(8)
    with pytest.raises(RequestError, match=r"tp=4 needs 4 GPUs, the cluster has 3 \(n0 has 2, n1 has 1\)"):
        plan_of(manifest, sharded(manifest, Parallel(tp=4)), node("n0", [80, 80]), node("n1", [80]))


def test_too_large_for_the_gpus_names_gpu_need_free_space_and_the_mesh_that_fits(node: MakeNode) -> None:
    manifest = checkpoint(96)
    with pytest.raises(CapacityError) as caught:
        plan_of(manifest, sharded(manifest, Parallel(tp=2)), node("n0", [0.03] * 4))
    error = caught.value
    assert error.where == "GPU n0:0"
    assert (error.needed_bytes, error.free_bytes) == (48 * MIB, int(0.03 * GIB))
    assert "rank 0 (pp=0 dp=0 tp=0) needs 48.00 MiB" in error.message
    assert "n0:0, has 30.72 MiB free of 80.00 GiB" in error.message
    assert "tp=4 would need about 24.00 MiB per GPU and fits" in error.message
    assert "free 17.28 MiB on n0:0, 17.28 MiB on n0:1" in error.message


def test_the_mesh_that_is_advised_does_fit(node: MakeNode) -> None:
    manifest = checkpoint(96)
    assert plan_of(manifest, sharded(manifest, Parallel(tp=4)), node("n0", [0.03] * 4))


def test_a_mesh_that_does_not_divide_the_heads_is_not_advised(node: MakeNode) -> None:
    manifest = checkpoint(96)
    # tp=8 would fit, but 12 heads do not divide by 8; tp=12 is the next that does.
    with pytest.raises(CapacityError, match=r"tp=12 would need about 8\.00 MiB"):
        plan_of(manifest, sharded(manifest, Parallel(tp=4)), node("n0", [0.015] * 12))


def test_what_is_replicated_does_not_shrink_with_tp(node: MakeNode) -> None:
    manifest = checkpoint(96)
    with pytest.raises(CapacityError) as caught:
        plan_of(manifest, replicated(manifest, Parallel(tp=1)), node("n0", [0.05, 0.05, 0.05]))
    assert "would need" not in caught.value.message
    assert "Smallest change that fits: free 44.80 MiB on n0:0" in caught.value.message


def test_one_gpu_with_too_little_free_space_is_the_one_named(node: MakeNode) -> None:
    manifest = checkpoint(96)
    with pytest.raises(CapacityError) as caught:
        plan_of(manifest, sharded(manifest, Parallel(tp=2)), node("n0", [80, 0.04]))
    assert caught.value.where == "GPU n0:1"
    assert "Smallest change that fits: free 7.04 MiB on n0:1" in caught.value.message


def test_a_pool_too_small_for_a_chunk_is_named_with_the_need(node: MakeNode) -> None:
    manifest = checkpoint(8)
    small = node("n0", [80, 80], pool_gib=8 / 1024)
    with pytest.raises(CapacityError) as caught:
        plan_of(manifest, sharded(manifest, Parallel(tp=2), dim=1), small)
    error = caught.value
    assert (error.where, error.needed_bytes, error.free_bytes) == ("pool of node n0", 8 * MIB, 6 * MIB)
    assert "extent 0 (bytes 1000-8389608 of model.safetensors)" in error.message
    assert "an object store of at least 10.67 MiB" in error.message


def test_a_pool_in_the_middle_of_a_line_needs_room_for_what_comes_from_either_side(node: MakeNode) -> None:
    """Else the load would begin, and end when the first block from one side does not fit a quarter of the pool."""
    manifest = checkpoint(64)
    demands = replicated(manifest, Parallel(dp=3))
    small, large = 40 / 1024, 48 / 1024
    with pytest.raises(CapacityError, match="blocks may take 7.50 MiB there") as caught:
        plan_of(manifest, demands, *(node(name, [80], pool_gib=small) for name in ("n0", "n1", "n2")))
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (8 * MIB, int(7.5 * MIB))
    assert plan_of(manifest, demands, *(node(name, [80], pool_gib=large) for name in ("n0", "n1", "n2")))


def test_kept_blocks_leave_room_for_what_comes_from_either_side(node: MakeNode) -> None:
    manifest = checkpoint(64)
    nodes = tuple(node(name, [80], pool_gib=64 / 1024) for name in ("n0", "n1", "n2"))
    plan = plan_of(manifest, replicated(manifest, Parallel(dp=3)), *nodes, keep=True)
    sizes = plan.tables["blocks"]["nbytes"].to_numpy()
    for name, kept in choose_keep_blocks(plan, Topology(nodes=nodes), Config()).items():
        left = 48 * MIB - int(sizes[kept].sum())
        assert credit_limits(left, ("up", "down"))["up"] >= sizes.max(), name


def test_a_small_pool_gets_smaller_extents(node: MakeNode) -> None:
    manifest = checkpoint(64)
    plan = plan_of(manifest, sharded(manifest, Parallel(tp=2), dim=1), node("n0", [80, 80], pool_gib=86 / 1024))
    extents = plan.tables["extents"]
    # Four extents of 16 MiB fit the 64.5 MiB that blocks may take.
    assert set((extents["end"].to_numpy() - extents["begin"].to_numpy()).tolist()) == {16 * MIB}


def test_no_pool_is_needed_where_every_byte_is_one_rank_s_own(node: MakeNode) -> None:
    manifest = checkpoint(32)
    plan = plan_of(manifest, sharded(manifest, Parallel(tp=1)), node("n0", [80], pool_gib=0))
    assert plan.tables["extents"]["route"].to_pylist() == ["direct"] * 4
    assert plan.pool_need_bytes == {}


def test_every_byte_goes_through_the_pool_where_that_is_forced(node: MakeNode) -> None:
    manifest = checkpoint(32)
    routing = RoutingConfig(force_pool=True)
    plan = plan_of(manifest, sharded(manifest, Parallel(tp=2)), node("n0", [80, 80]), routing=routing)
    assert set(plan.tables["extents"]["route"].to_pylist()) == {"pool"}
    assert plan.pool_need_bytes == {"n0": 32 * MIB}


def test_a_replicated_byte_is_read_once_and_counted_on_every_node(node: MakeNode) -> None:
    manifest = checkpoint(32)
    plan = plan_of(manifest, replicated(manifest, Parallel(dp=2)), node("n0", [80]), node("n1", [80]))
    assert plan.bytes_from_storage == plan.bytes_total == 32 * MIB
    assert (plan.bytes_to_device, plan.bytes_replicated) == (64 * MIB, 32 * MIB)
    assert plan.pool_need_bytes == {"n0": 32 * MIB, "n1": 32 * MIB}
    assert "32.00 MiB of the 64.00 MiB in device memory (50.0%) are further copies" in plan.notes[0]


def test_all_that_fits_is_kept(node: MakeNode) -> None:
    manifest = checkpoint(32)
    topology = Topology(nodes=(node("n0", [80, 80]),))
    plan = build_plan(manifest, sharded(manifest, Parallel(tp=2)), topology, config=Config(), keep=True)
    kept = choose_keep_blocks(plan, topology, Config())
    assert kept[NodeId("n0")].tolist() == list(range(len(plan.tables["blocks"])))
    assert plan.notes == ("all 32.00 MiB of blocks stay in the pools",)


def test_what_has_no_room_is_not_kept_and_said(node: MakeNode) -> None:
    manifest = checkpoint(64)
    topology = Topology(nodes=(node("n0", [80, 80], pool_gib=64 / 1024),))
    config = Config(io=IoConfig(chunk_bytes=MIB, extent_bytes=MIB), pool=PoolConfig(keep_fraction=0.5))
    plan = build_plan(manifest, sharded(manifest, Parallel(tp=2)), topology, config=config, keep=True)
    kept = choose_keep_blocks(plan, topology, config)[NodeId("n0")]
    assert plan.tables["blocks"]["nbytes"].to_numpy()[kept].sum() == 24 * MIB
    assert "40.00 MiB of 64.00 MiB cannot stay in the pools" in plan.notes[-1]


def test_one_copy_of_each_block_is_kept_before_replicas(node: MakeNode) -> None:
    manifest = checkpoint(32)
    nodes = (node("n0", [80], pool_gib=64 / 1024), node("n1", [80], pool_gib=64 / 1024))
    io = IoConfig(chunk_bytes=MIB, extent_bytes=MIB, pool_extent_bytes=MIB)
    config = Config(io=io, pool=PoolConfig(keep_fraction=0.5))
    plan = build_plan(manifest, replicated(manifest, Parallel(dp=2)), Topology(nodes=nodes), config=config, keep=True)
    kept = choose_keep_blocks(plan, Topology(nodes=nodes), config)
    # 16 MiB are each node's own, and 8 of the 24 MiB are left for what the other read.
    assert [len(blocks) for blocks in kept.values()] == [24, 24]
    assert len(np.unique(np.concatenate(list(kept.values())))) == 32


def test_a_sidecar_sets_the_grid_and_chunks_are_read_whole(node: MakeNode) -> None:
    manifest = checkpoint(5, 5, 5, reference=True)
    demands = build_demands(manifest, Parallel(tp=1), include=["t1"])
    plan = plan_of(manifest, demands, node("n0", [80]))
    assert plan.chunk_bytes == 4 * MIB
    assert plan.tables["extents"].select(["begin", "end"]).to_pylist() == [
        {"begin": 1000 + 4 * MIB, "end": 1000 + 12 * MIB}
    ]
    assert "3.00 MiB are read beyond what is demanded" in plan.notes[0]
    files = compile_rank(plan, manifest, Rank(0), LOAD).files
    assert files.reference_crc32[0].tolist() == [0, 1, 2, 3]
    assert files.reference_origin == "/m/megamind-checksums.json"


@pytest.mark.parametrize(
    ("chunk_kib", "gap_kib", "is_read"),
    [(8192, 1023, True), (8192, 1024, False), (512, 511, True), (512, 512, False)],
    ids=["below 1 MiB", "1 MiB", "below a small chunk", "a small chunk"],
)
def test_small_gaps_between_a_rank_s_own_columns_are_read_over(
    chunk_kib: int, gap_kib: int, is_read: bool, node: MakeNode
) -> None:
    # 1024 rows of which rank 0 has the first half each, and nobody asks for the other.
    manifest = checkpoint(2 * gap_kib)
    demands = sharded(manifest, Parallel(tp=2), dim=1)
    mine = demands.slices.consumers == demands.consumer_sets.index((0,))
    rows = {name: getattr(demands.slices, name)[mine] for name in SliceTable.__slots__}
    demands = replace(demands, slices=SliceTable(**rows))
    plan = plan_of(manifest, demands, node("n0", [80, 80]), io=IoConfig(chunk_bytes=chunk_kib << 10))
    assert demands.bytes_total == 1024 * gap_kib << 10
    assert plan.bytes_from_storage - demands.bytes_total == (1023 * gap_kib << 10 if is_read else 0)


@pytest.mark.parametrize(("dst_stride", "run_bytes"), [(4, 12), (8, 4)])
def test_runs_become_one_only_if_they_touch_on_both_sides(dst_stride: int, run_bytes: int) -> None:
    manifest = checkpoint(1)
    values = dict.fromkeys(SliceTable.__slots__, 0) | {"src_offset": 1000, "run_bytes": 4, "num_runs": 3}
    values |= {"src_stride_bytes": 4, "dst_stride_bytes": dst_stride}
    table = SliceTable(**{name: np.array([value], np.int64) for name, value in values.items()})
    grid = Grid(files=manifest.files, chunk_bytes=MIB, extent_bytes=MIB, max_gap_bytes=0)
    rows = rows_of(table, grid)
    assert (rows.end - rows.begin).tolist() == [12]
    assert rows.run.tolist() == [run_bytes]


def test_a_chunk_that_nobody_needs_is_not_read_though_it_is_a_small_gap(node: MakeNode) -> None:
    manifest = checkpoint(1, 1, 1)
    plan = plan_of(
        manifest,
        build_demands(manifest, Parallel(), include=["t0", "t2"]),
        node("n0", [80]),
        io=IoConfig(chunk_bytes=MIB, max_gap_bytes=MIB),
    )
    assert plan.bytes_from_storage == plan.bytes_total == 2 * MIB


def test_a_gap_is_not_read_without_a_sidecar(node: MakeNode) -> None:
    manifest = checkpoint(5, 5, 5)
    plan = plan_of(manifest, build_demands(manifest, Parallel(), include=["t0", "t2"]), node("n0", [80]))
    assert plan.bytes_from_storage == 10 * MIB


def test_views_are_aligned(node: MakeNode) -> None:
    manifest = checkpoint(1 / 1024, 5 / 1024)
    plan = plan_of(manifest, sharded(manifest, Parallel(tp=3)), node("n0", [80] * 3))
    assert all(offset % 256 == 0 for offset in plan.tables["views"]["offset"].to_pylist())
    assert plan.tables["ranks"]["arena_bytes"].to_pylist() == [512 + 1792, 512 + 1792, 512 + 1792]


def test_a_plan_without_a_byte_is_a_plan(node: MakeNode) -> None:
    manifest = checkpoint(0)
    plan = plan_of(manifest, sharded(manifest, Parallel(tp=2)), node("n0", [80, 80]))
    assert (plan.bytes_total, plan.bytes_from_storage, len(plan.tables["extents"])) == (0, 0, 0)
    assert len(compile_rank(plan, manifest, Rank(1), LOAD).views) == 1


def test_save_and_load_give_the_plan_back(node: MakeNode, tmp_path: Path) -> None:
    manifest = checkpoint(5, 32)
    demands = sharded(manifest, Parallel(tp=2), dim=1)
    plan = plan_of(manifest, demands, node("n0", [80, 80]))
    plan.save(tmp_path / "plan")
    again = Plan.load(tmp_path / "plan")
    assert set(again.tables) == set(TABLES)
    for name in TABLES:
        assert again.tables[name].to_pylist() == plan.tables[name].to_pylist()
    assert replace(again, tables={}) == replace(plan, tables={})
    program, expected = (compile_rank(item, manifest, Rank(1), LOAD) for item in (again, plan))
    np.testing.assert_array_equal(program.segments.dst_offset, expected.segments.dst_offset)
    assert program.views == expected.views
    assert load_facts(again, max_worker_restarts=1) == load_facts(plan, max_worker_restarts=1)


def _drop_a_table(folder: Path) -> None:
    (folder / "blocks.parquet").unlink()


def _cut_a_table(folder: Path) -> None:
    (folder / "blocks.parquet").write_bytes((folder / "blocks.parquet").read_bytes()[:40])


def _change_a_table(folder: Path) -> None:
    (folder / "blocks.parquet").write_bytes((folder / "ranks.parquet").read_bytes())


def _drop_a_field(folder: Path) -> None:
    path = folder / "plan.json"
    path.write_text(path.read_text().replace('"bytes_total"', '"bytes"'))


@pytest.mark.parametrize("damage", [_drop_a_table, _cut_a_table, _change_a_table, _drop_a_field])
def test_a_damaged_plan_is_refused(damage: Callable[[Path], None], node: MakeNode, tmp_path: Path) -> None:
    manifest = checkpoint(5)
    plan_of(manifest, sharded(manifest, Parallel()), node("n0", [80])).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(RequestError, match="the plan is damaged .*; plan again"):
        Plan.load(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"schema": "megamind.plan/0"}'])
def test_what_is_no_plan_of_this_release_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(RequestError, match="this release reads 'megamind.plan/2'; plan again"):
        Plan.load(tmp_path)


def test_a_plan_overwrites_nothing(node: MakeNode, tmp_path: Path) -> None:
    manifest = checkpoint(5)
    plan = plan_of(manifest, sharded(manifest, Parallel()), node("n0", [80]))
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="exists already"):
        plan.save(tmp_path)
    with pytest.raises(RequestError, match="cannot be written"):
        plan.save(tmp_path / "file" / "plan")


def test_the_configured_policy_is_used(node: MakeNode) -> None:
    manifest = checkpoint(8)
    nodes = [node("n0", [80]), node("n1", [1])]
    first = plan_of(manifest, sharded(manifest, Parallel()), *nodes, placement=PlacementConfig(policy="first_fit"))
    best = plan_of(manifest, sharded(manifest, Parallel()), *nodes)
    assert (first.tables["ranks"]["node"].to_pylist(), best.tables["ranks"]["node"].to_pylist()) == (["n0"], ["n1"])


def test_where_first_fit_fails_best_fit_is_advised(node: MakeNode) -> None:
    manifest = checkpoint(8)
    uneven = build_demands(
        manifest, Parallel(tp=2), rules=[Rule(pattern="*", placement=Shard(dim=0, unit=1000), stage="all")]
    )
    # The small rank comes first, and first_fit gives it the only GPU that holds the large one.
    swapped = replace(uneven, views=replace(uneven.views, rank=1 - uneven.views.rank), consumer_sets=((1,), (0,)))
    assert uneven.consumer_sets == ((0,), (1,))
    nodes = [node("n0", [0.01, 0.001])]
    with pytest.raises(CapacityError, match=r"fits: the configuration placement\.policy = 'best_fit' places it"):
        plan_of(manifest, swapped, *nodes, placement=PlacementConfig(policy="first_fit"))
    assert plan_of(manifest, swapped, *nodes).tables["ranks"]["gpu"].to_pylist() == [1, 0]


class Stubborn:
    """A policy that puts every rank on one GPU."""

    name = "stubborn"

    def place(self, request: PlacementRequest) -> PlacementDecision:
        seat = Seat(node=request.topology.nodes[0].id, gpu=0, reason="because")
        return PlacementDecision(seats=(seat,) * request.parallel.world)


def test_a_policy_s_wrong_proposal_is_refused_before_anything_is_planned(node: MakeNode) -> None:
    manifest = checkpoint(8)
    topology = Topology(nodes=(node("n0", [80, 80]),))
    with pytest.raises(RequestError, match="policy 'stubborn' proposed ranks 0 and 1 both on GPU n0:0: refused"):
        build_plan(manifest, sharded(manifest, Parallel(tp=2)), topology, config=Config(), placement=Stubborn())


def test_explain_says_what_who_where_and_why(node: MakeNode) -> None:
    manifest = checkpoint(16, 16)
    plan = plan_of(manifest, sharded(manifest, Parallel(tp=2), dim=1), node("n0", [80, 80]))
    text = plan.explain("t1")
    for part in (
        "t1: U8 [1024, 16384], 16.00 MiB",
        "placement: ",
        "why: user: *",
        "held by 2 of 2 ranks:",
        "rank 1 (pp=0 dp=0 tp=1) on n0:1: [1024, 8192], 8.00 MiB at arena offset 8388608",
        "ranks 0-1: 2 ranks of stage 0, dp=0 (32.00 MiB): tightest fit in NVLink group 0 of node n0",
        "on disk as t1, in 1 extent, 1 block:",
        "extent 0: model.safetensors [1000, 33555432), pool, read by the agent of n0",
        "because several ranks of one node need it: its agent reads it once",
        "block 0 (32.00 MiB, 16.00 MiB of this tensor) for ranks 0-1",
    ):
        assert part in text


def test_explain_knows_a_tied_tensor_by_both_names(node: MakeNode) -> None:
    manifest = replace(checkpoint(8), tied={"head": "t0"})
    plan = plan_of(manifest, sharded(manifest, Parallel()), node("n0", [80]))
    text = plan.explain("head")
    assert "asked for as head" in text
    assert "also under the name head (the same bytes)" in text
    assert [view.offset for view in compile_rank(plan, manifest, Rank(0), LOAD).views] == [0, 0]


def test_explain_finds_a_tensor_that_is_named_otherwise_on_disk(node: MakeNode) -> None:
    plan = plan_of(checkpoint(8), sharded(checkpoint(8), Parallel()), node("n0", [80]))
    renamed = replace(plan, disk_tensors=("experts.0.w1",))
    assert "asked for as experts.0.w1" in renamed.explain("experts.0.w1")
    assert "on disk as experts.0.w1, in 1 extent, 1 block:" in renamed.explain("t0")


def test_explain_lists_the_nearest_names_of_an_unknown_tensor(node: MakeNode) -> None:
    manifest = checkpoint(8, 8)
    plan = plan_of(manifest, sharded(manifest, Parallel()), node("n0", [80]))
    with pytest.raises(RequestError, match=r"no tensor 't11'; the nearest names are t1$"):
        plan.explain("t11")


def test_a_rank_or_an_extent_that_is_not_there_is_refused(node: MakeNode) -> None:
    manifest = checkpoint(8)
    plan = plan_of(manifest, sharded(manifest, Parallel()), node("n0", [80]))
    with pytest.raises(RequestError, match="rank 1: the plan has ranks 0 to 0"):
        compile_rank(plan, manifest, Rank(1), LOAD)
    none = np.zeros(0, np.int64)
    with pytest.raises(RequestError, match=r"extents \[3\]: the plan has extents 0 to 0"):
        compile_agent(plan, manifest, NodeId("n0"), LOAD, credit_bytes=1, keep_blocks=none, extents=[3])  # type: ignore[list-item]


def test_the_policies_refuse_to_be_a_second_package(tmp_path: Path) -> None:
    (tmp_path / "policies").symlink_to(CHECKOUT / "megamind_ray" / "policies")
    run = subprocess.run(
        [sys.executable, "-c", "import policies"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert "Import 'megamind_ray.policies' instead" in run.stderr
