"""What a load does about what happens to it. Each test tells a sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadFacts, LoadMachine, LoadState
from megamind_ray.errors import ClusterError, IntegrityError, SourceError

A, B = NodeId("a"), NodeId("b")
LOST = "its process ended"


def facts(nodes: tuple[NodeId, ...] = (A, B), max_worker_restarts: int = 2) -> LoadFacts:
    """Two ranks. Extent 0 is read by node a for both, 1 by the last node for rank 1, 2 by rank 0 itself."""
    return LoadFacts(
        nodes=nodes,
        num_ranks=2,
        reader={ExtentId(0): A, ExtentId(1): nodes[-1]},
        consumers={
            ExtentId(0): (Rank(0), Rank(1)),
            ExtentId(1): (Rank(1),),
            ExtentId(2): (Rank(0),),
        },
        extent_bytes={ExtentId(0): 100, ExtentId(1): 10, ExtentId(2): 1},
        max_worker_restarts=max_worker_restarts,
    )


def running(machine_facts: LoadFacts | None = None) -> LoadMachine:
    machine = LoadMachine(machine_facts or facts())
    machine.handle(ev.LoadStarted())
    return machine


def done(rank: int, generation: int = 0) -> ev.RankDone:
    return ev.RankDone(rank=Rank(rank), generation=Generation(generation))


def lost(rank: int, generation: int = 0) -> ev.WorkerLost:
    return ev.WorkerLost(rank=Rank(rank), generation=Generation(generation), reason=LOST)


def ready(rank: int, generation: int) -> ev.WorkerReady:
    return ev.WorkerReady(rank=Rank(rank), generation=Generation(generation))


def extent_failed(extent: int, node: NodeId, *, retryable: bool = True) -> ev.ExtentFailed:
    error = SourceError("disk gone", file="w.safetensors")
    return ev.ExtentFailed(extent=ExtentId(extent), node=node, error=error, retryable=retryable)


def test_a_load_starts_ranks_before_reads() -> None:
    assert LoadMachine(facts()).handle(ev.LoadStarted()) == [
        ins.StartRank(rank=Rank(0), generation=Generation(0)),
        ins.StartRank(rank=Rank(1), generation=Generation(0)),
        ins.StartReads(node=A),
        ins.StartReads(node=B),
    ]


def test_a_second_start_gives_nothing() -> None:
    assert running().handle(ev.LoadStarted()) == []


def test_the_load_is_complete_when_the_last_rank_is_done() -> None:
    machine = running()
    assert machine.handle(done(1)) == []
    assert machine.handle(done(0)) == [ins.CompleteLoad()]
    assert machine.state is LoadState.DONE


def test_a_lost_worker_is_replaced_and_what_it_took_from_pools_is_read_again() -> None:
    machine = running()
    fault, replace = machine.handle(lost(1))
    assert isinstance(fault, ins.RecordFault)
    assert (fault.fault.kind, fault.fault.bytes_retried) == ("worker_lost", 110)
    assert replace == ins.ReplaceWorker(rank=Rank(1), generation=Generation(1))
    assert machine.handle(ready(1, 1)) == [
        ins.StartRank(rank=Rank(1), generation=Generation(1)),
        ins.ReadAgain(node=A, extents=(ExtentId(0),), ranks=(Rank(1),)),
        ins.ReadAgain(node=B, extents=(ExtentId(1),), ranks=(Rank(1),)),
    ]


def test_a_worker_that_is_lost_after_it_was_done_is_replaced_too() -> None:
    machine = running()
    machine.handle(done(1))
    assert ins.ReplaceWorker(rank=Rank(1), generation=Generation(1)) in machine.handle(lost(1))
    machine.handle(ready(1, 1))
    assert machine.handle(done(0)) == []
    assert machine.handle(done(1, 1)) == [ins.CompleteLoad()]


def test_a_worker_that_was_declared_lost_and_speaks_after_all_is_not_heard() -> None:
    machine = running()
    machine.handle(lost(0))
    assert machine.handle(done(0, 0)) == []
    machine.handle(done(1))
    assert machine.state is LoadState.RUNNING
    assert machine.stale_events == 1


def test_a_worker_that_keeps_dying_ends_the_load() -> None:
    machine = running(facts(max_worker_restarts=1))
    machine.handle(lost(0))
    machine.handle(ready(0, 1))
    (abort,) = machine.handle(lost(0, 1))
    assert isinstance(abort, ins.AbortLoad)
    assert isinstance(abort.error, ClusterError)
    assert "rank 0" in str(abort.error)
    assert "max_worker_restarts = 1" in str(abort.error)


def test_an_extent_that_fails_on_one_node_is_read_on_another_for_ranks_that_wait() -> None:
    machine = running()
    machine.handle(done(0))
    fault, again = machine.handle(extent_failed(0, A))
    assert isinstance(fault, ins.RecordFault)
    assert fault.fault.kind == "extent_failed"
    assert again == ins.ReadAgain(node=B, extents=(ExtentId(0),), ranks=(Rank(1),))


def test_an_extent_that_fails_everywhere_ends_the_load_with_the_last_error() -> None:
    machine = running()
    machine.handle(extent_failed(0, A))
    (abort,) = machine.handle(extent_failed(0, B))
    assert isinstance(abort, ins.AbortLoad)
    assert isinstance(abort.error, SourceError)
    assert machine.state is LoadState.FAILED


def test_an_extent_that_no_retry_can_mend_ends_the_load_at_once() -> None:
    (abort,) = running().handle(extent_failed(0, A, retryable=False))
    assert isinstance(abort, ins.AbortLoad)


def test_on_one_node_there_is_nobody_else_to_read() -> None:
    (abort,) = running(facts(nodes=(A,))).handle(extent_failed(0, A))
    assert isinstance(abort, ins.AbortLoad)


def test_a_replacement_after_a_move_reads_where_the_extent_is_read_now() -> None:
    machine = running()
    machine.handle(extent_failed(0, A))
    machine.handle(lost(1))
    instructions = machine.handle(ready(1, 1))
    assert ins.ReadAgain(node=B, extents=(ExtentId(0), ExtentId(1)), ranks=(Rank(1),)) in instructions


def test_a_direct_extent_that_failed_comes_from_a_pool_from_then_on() -> None:
    machine = running()
    _, again = machine.handle(extent_failed(2, A))
    assert again == ins.ReadAgain(node=B, extents=(ExtentId(2),), ranks=(Rank(0),))
    machine.handle(lost(0))
    assert ins.ReadAgain(node=B, extents=(ExtentId(2),), ranks=(Rank(0),)) in machine.handle(ready(0, 1))


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (ev.AgentLost(node=A, reason=LOST), "node a"),
        (ev.AgentFailed(node=A, error=ClusterError("its pool takes no block")), "takes no block"),
        (ev.CancelRequested(reason="Ctrl-C"), "Ctrl-C"),
        (ev.DeadlinePassed(what="no byte moved for 120 s"), "no byte moved"),
    ],
)
def test_what_cannot_be_mended_ends_the_load_and_says_why(event: ev.Event, text: str) -> None:
    (abort,) = running().handle(event)
    assert isinstance(abort, ins.AbortLoad)
    assert isinstance(abort.error, ClusterError)
    assert text in str(abort.error)


def test_wrong_bytes_end_the_load_with_their_own_error() -> None:
    error = IntegrityError("bad", file="w.safetensors")
    failed = ev.RankFailed(rank=Rank(0), generation=Generation(0), error=error)
    assert running().handle(failed) == [ins.AbortLoad(error=error)]


EVENTS = st.one_of(
    st.just(ev.LoadStarted()),
    st.builds(lost, st.integers(0, 1), st.integers(0, 3)),
    st.builds(ready, st.integers(0, 1), st.integers(0, 3)),
    st.builds(done, st.integers(0, 1), st.integers(0, 3)),
    st.builds(extent_failed, st.integers(0, 2), st.sampled_from([A, B]), retryable=st.booleans()),
    st.just(ev.CancelRequested(reason="x")),
    st.just(ev.AgentLost(node=B, reason=LOST)),
)


@given(st.lists(EVENTS, max_size=30))
def test_any_events_are_answered_the_same_way_when_replayed_and_terminal_states_absorb(events: list[ev.Event]) -> None:
    first, second = LoadMachine(facts()), LoadMachine(facts())
    trace = []
    for event in events:
        ended = first.state in (LoadState.DONE, LoadState.FAILED)
        instructions = first.handle(event)
        assert not (ended and instructions)
        trace.append(instructions)
    assert [repr(second.handle(event)) for event in events] == [repr(step) for step in trace]
    ends = [one for step in trace for one in step if isinstance(one, ins.CompleteLoad | ins.AbortLoad)]
    assert len(ends) <= 1


@given(st.lists(EVENTS, max_size=30))
def test_a_load_is_complete_only_if_the_newest_generation_of_each_rank_said_so(events: list[ev.Event]) -> None:
    machine = LoadMachine(facts())
    said: set[tuple[int, int]] = set()
    for event in (ev.LoadStarted(), *events):
        machine.handle(event)
        if isinstance(event, ev.RankDone):
            said.add((event.rank, event.generation))
        if machine.state is LoadState.DONE:
            assert {(rank, machine.generations[rank]) for rank in machine.ranks} <= said
            return
