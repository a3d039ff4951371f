"""What a planner's successor finds: copies of the journal, and a load by its log."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ray import cloudpickle

from megamind_ray.actors.fencing import Epoch
from megamind_ray.actors.journal import (
    Charter,
    JournalCopy,
    JournaledLoad,
    KeptJournal,
    Snapshot,
    Stamp,
    is_journaled,
    journaled,
    unpickled,
)
from megamind_ray.actors.messages import LoadRequest
from megamind_ray.actors.node_agent import NodeAgent
from megamind_ray.actors.standing import Standing
from megamind_ray.actors.transfer import Transfer
from megamind_ray.config import Config, load_config
from megamind_ray.core import events as ev
from megamind_ray.core.event_log import LogEntry
from megamind_ray.core.ids import ExtentId, Generation, LoadId, ModelName, NodeId, Rank
from megamind_ray.core.load_machine import LoadState
from megamind_ray.core.node_loss import Spare
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.recorder import RecordSettings
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.errors import ClusterError, SourceError
from megamind_ray.io import open_manifest
from megamind_ray.planning import build_demands, build_plan, compile_agent
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.fakes import MemoryPlane
from megamind_ray.units import GIB, MIB

LOAD = LoadId("m#1")
A, B, S = NodeId("a"), NodeId("b"), NodeId("s")
CONFIG = load_config(overrides={"placement": {"policy": "round_robin"}, "routing": {"force_pool": True}}, environ={})


@pytest.fixture(scope="module")
def transfer(tmp_path_factory: pytest.TempPathFactory) -> Transfer:
    """A rank on each of two nodes, a third one spare."""
    manifest = open_manifest(llama_checkpoint(tmp_path_factory.mktemp("journal") / "llama"))
    gpus = (Gpu(index=0, memory_bytes=GIB, free_bytes=GIB),)
    nodes = tuple(Node(id=name, gpus=gpus, memory_bytes=GIB, pool_bytes=64 * MIB) for name in (A, B))
    plan = build_plan(manifest, build_demands(manifest, Parallel(dp=2)), Topology(nodes=nodes), config=CONFIG)
    return Transfer(
        load=LOAD,
        plan=plan,
        manifest=manifest,
        credit_bytes=dict.fromkeys((A, B, S), MIB),
        keep_blocks={node: np.zeros(0, np.int64) for node in (A, B)},
        spares=(Spare(node=S, gpu=0, free_bytes=GIB),),
    )


def written(number: int, serial: int, *, load: LoadId | None = None, transfer: bytes | None = None) -> KeptJournal:
    return KeptJournal(stamp=Stamp(Epoch(number), serial), snapshot=b"x", load=load, transfer=transfer)


def job(ticket: str) -> JournaledLoad:
    request = LoadRequest(uri="/x", parallel=Parallel(dp=2), name=None, keep=True, config=CONFIG)
    return JournaledLoad(
        ticket=ticket,
        asked=request,
        request=request,
        name=ModelName("m"),
        load=LOAD,
        began_at_s=1.0,
        transfer_began_at_s=2.0,
        started_at="2026-01-01T00:00:00+00:00",
        seconds={"plan": 1.0},
    )


def entry(event: ev.Event) -> LogEntry:
    return LogEntry(at_s=1.0, event=event)


def test_a_plan_that_comes_after_what_was_written_later_is_kept() -> None:
    """It is large, and its wire is slow; what follows it is small."""
    copy = JournalCopy()
    copy.keep(written(1, 2, load=LOAD))
    copy.keep(written(1, 1, load=LOAD, transfer=b"plan"))
    assert copy.kept == written(1, 2, load=LOAD, transfer=b"plan")
    copy.keep(written(1, 3))
    copy.keep(written(1, 1, load=LOAD, transfer=b"plan"))
    assert copy.kept == written(1, 3)


def test_a_copy_keeps_the_newest_and_the_plan_as_long_as_its_load_is_under_way() -> None:
    copy = JournalCopy()
    copy.keep(written(1, 1, load=LOAD, transfer=b"plan"))
    copy.keep(written(1, 3, load=LOAD))
    copy.keep(written(1, 2))
    assert copy.kept == written(1, 3, load=LOAD, transfer=b"plan")
    copy.keep(written(2, 1, load=LoadId("n#1")))
    assert copy.kept.transfer is None
    copy.keep(written(1, 9, load=LOAD, transfer=b"late"))
    assert copy.kept.load == "n#1", "a later planner has written"


def test_a_snapshot_with_all_that_may_be_in_it_survives_being_sent(transfer: Transfer) -> None:
    under_way = replace(job("t"), entries=(entry(ev.LoadStarted()),), record=RecordSettings(started_at_s=1.0))
    snapshot = Snapshot(charter=Charter(fleet="f", lifetime="job", config=Config()), load=under_way)
    assert unpickled(Snapshot, cloudpickle.dumps(snapshot)) == snapshot
    again = unpickled(Transfer, cloudpickle.dumps(transfer))
    assert again.plan.tables["blocks"].equals(transfer.plan.tables["blocks"])
    assert again.facts(max_worker_restarts=1) == transfer.facts(max_worker_restarts=1)


def test_a_load_that_nobody_waits_for_is_told_apart_from_others(transfer: Transfer) -> None:
    copy = JournalCopy()
    assert copy.abandon("t") is None
    charter = Charter(fleet="f", lifetime="detached", config=Config())
    snapshot = cloudpickle.dumps(Snapshot(charter=charter, load=job("t")))
    copy.keep(KeptJournal(stamp=Stamp(Epoch(1), 1), snapshot=snapshot, load=LOAD))
    assert copy.abandon("another") is None
    assert copy.abandon("t") == LOAD
    assert copy.abandoned == {"t"}


def test_what_workers_and_agents_still_say_is_not_written_before_it_is_dealt_with() -> None:
    failed = ev.ExtentFailed(extent=ExtentId(0), node=A, error=SourceError("x", file="f"), retryable=True)
    done = ev.RankDone(rank=Rank(0), generation=Generation(0))
    lost = ev.WorkerLost(rank=Rank(0), generation=Generation(0), reason="x")
    assert [is_journaled(event) for event in (ev.LoadStarted(), failed, done, lost)] == [False, False, False, True]
    assert [one.event for one in journaled(map(entry, (ev.LoadStarted(), failed, done, lost)))] == [
        ev.LoadStarted(),
        failed,
        lost,
    ]


def test_a_load_stands_where_its_log_says(transfer: Transfer) -> None:
    first = Standing(transfer, max_worker_restarts=2)
    log = [ev.LoadStarted(), ev.AgentLost(node=B, reason="it died")]
    successor = Standing(transfer, max_worker_restarts=2, entries=map(entry, log))
    assert first.gpu_of == {0: (A, 0), 1: (B, 0)}
    assert successor.gpu_of == {0: (A, 0), 1: (S, 0)}
    assert successor.transfer.plan.tables["ranks"]["node"].to_pylist() == [A, S]
    assert (successor.given_up, successor.left) == ({B}, [(B, 0)])
    assert [(fault.kind, fault.at_s) for fault in successor.faults] == [("node_lost", 1.0)]
    assert successor.entries[1].instructions, "as the machine says it again"


def test_a_load_that_was_about_to_end_stands_there_with_its_error(transfer: Transfer) -> None:
    log = [ev.LoadStarted(), ev.CancelRequested(reason="the caller gave up")]
    standing = Standing(transfer, max_worker_restarts=2, entries=map(entry, log))
    assert standing.machine.state is LoadState.FAILED
    assert isinstance(standing.error, ClusterError)


def test_a_failure_that_the_journal_has_is_heard_once_more_and_passed_over(transfer: Transfer) -> None:
    extent = next(iter(transfer.facts(max_worker_restarts=0).reader))
    failed = ev.ExtentFailed(extent=extent, node=A, error=SourceError("x", file="f"), retryable=True)
    standing = Standing(transfer, max_worker_restarts=2, entries=map(entry, (ev.LoadStarted(), failed)))
    assert standing.was_heard(failed)
    assert not standing.was_heard(failed), "that is another one"


def test_an_agent_answers_a_successor_as_it_answered_before(transfer: Transfer) -> None:
    agent = NodeAgent(MemoryPlane())
    program = compile_agent(
        transfer.plan, transfer.manifest, A, LOAD, credit_bytes=MIB, keep_blocks=np.zeros(0, np.int64)
    )
    agent.open_load(program, {}, CONFIG)
    inside = agent._loads[LOAD]
    agent.open_load(program, {}, CONFIG)
    assert agent._loads[LOAD] is inside
    first = agent.close_load(LOAD, True)
    agent.open_load(program, {}, CONFIG)
    agent.start_reads(LOAD)
    assert agent._loads == {}, "it has ended, and stays so"
    assert agent.status(LOAD) == agent.close_load(LOAD, False) == first
    with pytest.raises(ClusterError, match="not open"):
        agent.relay_from(LOAD, B)
