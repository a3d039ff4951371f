"""What is simulated is what the compiled programs say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest

from megamind_ray.core.ids import LoadId, Rank
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Topology
from megamind_ray.planning import compile_agent, compile_rank, load_facts
from megamind_ray.sim.plan_work import cut_work
from megamind_ray.sim.work import Work

MakePlan: TypeAlias = Callable[..., Plan]
MakeTopology: TypeAlias = Callable[..., Topology]
LOAD = LoadId("m#1")
MESHES = [Parallel(), Parallel(tp=4), Parallel(pp=2, tp=2), Parallel(dp=2, tp=2)]


def whole(plan: Plan) -> Work:
    return cut_work(plan, max_flows=2**62, max_unit_bytes=2**62)


def merged(plan: Plan, max_flows: int = 1, max_unit_bytes: int = 2**62) -> Work:
    return cut_work(plan, max_flows=max_flows, max_unit_bytes=max_unit_bytes)


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_agents_do_what_their_programs_say(
    parallel: Parallel, plan_of: MakePlan, topology_of: MakeTopology, manifest_of: Callable[..., Manifest]
) -> None:
    topology = topology_of()
    plan, manifest = plan_of(parallel, topology), manifest_of()
    work = whole(plan)
    for node in topology.nodes:
        program = compile_agent(plan, manifest, node.id, LOAD, credit_bytes=0, keep_blocks=np.zeros(0, np.int64))
        units = work.units_of.get(node.id, ())
        assert [unit.extent for unit in units] == program.extents.extent.tolist()
        assert [unit.nbytes for unit in units] == (program.extents.end - program.extents.begin).tolist()
        blocks = [block for unit in units for block in unit.blocks]
        assert [block.block for block in blocks] == program.blocks.block.tolist()
        assert [block.nbytes for block in blocks] == program.blocks.nbytes.tolist()
        consumers = [program.consumer_sets[one_set] for one_set in program.blocks.consumers.tolist()]
        assert [tuple(block.bytes_of) for block in blocks] == consumers
        assert list(work.relays.get(node.id, ())) == sorted(program.relays)


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_ranks_do_what_their_programs_say(
    parallel: Parallel, plan_of: MakePlan, topology_of: MakeTopology, manifest_of: Callable[..., Manifest]
) -> None:
    plan, manifest = plan_of(parallel, topology_of()), manifest_of()
    work = whole(plan)
    for rank in parallel.ranks:
        program = compile_rank(plan, manifest, Rank(rank), LOAD)
        assert [unit.extent for unit in work.units_of.get(Rank(rank), ())] == program.extents.extent.tolist()
        assert [block.block for block in work.blocks_of[Rank(rank)]] == program.blocks.block.tolist()
        taken = np.add.reduceat(program.segments.nbytes, program.blocks.first_segment[:-1])
        assert [block.bytes_of[Rank(rank)] for block in work.blocks_of[Rank(rank)]] == taken.tolist()


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_the_machine_knows_what_it_knows_of_the_plan(
    parallel: Parallel, plan_of: MakePlan, topology_of: MakeTopology
) -> None:
    plan = plan_of(parallel, topology_of())
    assert whole(plan).facts(max_worker_restarts=2) == load_facts(plan, max_worker_restarts=2)


def test_a_block_that_lies_in_its_extent_as_it_is_is_known_as_such(
    plan_of: MakePlan, topology_of: MakeTopology
) -> None:
    """One rank takes all: nothing is strided. Two split the columns of some layers."""
    alone = whole(plan_of(Parallel(), topology_of(1, 1), force_pool=True))
    assert {block.cuts for block in alone.blocks} == {((0, block.nbytes),) for block in alone.blocks}
    split = whole(plan_of(Parallel(tp=2), topology_of(1, 2)))
    assert {run_bytes for block in split.blocks for run_bytes, _ in block.cuts} > {0}


def test_chunks_of_an_extent_are_counted(plan_of: MakePlan, topology_of: MakeTopology) -> None:
    work = whole(plan_of(Parallel(tp=2), topology_of(1, 2)))
    assert {unit.pieces for unit in work.units} <= {1, 2, 3, 4}
    assert max(unit.pieces for unit in work.units) == 4


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_merging_loses_no_byte(parallel: Parallel, plan_of: MakePlan, topology_of: MakeTopology) -> None:
    plan = plan_of(parallel, topology_of())
    small, large = whole(plan), merged(plan)
    assert large.parts > 1
    assert len(large.units) < len(small.units)
    assert sum(unit.nbytes for unit in large.units) == plan.bytes_from_storage
    assert sum(unit.pieces for unit in large.units) == sum(unit.pieces for unit in small.units)
    assert sum(block.parts for block in large.blocks) == len(small.blocks)
    packed = [sum(size for block in work.blocks for run, size in block.cuts if not run) for work in (small, large)]
    assert packed[0] == packed[1]
    for rank in parallel.ranks:
        taken = [sum(block.bytes_of[Rank(rank)] for block in work.blocks_of[Rank(rank)]) for work in (small, large)]
        assert taken[0] == taken[1]
    assert sum(taken for block in large.blocks for taken in block.bytes_of.values()) == plan.bytes_to_device


def test_merged_units_have_one_reader_each(plan_of: MakePlan, topology_of: MakeTopology) -> None:
    plan = plan_of(Parallel(pp=2, tp=2), topology_of())
    readers = set(
        zip(plan.tables["extents"]["node"].to_pylist(), plan.tables["extents"]["rank"].to_pylist(), strict=True)
    )
    work = merged(plan)
    assert {(unit.node, -1 if unit.rank is None else unit.rank) for unit in work.units} == readers
    assert len(work.units) == len(readers)


def test_merged_units_are_no_larger_than_a_pool_allows(plan_of: MakePlan, topology_of: MakeTopology) -> None:
    plan = plan_of(Parallel(tp=4), topology_of())
    work = merged(plan, max_unit_bytes=16 << 20)
    assert work.parts > 1
    assert max(sum(block.nbytes for block in unit.blocks) for unit in work.units) <= 16 << 20


def test_nothing_is_merged_that_need_not_be(plan_of: MakePlan, topology_of: MakeTopology) -> None:
    plan = plan_of(Parallel(tp=4), topology_of())
    assert merged(plan, max_flows=10**6).parts == 1
