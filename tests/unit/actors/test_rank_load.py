"""A rank's load in its worker, and the worker around it, without Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megamind_ray.actors.gpu_worker import GpuWorker
from megamind_ray.actors.messages import Delivery
from megamind_ray.actors.rank_load import RankLoad
from megamind_ray.config import Config, load_config
from megamind_ray.core.ids import Generation, LoadId, NodeId, Rank
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.program import RankProgram
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.device.arena import HostArena
from megamind_ray.engine.session import RankSession
from megamind_ray.errors import ClusterError
from megamind_ray.io import open_manifest
from megamind_ray.planning import build_demands, build_plan, compile_rank
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.fakes import MemoryPlane
from megamind_ray.units import GIB, MIB

LOAD = LoadId("m#1")
FIRST = Generation(0)
HERE = NodeId("n0")


class Agent:
    """Has no blocks to give; calls back when the rank says that it has all."""

    def __init__(self, on_retire: Callable[[], object] = lambda: None) -> None:
        self._on_retire = on_retire

    def exchange(
        self, acked: Sequence[int], rejected: Sequence[Delivery], *, limit: int, timeout_s: float
    ) -> tuple[Delivery, ...] | None:
        return ()

    def retire(self) -> None:
        self._on_retire()


@pytest.fixture
def config() -> Config:
    return load_config(overrides={"routing": {"min_direct_bytes": 1}, "deadlines": {"poll_s": 0.2}}, environ={})


@pytest.fixture
def program(tmp_path: Path, config: Config) -> RankProgram:
    """One rank that reads everything itself."""
    manifest = open_manifest(llama_checkpoint(tmp_path / "llama"))
    gpu = Gpu(index=0, memory_bytes=GIB, free_bytes=GIB)
    topology = Topology(nodes=(Node(id=HERE, gpus=(gpu,), memory_bytes=GIB, pool_bytes=64 * MIB),))
    plan = build_plan(manifest, build_demands(manifest, Parallel()), topology, config=config)
    program = compile_rank(plan, manifest, Rank(0), LOAD)
    assert len(program.extents)
    assert not len(program.pool_blocks)
    return program


def new_load(program: RankProgram, config: Config, kind: type[RankSession] = RankSession) -> RankLoad:
    session = kind(program, HostArena(64 * MIB), config)
    return RankLoad(session, MemoryPlane(), node=HERE, generation=FIRST, deadlines=config.deadlines)


def test_a_rank_that_has_all_is_loaded(program: RankProgram, config: Config) -> None:
    load = new_load(program, config)
    load.receive(Agent())
    assert load.session.state_dict()
    assert load.stop(), "there is something to free"


def test_a_load_stopped_when_all_bytes_had_come_is_stopped_all_the_same(program: RankProgram, config: Config) -> None:
    """Another rank failed just as this one got its last byte. It was told to stop, so nobody frees it later."""
    stopped: list[bool] = []
    load = new_load(program, config)
    with pytest.raises(ClusterError, match="stopped"):
        load.receive(Agent(on_retire=lambda: stopped.append(load.stop())))
    assert stopped == [False]


def test_an_error_nobody_thought_of_ends_the_load_and_is_told(program: RankProgram, config: Config) -> None:
    """The thread that reads has nobody above it: its rank would wait until the whole load counts as stalled."""

    class Broken(RankSession):
        def read_extent(self, row: int) -> None:
            raise ZeroDivisionError("a bug in a reader")

    with pytest.raises(ClusterError, match=r"rank 0.*ZeroDivisionError: a bug in a reader"):
        new_load(program, config, Broken).receive(Agent())


def test_a_load_that_was_aborted_before_it_began_takes_no_memory(program: RankProgram, config: Config) -> None:
    """``load`` and ``abort`` run on different threads of the worker: the later call may come first."""
    worker = GpuWorker(64 * MIB, plane=MemoryPlane(), place=(HERE, 0))
    worker.abort(LOAD)
    with pytest.raises(ClusterError, match="before it began"):
        worker.load(program, None, FIRST, config)
    facts = worker.facts()
    assert facts.free_bytes == facts.memory_bytes


def test_aborting_a_loaded_rank_frees_it(program: RankProgram, config: Config) -> None:
    """The rank was done while others failed."""
    worker = GpuWorker(64 * MIB, plane=MemoryPlane(), place=(HERE, 0))
    rank = worker._begin(program, FIRST, config)
    rank.load.receive(Agent())
    assert worker.facts().free_bytes < worker.facts().memory_bytes
    worker.abort(LOAD)
    assert worker.facts().free_bytes == worker.facts().memory_bytes


def test_a_rank_waits_on_the_agent_for_what_it_could_not_read(program: RankProgram, config: Config) -> None:
    """Its direct reads have ended; what is missing comes from the agent or not at all, so it asks there, and asking
    takes as long as the agent likes.
    """
    asked: list[int] = []

    class Asked(Agent):
        def exchange(
            self, acked: Sequence[int], rejected: Sequence[Delivery], *, limit: int, timeout_s: float
        ) -> tuple[Delivery, ...] | None:
            asked.append(limit)
            return None

    gone = dataclasses.replace(program, files=dataclasses.replace(program.files, root="/nowhere"))
    quick = dataclasses.replace(config, retry=dataclasses.replace(config.retry, attempts=1))
    load = new_load(gone, quick)
    with pytest.raises(ClusterError, match="ended on its node"):
        load.receive(Asked())
    assert len(asked) == 1
    assert {failure.extent for failure in load.failures} <= set(np.unique(program.extents.extent).tolist())
    assert all(failure.retryable for failure in load.failures)
