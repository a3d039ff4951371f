"""Which reader is slow, what it keeps, who reads the rest; and what a load does about it. No clock, no storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.config import StragglerConfig
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import EventLog, LogEntry, check
from megamind_ray.core.ids import ExtentId, NodeId, Rank
from megamind_ray.core.load_machine import LoadFacts, LoadMachine
from megamind_ray.core.stragglers import (
    ReaderPace,
    ReadProgress,
    SlowReader,
    StragglerWatch,
    bytes_to_keep,
    share_reads,
)
from megamind_ray.errors import SourceError

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
LIMITS = StragglerConfig(ratio=1.5, window_s=1.0, gain_s=1.0, max_moves=2)
TOTAL = 10_000
LOOK_S = 0.25


class Load:
    """Readers at steady rates, as a watch sees them; each works on ``at_once`` extents of 100 bytes, all equally fast.

    Args:
        rates: Bytes per second, by node.
        total: Bytes that each has to read.
        at_once: Extents that a node is at.
        limits: Of the watch.
    """

    def __init__(
        self, rates: Mapping[NodeId, float], *, total: int = TOTAL, at_once: int = 1, limits: StragglerConfig = LIMITS
    ) -> None:
        self.rates, self.total, self.at_once = dict(rates), dict.fromkeys(rates, total), at_once
        self.read = dict.fromkeys(rates, 0.0)
        self.watch = StragglerWatch(limits)
        self.now_s = 0.0

    def progress(self, node: NodeId) -> ReadProgress:
        # What is under way together ends together.
        group = 100 * self.at_once
        total = self.total[node]
        done = min(total, int(self.read[node]) // group * group) if self.read[node] < total else total
        begun = min(group, total - done)
        return ReadProgress(done_bytes=done, begun_bytes=begun, waiting_bytes=total - done - begun)

    def look(self) -> SlowReader | None:
        return self.watch.look(self.now_s, {node: self.progress(node) for node in self.rates})

    def run(self, seconds: float) -> list[tuple[float, SlowReader]]:
        """When the watch tells of a slow reader, and of whom."""
        told = []
        until_s = self.now_s + seconds
        while self.now_s <= until_s:
            found = self.look()
            if found is not None:
                told.append((self.now_s, found))
            self.now_s += LOOK_S
            for node, rate in self.rates.items():
                self.read[node] = min(self.total[node], self.read[node] + rate * LOOK_S)
        return told

    def give(self, node: NodeId, nbytes: int) -> None:
        """Moves reading to or from a node."""
        self.total[node] += nbytes


def test_a_reader_ten_times_slower_than_the_others_is_told_of_soon() -> None:
    told = Load({A: 1000, B: 1000, C: 100}).run(2)
    assert [slow.node for _, slow in told][:1] == [C]
    at_s, slow = told[0]
    assert at_s <= 2.0
    paces = {pace.node: pace.bytes_per_s for pace in slow.paces}
    assert paces[A] == paces[B] == pytest.approx(1000, rel=0.1)
    assert 100 <= paces[C] <= 250, "the most that it can have read"


@pytest.mark.parametrize("rate", [10, 1000, 100_000])
def test_where_all_are_slow_or_all_are_fast_nobody_is(rate: float) -> None:
    assert Load({A: rate, B: rate, C: rate}).run(30) == []


def test_a_single_reader_gives_nothing_away() -> None:
    assert Load({A: 1}).run(30) == []
    alone = Load({A: 1, B: 1000})
    alone.total[B] = 0
    assert alone.run(30) == [], "nobody else reads, so there is nothing to compare it with"


def test_a_reader_that_is_done_by_the_second_look_tells_who_is_slow() -> None:
    load = Load({A: 1e9, B: 100})
    load.total = {A: 0, B: 0}
    assert load.look() is None, "before they begin"
    load.total = {A: TOTAL, B: TOTAL}
    load.now_s, load.read[A] = LOOK_S, float(TOTAL)
    assert [slow.node for _, slow in load.run(5)][:1] == [B]


def test_a_reader_with_less_to_read_may_be_slower() -> None:
    load = Load({A: 1000, B: 1000, C: 100})
    load.total[C] = TOTAL // 10
    assert load.run(30) == []


@pytest.mark.parametrize(("rate", "num_told"), [(800, 0), (400, 2)])
def test_what_is_nearly_as_fast_is_left_alone(rate: float, num_told: int) -> None:
    assert len(Load({A: 1000, B: 1000, C: rate}).run(30)) == num_told


def test_what_is_under_way_tells_nothing() -> None:
    """All are equally slow, and their sixteen requests end together, every 16 s, at different times."""
    load = Load({A: 100, B: 100, C: 100}, at_once=16)
    load.read[A], load.read[B] = 1500.0, 800.0
    assert load.run(90) == []


def test_long_reads_are_seen_through_in_time() -> None:
    """The slow one's sixteen requests end after 16 s: nothing is there to be seen before, and that is enough."""
    told = Load({A: 1000, B: 1000, C: 100}, at_once=16).run(10)
    assert [slow.node for _, slow in told][:1] == [C]
    assert 2.0 < told[0][0] < 8.0


def test_a_reader_that_becomes_slow_later_is_told_of_soon() -> None:
    load = Load({A: 100, B: 100, C: 100}, total=20_000)
    assert load.run(60) == []
    load.rates[C] = 10
    told = load.run(30)
    assert [slow.node for _, slow in told][:1] == [C]
    assert told[0][0] < 60 + 12


def test_it_is_told_once_for_each_window_and_at_most_so_often() -> None:
    told = Load({A: 1000, B: 1000, C: 10}).run(60)
    assert len(told) == LIMITS.max_moves
    assert told[1][0] - told[0][0] >= LIMITS.window_s


def test_a_reader_that_has_begun_all_keeps_it() -> None:
    load = Load({A: 1000, B: 1000, C: 10}, at_once=100)
    assert load.run(30) == []


def test_what_gains_too_little_is_not_worth_it() -> None:
    assert Load({A: 1000, B: 1000, C: 100}, total=150).run(10) == []
    assert Load({A: 1000, B: 1000, C: 100}, limits=replace(LIMITS, gain_s=1000.0)).run(10) == []


def test_switched_off_it_tells_of_nobody() -> None:
    assert Load({A: 1000, B: 1000, C: 10}, limits=replace(LIMITS, replan=False)).run(30) == []


def test_a_node_that_did_not_answer_is_not_judged() -> None:
    load = Load({A: 1000, B: 1000, C: 10})
    for _ in range(20):
        progress = {node: load.progress(node) for node in load.rates}
        assert load.watch.look(load.now_s, progress, heard=[A, B]) is None
        load.now_s += LOOK_S
        load.read = {node: min(TOTAL, load.read[node] + rate * LOOK_S) for node, rate in load.rates.items()}


def test_while_a_node_is_silent_nobody_is_judged_and_after_its_loss_all_begins_anew() -> None:
    """Others wait for a node that is gone: one seems slow that is not."""
    load = Load({A: 1000, B: 1000, C: 10})
    times: list[float] = []
    while load.now_s < 5 and not times:
        gone = [B] if load.now_s >= 4 else []
        progress = {node: load.progress(node) for node in load.rates if node not in gone}
        if load.watch.look(load.now_s, progress, heard=[C, A] if load.now_s < 4 else None) is not None:
            times.append(load.now_s)
        load.now_s += LOOK_S
        load.read = {node: min(TOTAL, load.read[node] + rate * LOOK_S) for node, rate in load.rates.items()}
    assert times == [], "B does not answer, then it is lost, and a second has not passed since"


def test_one_that_waits_for_credit_all_the_time_is_slow_too() -> None:
    """Its link brings nobody anything: nothing is done, nothing begun."""
    watch = StragglerWatch(LIMITS)
    for step in range(1, 9):
        done = 250 * step
        progress = {
            A: ReadProgress(done_bytes=done, begun_bytes=100, waiting_bytes=9000 - done),
            B: ReadProgress(waiting_bytes=9000),
        }
        found = watch.look(step * LOOK_S, progress)
        if found is not None:
            break
    assert found is not None
    assert found.node == B
    assert [pace.bytes_per_s for pace in found.paces if pace.node == B] == [0.0]
    assert bytes_to_keep(B, found.paces) == 0


def test_many_looks_are_remembered_in_bounded_memory() -> None:
    load = Load({A: 10, B: 10, C: 10}, total=20_000)
    load.run(600)
    assert len(load.watch._samples) <= 128
    assert load.watch._active_s[A] == pytest.approx(600, abs=1)


def pace(node: NodeId, left: int, rate: float, begun: int = 0) -> ReaderPace:
    return ReaderPace(node=node, left_bytes=left, begun_bytes=begun, bytes_per_s=rate)


def test_a_slow_reader_keeps_what_it_can_read_until_all_are_done() -> None:
    # 30 s of work for 300 bytes/s in all: 20 s, in which it reads 200.
    paces = (pace(A, 3000, 100), pace(B, 3000, 190), pace(C, 0, 0), pace(NodeId("d"), 0, 10))
    assert bytes_to_keep(B, paces) == 3800
    assert bytes_to_keep(B, (*paces[:1], replace(paces[1], begun_bytes=3000), *paces[2:])) == 800
    assert bytes_to_keep(C, paces) == 0
    assert bytes_to_keep(NodeId("nobody"), paces) == 0
    assert bytes_to_keep(A, (pace(A, 10, 0),)) == 0


def give(
    sizes: Mapping[int, int], paces: tuple[ReaderPace, ...], *, blind: tuple[NodeId, ...] = (), homes: NodeId = A
) -> dict[NodeId, tuple[ExtentId, ...]]:
    readers = [one.node for one in paces if one.node not in blind]
    extent_bytes = {ExtentId(extent): size for extent, size in sizes.items()}
    return share_reads(
        list(extent_bytes), extent_bytes, paces, readers_of=lambda _: readers, homes_of=lambda _: [homes]
    )


def test_the_faster_and_the_less_busy_get_more() -> None:
    sizes = dict.fromkeys(range(6), 10)
    assert give(sizes, (pace(A, 0, 10), pace(B, 0, 20))) == {A: (1, 4), B: (0, 2, 3, 5)}
    assert give(sizes, (pace(A, 40, 10), pace(B, 0, 10))) == {A: (4,), B: (0, 1, 2, 3, 5)}


def test_the_longest_first() -> None:
    assert give({0: 10, 1: 30, 2: 20}, (pace(A, 0, 1), pace(B, 0, 1))) == {A: (1,), B: (0, 2)}


def test_who_needs_an_extent_goes_before_others_that_would_be_done_as_soon() -> None:
    assert give({0: 10}, (pace(A, 0, 1), pace(B, 0, 1)), homes=B) == {B: (0,)}


def test_who_cannot_read_or_never_has_gets_nothing() -> None:
    assert give({0: 10}, (pace(A, 0, 1), pace(B, 50, 1)), blind=(A,)) == {B: (0,)}
    assert give({0: 10}, (pace(A, 0, 0), pace(B, 50, 1))) == {B: (0,)}
    assert give({0: 10}, (pace(A, 0, 1),), blind=(A,)) == {}


@given(
    sizes=st.lists(st.integers(1, 1000), max_size=30),
    speeds=st.lists(st.tuples(st.integers(0, 5000), st.floats(0.1, 100)), min_size=1, max_size=5),
)
def test_every_extent_goes_to_one_reader_and_all_are_done_within_the_bound_of_lists(
    sizes: list[int], speeds: list[tuple[int, float]]
) -> None:
    paces = tuple(pace(NodeId(f"n{number}"), left, rate) for number, (left, rate) in enumerate(speeds))
    shares = give(dict(enumerate(sizes)), paces)
    assert sorted(extent for given_ in shares.values() for extent in given_) == list(range(len(sizes)))
    if not sizes:
        return
    ends = {
        one.node: (one.left_bytes + sum(sizes[extent] for extent in shares.get(one.node, ()))) / one.bytes_per_s
        for one in paces
    }
    # Nobody would have been done earlier with the last thing that whoever ends last was given.
    last = max((node for node in ends if node in shares), key=lambda node: ends[node])
    least = min(sizes[extent] for extent in shares[last])
    assert all(ends[last] <= ends[one.node] + least / one.bytes_per_s + 1e-9 * ends[last] for one in paces)


# The load machine.

EXTENTS = [ExtentId(extent) for extent in range(12)]


def facts(readers: tuple[NodeId, ...] = ()) -> LoadFacts:
    """Four extents of 100 bytes each for each of three nodes in a line; all ranks need all."""
    everyone = (Rank(0), Rank(1), Rank(2))
    return LoadFacts(
        nodes=(A, B, C),
        num_ranks=3,
        reader={extent: (A, B, C)[extent % 3] for extent in EXTENTS},
        consumers=dict.fromkeys(EXTENTS, everyone),
        extent_bytes=dict.fromkeys(EXTENTS, 100),
        home=(A, B, C),
        arena_bytes=(1, 1, 1),
        line=(A, B, C),
        readers=readers,
    )


SLOW = ev.ReaderSlow(node=B, paces=(pace(A, 200, 100), pace(B, 400, 10, begun=100), pace(C, 200, 100)))


def running(machine_facts: LoadFacts) -> LoadMachine:
    machine = LoadMachine(machine_facts)
    machine.handle(ev.LoadStarted())
    return machine


def taken(node: NodeId, *extents: int) -> ev.ReadsTakenBack:
    return ev.ReadsTakenBack(node=node, extents=tuple(ExtentId(one) for one in extents))


def instead(node: NodeId, *extents: int) -> ins.ReadInstead:
    return ins.ReadInstead(node=node, extents=tuple(ExtentId(one) for one in extents))


def test_a_slow_reader_is_asked_and_what_it_gives_is_read_by_others() -> None:
    machine = running(facts())
    assert machine.handle(SLOW) == [ins.TakeBack(node=B, keep_bytes=0)]
    record, *orders = machine.handle(taken(B, 4, 7, 10))
    assert orders == [instead(A, 4, 10), instead(C, 7)]
    assert isinstance(record, ins.RecordFault)
    assert record.fault.kind == "straggler"
    assert record.fault.where == "node b: reads at most 10 B/s, other nodes 100 B/s in the median"
    assert record.fault.action == "300 B that it had not begun, 3 extents, are read by a (200 B), c (100 B)"
    assert record.fault.bytes_retried == 0


def test_it_keeps_what_it_can_read_meanwhile() -> None:
    faster = replace(SLOW, paces=(pace(A, 200, 100), pace(B, 400, 100, begun=100), pace(C, 0, 100)))
    assert running(facts()).handle(faster) == [ins.TakeBack(node=B, keep_bytes=100)]


def test_one_that_had_begun_all_gives_nothing_and_nothing_is_said_of_it() -> None:
    machine = running(facts())
    machine.handle(SLOW)
    assert machine.handle(taken(B)) == []
    assert machine.handle(SLOW) == [ins.TakeBack(node=B, keep_bytes=0)], "it may be asked again"


def test_while_one_is_asked_no_other_is() -> None:
    machine = running(facts())
    machine.handle(SLOW)
    assert machine.handle(replace(SLOW, node=C)) == []
    assert machine.handle(taken(C, 5)) == []


def test_what_nobody_else_can_read_goes_back() -> None:
    machine = running(facts())
    for node in (A, C):
        failed = ev.ExtentFailed(extent=EXTENTS[4], node=node, error=SourceError("no", file="w"), retryable=True)
        machine.handle(failed)
    machine.handle(SLOW)
    orders = [one for one in machine.handle(taken(B, 4, 7)) if isinstance(one, ins.ReadInstead)]
    assert orders == [instead(A, 7), instead(B, 4)]
    only = running(facts(readers=(B,)))
    only.handle(SLOW)
    assert only.handle(taken(B, 4, 7)) == [instead(B, 4, 7)], "and nothing was moved, so that there is no fault"


def test_a_slow_reader_that_is_lost_meanwhile_is_lost() -> None:
    machine = running(replace(facts(), home=(A, A, C)))
    machine.handle(SLOW)
    assert ins.DropNode(node=B, line=(A, C)) in machine.handle(ev.AgentLost(node=B, reason="gone"))
    assert machine.handle(taken(B, 4)) == []
    assert machine.handle(replace(SLOW, node=A)) == [ins.TakeBack(node=A, keep_bytes=380)]
    assert machine.handle(SLOW) == []


def test_what_moved_is_read_again_by_its_new_reader() -> None:
    """A rank is replaced after the move: what it needs comes from those that read it by then."""
    machine = running(facts())
    machine.handle(SLOW)
    machine.handle(taken(B, 4, 7, 10))
    machine.handle(ev.WorkerLost(rank=Rank(0), generation=machine.generations[Rank(0)], reason="it died"))
    said = machine.handle(ev.WorkerReady(rank=Rank(0), generation=machine.generations[Rank(0)]))
    by_node = {one.node: one.extents for one in said if isinstance(one, ins.ReadAgain)}
    assert by_node == {A: (0, 3, 4, 6, 9, 10), B: (1,), C: (2, 5, 7, 8, 11)}


def test_the_log_gives_the_same_decisions_again() -> None:
    machine = LoadMachine(facts())
    uneven = replace(SLOW, paces=(pace(A, 200, 100 / 3), pace(B, 400, 0.1, begun=100), pace(C, 200, 1e-9)))
    happened: list[ev.Event] = [ev.LoadStarted(), uneven, taken(B, 4, 7, 10)]
    entries = [LogEntry(at_s=0.0, event=event, instructions=tuple(machine.handle(event))) for event in happened]
    assert entries[-1].instructions
    log = EventLog.from_jsonl(EventLog(facts=facts(), entries=tuple(entries)).to_jsonl())
    assert check(log) is None
    assert log.entries[1].event == uneven
