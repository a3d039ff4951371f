from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megamind_ray.config import Config
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.parallel import Parallel
from megamind_ray.device.arena import HostArena
from megamind_ray.device.strided import Bytes, Runs
from megamind_ray.engine.cut import BlockCutter
from megamind_ray.engine.session import RankSession
from megamind_ray.errors import CapacityError, ClusterError, IntegrityError, RequestError, SourceError
from megamind_ray.planning.compile import compile_agent, compile_rank
from megamind_ray.testing.checkpoints import llama_checkpoint

LOAD = LoadId("m#0")
PlanFor = Callable[..., Any]


class _Delivery:
    """A rank's session and the blocks that its node agent cuts for it."""

    def __init__(self, llama: Any, plan_for: PlanFor, config: Config, parallel: Parallel, rank: int = 0) -> None:
        plan, manifest = plan_for(llama.path, parallel, config)
        self.program = compile_rank(plan, manifest, Rank(rank), LOAD)
        self.arena = HostArena(4 << 20, poison=True)
        self.session = RankSession(self.program, self.arena, config)
        agent = compile_agent(plan, manifest, NodeId("n0"), LOAD, credit_bytes=0, keep_blocks=np.empty(0, np.int64))
        stored = np.fromfile(llama.file, np.uint8)
        cutter = BlockCutter(agent.blocks, agent.segments)
        own = set(self.program.blocks.block.tolist())
        self.blocks: list[tuple[int, Bytes, Any]] = []
        for row, extent in enumerate(agent.extents.extent.tolist()):
            begin, end = int(agent.extents.begin[row]), int(agent.extents.end[row])
            for block in cutter.cut(extent, begin, stored[begin:end], only=own):
                self.blocks.append((block.block, block.data.copy(), block.crc32))

    def deliver(self) -> None:
        for block in self.blocks:
            self.session.apply(*block)


@pytest.fixture
def delivery(llama: Any, plan_for: PlanFor, pool_config: Config) -> _Delivery:
    return _Delivery(llama, plan_for, pool_config, Parallel(tp=2), rank=1)


def test_blocks_in_any_order_give_the_slices_of_the_rank(delivery: _Delivery, llama: Any) -> None:
    for block in reversed(delivery.blocks):
        assert delivery.session.apply(*block)
    delivery.session.finish()

    tensors = delivery.session.state_dict()

    for name, dim in (("mlp.down_proj", 1), ("self_attn.o_proj", 1), ("mlp.up_proj", 0)):
        whole = llama.tensors[f"model.layers.2.{name}.weight"]
        assert torch.equal(tensors[f"model.layers.2.{name}.weight"], whole.chunk(2, dim)[1])


def test_a_block_that_comes_again_is_ignored_and_counted(delivery: _Delivery) -> None:
    first = delivery.blocks[0]

    assert delivery.session.apply(*first)
    assert not delivery.session.apply(*first)

    assert delivery.session.num_duplicates == 1
    program = delivery.session.program
    (row,) = np.flatnonzero(program.blocks.block == first[0]).tolist()
    begin, end = program.blocks.first_segment[row : row + 2].tolist()
    assert delivery.session.bytes_to_device == int(program.segments.nbytes[begin:end].sum()) > 0


def test_threads_that_bring_the_same_blocks_write_each_once(delivery: _Delivery) -> None:
    taken: list[bool] = []

    def bring() -> None:
        taken.extend(delivery.session.apply(*block) for block in delivery.blocks)

    threads = [threading.Thread(target=bring) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    delivery.session.finish()

    assert sum(taken) == len(delivery.blocks)
    assert delivery.session.num_duplicates == 3 * len(delivery.blocks)


def test_a_damaged_segment_is_named_and_its_block_may_come_again(delivery: _Delivery) -> None:
    block, data, sums = max(delivery.blocks, key=lambda item: item[1].nbytes)
    damaged = data.copy()
    damaged[-1] ^= 1

    with pytest.raises(IntegrityError, match=rf"rank 1: block {block} of .*arrived damaged.*read again") as caught:
        delivery.session.apply(block, damaged, sums)

    assert caught.value.tensor in {view.name for view in delivery.program.views}
    assert caught.value.begin is not None
    assert block in delivery.session.missing_blocks
    assert delivery.session.apply(block, data, sums)
    assert block not in delivery.session.missing_blocks


def test_a_segment_that_lands_in_rows_is_checked_before_it_is_copied(
    llama: Any, plan_for: PlanFor, pool_config: Config
) -> None:
    # Rows of a stored tensor land in rows of the fused one; here a hand-made stride does the same.
    delivery = _Delivery(llama, plan_for, pool_config, Parallel())
    segments = delivery.program.segments
    row = int(np.argmax(segments.num_runs == 1))
    run = int(segments.run_bytes[row]) // 2
    columns = {name: getattr(segments, name).copy() for name in segments.__slots__}
    columns["run_bytes"][row], columns["num_runs"][row] = run, 2
    columns["src_stride_bytes"][row], columns["dst_stride_bytes"][row] = run, run + 2
    program = replace(
        delivery.program, segments=type(segments)(**columns), arena_bytes=delivery.program.arena_bytes + 2
    )
    session = RankSession(program, HostArena(4 << 20), pool_config)
    owner = int(np.searchsorted(program.blocks.first_segment, row, side="right")) - 1
    block, data, sums = next(item for item in delivery.blocks if item[0] == int(program.blocks.block[owner]))
    damaged = data.copy()
    damaged[int(columns["block_offset"][row])] ^= 1

    with pytest.raises(IntegrityError, match="arrived damaged"):
        session.apply(block, damaged, sums)
    assert session.apply(block, data, sums)


def test_a_block_of_the_wrong_size_is_damaged(delivery: _Delivery) -> None:
    block, data, sums = delivery.blocks[0]

    with pytest.raises(IntegrityError, match=f"{data.nbytes - 1} bytes and {len(sums)} checksums came"):
        delivery.session.apply(block, data[:-1], sums)


def test_a_block_of_another_rank_is_refused(delivery: _Delivery) -> None:
    with pytest.raises(RequestError, match="block 999999 is not in its program"):
        delivery.session.apply(999_999, np.zeros(1, np.uint8), np.zeros(1, np.uint32))


def test_missing_blocks_are_listed_and_keep_the_session_from_finishing(delivery: _Delivery) -> None:
    *there, absent = delivery.blocks
    for block in there:
        delivery.session.apply(*block)

    assert delivery.session.missing_blocks.tolist() == [absent[0]]
    with pytest.raises(
        ClusterError, match=rf"rank 1: 1 of {len(delivery.blocks)} blocks did not arrive.*\[{absent[0]}\]"
    ):
        delivery.session.finish()
    with pytest.raises(RequestError, match=r"call finish\(\) first"):
        delivery.session.state_dict()


def test_a_program_whose_blocks_do_not_fill_its_views_is_refused(
    llama: Any, plan_for: PlanFor, pool_config: Config
) -> None:
    delivery = _Delivery(llama, plan_for, pool_config, Parallel())
    first, *rest = delivery.program.views
    program = replace(delivery.program, views=(replace(first, nbytes=first.nbytes + 2), *rest))
    session = RankSession(program, HostArena(4 << 20), pool_config)
    for block in delivery.blocks:
        session.apply(*block)

    with pytest.raises(ClusterError, match="its tensors have"):
        session.finish()


def test_direct_extents_fill_the_rank(llama: Any, plan_for: PlanFor, config: Config) -> None:
    plan, manifest = plan_for(llama.path, Parallel(), config)
    session = RankSession(compile_rank(plan, manifest, Rank(0), LOAD), HostArena(4 << 20), config)

    session.read_direct()
    session.finish()

    tensors = session.state_dict()
    assert tensors.keys() == llama.tensors.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in llama.tensors.items())
    report = session.report(node="n0", gpu=3)
    assert (report.bytes_direct, report.bytes_pool, report.bytes_to_device) == (llama.nbytes, 0, llama.nbytes)
    assert (report.node, report.gpu, report.num_tensors) == ("n0", 3, len(llama.tensors))
    assert session.verified == "transit"
    assert session.reads.payload_bytes == llama.nbytes


def test_direct_reads_with_a_sidecar_are_verified_against_it(
    llama: Any, plan_for: PlanFor, config: Config, tmp_path: Path, record: Callable[[Path], Any]
) -> None:
    folder = Path(shutil.copytree(llama.path, tmp_path / "llama"))
    record(folder)
    plan, manifest = plan_for(folder, Parallel(), config)
    session = RankSession(compile_rank(plan, manifest, Rank(0), LOAD), HostArena(4 << 20), config)

    session.read_direct()
    session.finish()

    assert session.verified == "reference"


def test_a_direct_extent_that_fails_is_handed_over_and_its_block_taken_from_the_pool(
    llama: Any, plan_for: PlanFor, config: Config, storage: Any
) -> None:
    plan, manifest = plan_for(llama.path, Parallel(), config)
    program = compile_rank(plan, manifest, Rank(0), LOAD)
    session = RankSession(program, HostArena(4 << 20), config, opener=storage)
    lost = int(program.extents.begin[1])

    def fail_there(offset: int) -> None:
        if offset == lost:
            raise OSError("unreadable sector")

    storage.before_read = fail_there
    failed: list[tuple[int, Exception]] = []
    session.read_direct(lambda extent, error: failed.append((extent, error)))

    ((extent, error),) = failed
    assert isinstance(error, SourceError)
    assert extent == program.extents.extent[1]
    fragment = compile_agent(
        plan, manifest, NodeId("n1"), LOAD, credit_bytes=0, keep_blocks=np.empty(0, np.int64), extents=[extent]
    )
    begin, end = int(fragment.extents.begin[0]), int(fragment.extents.end[0])
    stored = np.fromfile(llama.file, np.uint8)[begin:end]
    for block in BlockCutter(fragment.blocks, fragment.segments).cut(extent, begin, stored):
        assert session.apply(block.block, block.data, block.crc32)
    session.finish()
    tensors = session.state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in llama.tensors.items())


def test_without_a_handler_the_first_failure_is_raised(
    llama: Any, plan_for: PlanFor, config: Config, storage: Any
) -> None:
    plan, manifest = plan_for(llama.path, Parallel(), config)
    storage.errors_left = 10**6
    session = RankSession(compile_rank(plan, manifest, Rank(0), LOAD), HostArena(4 << 20), config, opener=storage)

    with pytest.raises(SourceError, match="the cable was unplugged"):
        session.read_direct()


def test_a_change_of_the_file_fails_the_extent_that_was_read_meanwhile(
    llama: Any, plan_for: PlanFor, config: Config, storage: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(llama.path, tmp_path / "llama"))
    plan, manifest = plan_for(folder, Parallel(), config)
    program = compile_rank(plan, manifest, Rank(0), LOAD)
    session = RankSession(program, HostArena(4 << 20), config, opener=storage)
    storage.before_read = lambda _offset: os.utime(folder / "model.safetensors", ns=(1, 1))

    with pytest.raises(IntegrityError, match="changed while it was read"):
        session.read_extent(0)

    assert len(session.missing_blocks) == len(program.blocks)


def test_a_change_of_the_file_that_shows_late_is_found_at_the_end(
    llama: Any, plan_for: PlanFor, config: Config, storage: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(llama.path, tmp_path / "llama"))
    plan, manifest = plan_for(folder, Parallel(), config)
    # One thread: a second one could open the file after the change, and see it then.
    config = replace(config, io=replace(config.io, read_threads=1))
    session = RankSession(compile_rank(plan, manifest, Rank(0), LOAD), HostArena(4 << 20), config, opener=storage)
    storage.before_read = lambda _offset: os.utime(folder / "model.safetensors", ns=(1, 1))
    storage.stale_checks = 10**6
    session.read_direct()

    storage.stale_checks = 0
    with pytest.raises(IntegrityError, match="changed while it was read"):
        session.finish()


def test_a_stopped_session_reads_no_further(llama: Any, plan_for: PlanFor, config: Config, storage: Any) -> None:
    plan, manifest = plan_for(llama.path, Parallel(), config)
    session = RankSession(compile_rank(plan, manifest, Rank(0), LOAD), HostArena(4 << 20), config, opener=storage)
    storage.before_read = lambda _offset: session.stop()

    with pytest.raises(ClusterError, match="stopped"):
        session.read_direct()
    assert len(session.missing_blocks)


def test_tied_names_have_one_tensor(tmp_path: Path, plan_for: PlanFor, config: Config) -> None:
    folder = llama_checkpoint(tmp_path, tied=True)
    plan, manifest = plan_for(folder, Parallel(), config)
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    session = RankSession(compile_rank(plan, manifest, Rank(0), LOAD), HostArena(64 << 20), config)

    session.read_direct()
    session.finish()

    tensors = session.state_dict()
    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]


def test_memory_is_given_back_when_its_tensors_are_forgotten(delivery: _Delivery) -> None:
    delivery.deliver()
    delivery.session.finish()
    tensors = delivery.session.state_dict()
    kept = tensors["model.norm.weight"][:5]
    expected = kept.clone()
    del tensors
    gc.collect()

    with pytest.raises(RequestError, match="in use by 1 tensors"):
        delivery.session.release()
    assert torch.equal(kept, expected)
    del kept
    gc.collect()
    delivery.session.release()
    delivery.session.release()

    assert delivery.arena.free_bytes == delivery.arena.budget_bytes


def test_a_released_session_takes_and_gives_nothing(delivery: _Delivery) -> None:
    delivery.deliver()
    delivery.session.finish()
    delivery.session.release()

    with pytest.raises(RequestError, match="was unloaded|call finish"):
        delivery.session.state_dict()
    with pytest.raises(RequestError, match="was unloaded"):
        delivery.session.apply(*delivery.blocks[0])


def test_a_program_larger_than_the_arena_is_a_capacity_error(delivery: _Delivery, config: Config) -> None:
    with pytest.raises(CapacityError, match="do not fit"):
        RankSession(delivery.program, HostArena(1 << 10), config)


class _DeviceLikeArena(HostArena):
    """An arena whose memory the host cannot see, as a GPU's: writes are under way until their ticket was waited for."""

    def host_bytes(self, allocation: Any) -> Any:
        return super().host_bytes(allocation) if self._ready else None

    def __init__(self, budget_bytes: int) -> None:
        self._ready = False
        super().__init__(budget_bytes)
        self.num_waits = 0

    def write(self, allocation: Any, dst: Runs, src: Bytes) -> Any:
        return _Ticket(self, allocation, dst, src)

    def checksum(self, allocation: Any, offset: int, nbytes: int) -> Any:
        return None

    def tensor(self, allocation: Any, view: Any) -> Any:
        self._ready = True
        return super().tensor(allocation, view)

    def write_now(self, allocation: Any, dst: Runs, src: Bytes) -> None:
        self._ready = True
        super().write(allocation, dst, src)
        self._ready = False


class _Ticket:
    def __init__(self, arena: _DeviceLikeArena, allocation: Any, dst: Runs, src: Bytes) -> None:
        self._write = lambda: arena.write_now(allocation, dst, src)
        self._arena = arena

    def wait(self) -> None:
        self._arena.num_waits += 1
        self._write()


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2)])
def test_an_arena_that_the_host_cannot_see_is_filled_through_staging(
    llama: Any, plan_for: PlanFor, config: Config, parallel: Parallel
) -> None:
    # One reading thread: the fake arena is not thread-safe.
    config = replace(config, io=replace(config.io, read_threads=1))
    delivery = _Delivery(llama, plan_for, config, parallel)
    arena = _DeviceLikeArena(4 << 20)
    session = RankSession(delivery.program, arena, config)

    session.read_direct()
    for block in delivery.blocks:
        session.apply(*block)
    session.finish()

    tensors = session.state_dict()
    assert arena.num_waits > 0
    down = llama.tensors["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(tensors["model.layers.0.mlp.down_proj.weight"], down.chunk(parallel.tp, 1)[0])
