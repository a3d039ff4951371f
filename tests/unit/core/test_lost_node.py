"""What a load does when a node is lost. Each test tells a sequence of events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadFacts, LoadMachine, LoadState
from megamind_ray.core.node_loss import Lacking, Move, Spare, choose_reader, is_between, place_again
from megamind_ray.errors import ClusterError, SourceError

A, B, C, S = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("s")
SILENT = "no sign of life for 8 s"


def facts(*, spares: tuple[Spare, ...] = (), readers: tuple[NodeId, ...] = ()) -> LoadFacts:
    """A line of three nodes with a rank each. Each reads an extent for all ranks; extent 3 is rank 0's own."""
    everyone = (Rank(0), Rank(1), Rank(2))
    return LoadFacts(
        nodes=(A, B, C),
        num_ranks=3,
        reader={ExtentId(0): A, ExtentId(1): B, ExtentId(2): C},
        consumers={
            **{ExtentId(extent): everyone for extent in range(3)},
            ExtentId(3): (Rank(0),),
        },
        extent_bytes={ExtentId(extent): 10**extent for extent in range(4)},
        home=(A, B, C),
        arena_bytes=(100, 100, 100),
        line=(A, B, C),
        readers=readers,
        spares=spares,
    )


def reader_facts(**more: tuple[NodeId, ...]) -> LoadFacts:
    """As ``facts``, but node b has no rank: it reads and passes on, and rank 1 lives on c too."""
    return replace(facts(**more), home=(A, C, C))


def spare(node: NodeId = S, gpu: int = 0, free_bytes: int = 1000) -> Spare:
    return Spare(node=node, gpu=gpu, free_bytes=free_bytes)


def running(machine_facts: LoadFacts) -> LoadMachine:
    machine = LoadMachine(machine_facts)
    machine.handle(ev.LoadStarted())
    return machine


def lost(node: NodeId) -> ev.AgentLost:
    return ev.AgentLost(node=node, reason=SILENT)


def lacking(rank: int, *extents: int, generation: int = 0) -> Lacking:
    return Lacking(
        rank=Rank(rank), generation=Generation(generation), extents=tuple(ExtentId(extent) for extent in extents)
    )


def dropped(node: NodeId, *what: Lacking) -> ev.NodeDropped:
    return ev.NodeDropped(node=node, lacking=what)


def ready(rank: int, generation: int) -> ev.WorkerReady:
    return ev.WorkerReady(rank=Rank(rank), generation=Generation(generation))


def done(rank: int, generation: int = 0) -> ev.RankDone:
    return ev.RankDone(rank=Rank(rank), generation=Generation(generation))


def again(node: NodeId, extents: tuple[int, ...], ranks: tuple[int, ...]) -> ins.ReadAgain:
    return ins.ReadAgain(
        node=node, extents=tuple(ExtentId(one) for one in extents), ranks=tuple(Rank(one) for one in ranks)
    )


def error_of(said: list[ins.Instruction]) -> ClusterError:
    (abort,) = said
    assert isinstance(abort, ins.AbortLoad)
    assert isinstance(abort.error, ClusterError)
    return abort.error


def test_a_node_without_ranks_is_dropped_and_nobody_moves() -> None:
    fault, drop = running(reader_facts()).handle(lost(B))
    assert isinstance(fault, ins.RecordFault)
    assert (fault.fault.kind, fault.fault.bytes_retried) == ("node_lost", 10)
    assert f"node b: {SILENT}" in fault.fault.where
    assert drop == ins.DropNode(node=B, line=(A, C))


def test_what_it_was_to_read_is_read_by_another_for_those_that_lack_it() -> None:
    machine = running(reader_facts())
    machine.handle(lost(B))
    said = machine.handle(dropped(B, lacking(0, 1), lacking(1, 1), lacking(2)))
    assert said == [again(A, (1,), (0, 1))]


def test_what_may_have_been_lost_in_passing_is_read_again_by_its_own_reader() -> None:
    """Extent 0 goes from a through b to c; extent 2 does not pass b on its way to rank 1, which is on c."""
    machine = running(reader_facts())
    machine.handle(lost(B))
    said = machine.handle(dropped(B, lacking(0), lacking(1, 0, 2), lacking(2)))
    assert said == [again(A, (0,), (1,))]


def test_a_rank_that_did_not_answer_lacks_all_that_may_be_lost() -> None:
    machine = running(reader_facts())
    machine.handle(lost(B))
    # Rank 0 gets extent 2 through b, which it says has come.
    assert machine.handle(dropped(B, lacking(0), lacking(2))) == [again(A, (0, 1), (1,))]


def test_a_rank_that_is_done_needs_nothing() -> None:
    machine = running(reader_facts())
    machine.handle(done(1))
    machine.handle(lost(B))
    assert machine.handle(dropped(B, lacking(0), lacking(2))) == []
    assert machine.handle(done(0)) == []
    assert machine.handle(done(2)) == [ins.CompleteLoad()]


def test_ranks_of_a_lost_node_move_to_a_spare_one_which_joins_at_the_end_of_the_line() -> None:
    machine = running(facts(spares=(spare(),)))
    _, drop = machine.handle(lost(B))
    move = Move(rank=Rank(1), generation=Generation(1), node=S, gpu=0)
    assert drop == ins.DropNode(node=B, moves=(move,), joins=(S,), line=(A, C, S))
    # Blocks between a and c went through b.
    assert machine.handle(dropped(B, lacking(0, 1, 2), lacking(2, 0))) == [
        again(A, (1,), (0,)),
        again(A, (0,), (2,)),
        again(C, (2,), (0,)),
    ]
    assert machine.handle(ready(1, 1)) == [
        ins.StartRank(rank=Rank(1), generation=Generation(1)),
        again(A, (0, 1), (1,)),
        again(C, (2,), (1,)),
    ]
    machine.handle(done(0))
    machine.handle(done(2))
    assert machine.handle(done(1)) == [], "its first worker is on the lost node"
    assert machine.handle(done(1, 1)) == [ins.CompleteLoad()]


def test_a_rank_that_was_done_on_the_lost_node_is_loaded_anew() -> None:
    machine = running(facts(spares=(spare(),)))
    machine.handle(done(1))
    machine.handle(lost(B))
    machine.handle(done(0))
    machine.handle(done(2))
    assert machine.state is LoadState.RUNNING
    machine.handle(ready(1, 1))
    assert machine.handle(done(1, 1)) == [ins.CompleteLoad()]


@pytest.mark.parametrize("spares", [(), (spare(free_bytes=99),), (spare(node=B),)], ids=["none", "small", "its own"])
def test_without_a_place_for_its_ranks_the_load_ends_and_says_what_to_do(spares: tuple[Spare, ...]) -> None:
    message = str(error_of(running(facts(spares=spares)).handle(lost(B))))
    assert f"node b was lost ({SILENT}) with rank 1" in message
    assert "add one" in message


def test_a_lost_only_reader_ends_the_load() -> None:
    error = error_of(running(reader_facts(readers=(B,))).handle(lost(B)))
    assert "no other node can read extent 1" in str(error)


def test_a_reader_that_has_no_part_in_the_load_joins_where_nobody_else_can_read() -> None:
    machine = running(reader_facts(readers=(B, S)))
    _, drop = machine.handle(lost(B))
    assert drop == ins.DropNode(node=B, joins=(S,), line=(A, C, S))
    assert machine.handle(dropped(B, lacking(0, 1), lacking(1), lacking(2))) == [again(S, (1,), (0,))]


def test_two_lost_nodes_are_both_dropped_and_their_ranks_move() -> None:
    machine = running(facts(spares=(spare(), spare(gpu=1))))
    machine.handle(lost(B))
    _, drop = machine.handle(lost(C))
    assert isinstance(drop, ins.DropNode)
    assert [(move.rank, move.gpu) for move in drop.moves] == [(2, 1)]
    assert drop.line == (A, S)
    assert machine.handle(dropped(B, lacking(0, 1, 2))) == [again(A, (1,), (0,))]
    assert machine.handle(dropped(C, lacking(0, 1, 2))) == [again(A, (2,), (0,))]
    assert machine.handle(ready(1, 1))[1:] == [again(A, (0, 1, 2), (1,))]
    assert machine.handle(ready(2, 1))[1:] == [again(A, (0, 1, 2), (2,))]


def test_a_spare_node_that_is_lost_too_gives_its_ranks_to_the_next_one() -> None:
    machine = running(facts(spares=(spare(), spare(node=NodeId("t")))))
    machine.handle(lost(B))
    _, drop = machine.handle(lost(S))
    move = Move(rank=Rank(1), generation=Generation(2), node=NodeId("t"), gpu=0)
    assert drop == ins.DropNode(node=S, moves=(move,), joins=(NodeId("t"),), line=(A, C, NodeId("t")))
    assert machine.handle(ready(1, 1)) == [], "it was ready on the node that is lost by now"
    assert machine.handle(ready(1, 2))[0] == ins.StartRank(rank=Rank(1), generation=Generation(2))


def test_moves_are_no_replacements_of_a_worker() -> None:
    machine = running(replace(facts(spares=(spare(),)), max_worker_restarts=1))
    machine.handle(lost(B))
    machine.handle(ready(1, 1))
    worker_lost = ev.WorkerLost(rank=Rank(1), generation=Generation(1), reason="it died")
    assert ins.ReplaceWorker(rank=Rank(1), generation=Generation(2)) in machine.handle(worker_lost)
    machine.handle(ready(1, 2))
    again_lost = replace(worker_lost, generation=Generation(2))
    assert "was lost 2 times" in str(error_of(machine.handle(again_lost)))


def test_a_worker_that_is_replaced_meanwhile_gets_all_it_needs_by_itself() -> None:
    machine = running(reader_facts())
    machine.handle(ev.WorkerLost(rank=Rank(0), generation=Generation(0), reason="it died"))
    machine.handle(lost(B))
    assert machine.handle(dropped(B, lacking(0, 1), lacking(1), lacking(2))) == []
    assert machine.handle(ready(0, 1))[1:] == [again(A, (0, 1), (0,)), again(C, (2,), (0,))]


def test_what_a_node_says_after_it_was_given_up_does_not_count() -> None:
    machine = running(reader_facts())
    machine.handle(lost(B))
    disk = SourceError("disk gone", file="w")
    late: list[ev.Event] = [
        lost(B),
        ev.AgentFailed(node=B, error=ClusterError("no room")),
        ev.ExtentFailed(extent=ExtentId(1), node=B, error=disk, retryable=True),
    ]
    assert [machine.handle(event) for event in late] == [[], [], []]
    assert machine.stale_events == 3


def test_an_extent_that_failed_on_a_node_is_not_given_to_it_when_its_reader_is_lost() -> None:
    machine = running(reader_facts())
    disk = SourceError("disk gone", file="w")
    machine.handle(ev.ExtentFailed(extent=ExtentId(0), node=A, error=disk, retryable=True))
    machine.handle(lost(B))
    assert machine.handle(dropped(B, lacking(0, 0), lacking(1), lacking(2))) == [again(C, (0,), (0,))]


def test_a_node_that_has_no_part_in_the_load_may_go() -> None:
    assert running(reader_facts()).handle(lost(S)) == []


def test_large_ranks_are_placed_first_and_nodes_without_a_part_before_others() -> None:
    spares = [spare(A, 0, 100), spare(S, 0, 50), spare(S, 1, 100)]
    ranks = [Rank(0), Rank(1)]
    placed = place_again(ranks, (50, 100), spares, members=[A])
    assert placed == {Rank(0): spares[1], Rank(1): spares[2]}
    assert place_again(ranks, (100, 100), spares, members=[A]) == {Rank(0): spares[2], Rank(1): spares[0]}
    assert place_again(ranks, (101, 1), spares, members=[A]) is None


def test_an_extent_goes_to_the_consumer_that_was_given_least() -> None:
    assert choose_reader([A, B], [A, B, C], {A: 5}) == B
    assert choose_reader([S], [A, B, C], {A: 5, B: 1}) == C
    assert choose_reader([S], [], {}) is None


def test_blocks_pass_through_what_is_between() -> None:
    assert is_between(B, A, C, (A, B, C))
    assert is_between(B, C, A, (A, B, C))
    assert not is_between(C, A, B, (A, B, C))
    assert not is_between(B, A, C, ())
