"""What a load's machine says when the planner that it spoke to was lost. Each test tells a sequence of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadFacts, LoadMachine, LoadState, RankState
from megamind_ray.core.node_loss import Lacking, Spare
from megamind_ray.core.stragglers import ReaderPace
from megamind_ray.errors import SourceError

A, B, S = NodeId("a"), NodeId("b"), NodeId("s")
NEWS = "the planner's process ended"


def facts() -> LoadFacts:
    """Two nodes with a rank each. Both ranks need extents 0 and 1; a reads 0, b reads 1. Node s is spare."""
    return LoadFacts(
        nodes=(A, B),
        num_ranks=2,
        reader={ExtentId(0): A, ExtentId(1): B},
        consumers={ExtentId(extent): (Rank(0), Rank(1)) for extent in range(2)},
        extent_bytes={ExtentId(0): 10, ExtentId(1): 100},
        home=(A, B),
        arena_bytes=(1, 1),
        line=(A, B),
        spares=(Spare(node=S, gpu=0, free_bytes=1), Spare(node=S, gpu=1, free_bytes=1)),
    )


def after(*events: ev.Event) -> LoadMachine:
    machine = LoadMachine(facts())
    for event in events:
        machine.handle(event)
    return machine


def lacking(rank: int, *extents: int, generation: int = 0) -> Lacking:
    return Lacking(rank=Rank(rank), generation=Generation(generation), extents=tuple(map(ExtentId, extents)))


def restarted(*lacks: Lacking) -> ev.PlannerRestarted:
    return ev.PlannerRestarted(reason=NEWS, lacking=lacks)


def start(rank: int, generation: int = 0) -> ins.StartRank:
    return ins.StartRank(rank=Rank(rank), generation=Generation(generation))


def again(node: NodeId, extents: tuple[int, ...], ranks: tuple[int, ...]) -> ins.ReadAgain:
    return ins.ReadAgain(node=node, extents=tuple(map(ExtentId, extents)), ranks=tuple(map(Rank, ranks)))


WORKER_LOST = ev.WorkerLost(rank=Rank(1), generation=Generation(0), reason="it died")
WORKER_READY = ev.WorkerReady(rank=Rank(1), generation=Generation(1))
FAILED = ev.ExtentFailed(extent=ExtentId(1), node=B, error=SourceError("gone", file="f"), retryable=True)
NODE_LOST = ev.AgentLost(node=B, reason="it died")
ALL_READ = [ins.StartReads(node=A), ins.StartReads(node=B)]


def test_without_other_trouble_all_that_began_is_asked_for_and_nothing_is_read_again() -> None:
    fault, *said = after(ev.LoadStarted()).handle(restarted(lacking(0, 0, 1), lacking(1, 0, 1)))
    assert said == [start(0), start(1), *ALL_READ]
    assert isinstance(fault, ins.RecordFault)
    assert (fault.fault.kind, fault.fault.where, fault.fault.bytes_retried) == ("planner_lost", NEWS, 0)


def test_a_load_whose_planner_was_lost_before_it_said_anything_begins() -> None:
    machine = after()
    assert machine.handle(restarted())[1:] == [start(0), start(1), *ALL_READ]
    assert machine.state is LoadState.RUNNING
    assert machine.handle(ev.LoadStarted()) == []


def test_a_rank_that_was_done_is_asked_for_what_it_came_to() -> None:
    """``RankDone`` is not in the journal, so the machine does not know of it."""
    machine = after(ev.LoadStarted(), restarted())
    machine.handle(ev.RankDone(rank=Rank(0), generation=Generation(0)))
    last = machine.handle(ev.RankDone(rank=Rank(1), generation=Generation(0)))
    assert last == [ins.CompleteLoad()]


def test_a_rank_that_was_being_replaced_is_replaced() -> None:
    said = after(ev.LoadStarted(), WORKER_LOST).handle(restarted(lacking(0, 0)))
    assert said[1:] == [start(0), ins.ReplaceWorker(rank=Rank(1), generation=Generation(1)), *ALL_READ]


def test_second_reads_that_may_have_been_lost_are_asked_for_again_where_something_lacks() -> None:
    machine = after(ev.LoadStarted(), WORKER_LOST, WORKER_READY)
    fault, *said = machine.handle(restarted(lacking(0, 0, 1), lacking(1, 1, generation=1)))
    assert said == [start(0), start(1, 1), *ALL_READ, again(B, (1,), (1,))]
    assert isinstance(fault, ins.RecordFault)
    assert fault.fault.bytes_retried == 100


def test_a_rank_that_does_not_say_what_it_lacks_gets_all_of_its_second_reads() -> None:
    machine = after(ev.LoadStarted(), WORKER_LOST, WORKER_READY)
    assert machine.handle(restarted(lacking(1, generation=0)))[-2:] == [again(A, (0,), (1,)), again(B, (1,), (1,))]


def test_an_extent_that_was_given_to_another_node_is_asked_for_there() -> None:
    machine = after(ev.LoadStarted(), FAILED)
    assert machine.handle(restarted(lacking(0), lacking(1, 1)))[-1] == again(A, (1,), (1,))


def test_what_a_slow_reader_may_have_given_away_is_asked_for_again() -> None:
    """It was asked what it has not begun; its answer was lost with the planner. What it has still, it leaves out."""
    paces = tuple(ReaderPace(node=node, left_bytes=100, begun_bytes=0, bytes_per_s=1.0) for node in (A, B))
    slow = ev.ReaderSlow(node=B, paces=paces)
    machine = after(ev.LoadStarted(), slow)
    assert machine.handle(restarted(lacking(0, 0, 1), lacking(1, 1)))[-1] == again(B, (1,), (0, 1))
    assert machine.handle(ev.ReadsTakenBack(node=B, extents=(ExtentId(1),))) == [], "nobody was asked since"


def test_what_is_read_by_another_node_than_planned_is_asked_for_there() -> None:
    paces = tuple(ReaderPace(node=node, left_bytes=100, begun_bytes=0, bytes_per_s=1.0) for node in (A, B))
    machine = after(ev.LoadStarted(), ev.ReaderSlow(node=B, paces=paces))
    given = machine.handle(ev.ReadsTakenBack(node=B, extents=(ExtentId(1),)))
    assert ins.ReadInstead(node=A, extents=(ExtentId(1),)) in given
    assert machine.handle(restarted(lacking(0), lacking(1, 0, 1)))[-1] == again(A, (1,), (1,))


def test_a_node_that_was_being_given_up_is_given_up_before_anything_else() -> None:
    machine = LoadMachine(facts())
    machine.handle(ev.LoadStarted())
    (drop,) = [one for one in machine.handle(NODE_LOST) if isinstance(one, ins.DropNode)]
    said = machine.handle(restarted())
    assert said[1:] == [drop, start(0), ins.StartReads(node=A)]
    machine.handle(ev.NodeDropped(node=B))
    ready = machine.handle(ev.WorkerReady(rank=Rank(1), generation=Generation(1)))
    assert ready[0] == start(1, 1)
    assert drop not in machine.handle(restarted()), "all know of it"


def test_a_load_that_was_over_stays_over() -> None:
    machine = after(ev.LoadStarted(), ev.CancelRequested(reason="x"))
    assert machine.handle(restarted()) == []
    assert machine.state is LoadState.FAILED


@given(
    st.lists(
        st.sampled_from(
            [WORKER_LOST, WORKER_READY, FAILED, NODE_LOST, restarted(), ev.NodeDropped(node=B)]
            + [ev.RankDone(rank=Rank(rank), generation=Generation(number)) for rank in (0, 1) for number in (0, 1)]
        ),
        max_size=12,
    )
)
def test_without_what_a_successor_asks_for_the_machine_knows_the_same(events: list[ev.Event]) -> None:
    """All but ``RankDone`` is in the journal; what became of ranks, nodes and extents does not depend on that."""
    whole = after(ev.LoadStarted(), *events)
    if whole.state is not LoadState.RUNNING:
        return
    journaled = after(ev.LoadStarted(), *(one for one in events if not isinstance(one, ev.RankDone)))
    assert (journaled.generations, journaled.nodes) == (whole.generations, whole.nodes)
    for rank, state in whole.ranks.items():
        assert journaled.ranks[rank] is state or state is RankState.DONE
