"""Event logs: written, read, replayed. What is damaged is refused with its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import EventLog, LogEntry, as_document, check, replay
from megamind_ray.core.ids import ExtentId, Generation, NodeId, Rank
from megamind_ray.core.load_machine import LoadFacts, LoadMachine
from megamind_ray.core.node_loss import Lacking, Move, Spare
from megamind_ray.core.report import Fault
from megamind_ray.core.stragglers import ReaderPace
from megamind_ray.errors import CapacityError, ClusterError, IntegrityError, MegamindError, RequestError, SourceError

FACTS = LoadFacts(
    nodes=(NodeId("a"), NodeId("b")),
    num_ranks=2,
    # Not ascending: extents are read again in this order.
    reader={ExtentId(1): NodeId("b"), ExtentId(0): NodeId("a")},
    consumers={ExtentId(1): (Rank(1), Rank(0)), ExtentId(0): (Rank(0), Rank(1)), ExtentId(2): (Rank(0),)},
    extent_bytes={ExtentId(0): 100, ExtentId(1): 10, ExtentId(2): 1},
    max_worker_restarts=1,
    home=(NodeId("a"), NodeId("b")),
    arena_bytes=(100, 10),
    line=(NodeId("a"), NodeId("b")),
    readers=(NodeId("b"),),
    spares=(Spare(node=NodeId("c"), gpu=1, free_bytes=200),),
)

TEXT = st.text(max_size=40)  # also lone surrogates, line separators, quotes
COUNT = st.integers(0, 1 << 62)
RANK = st.integers(0, 1).map(Rank)
GENERATION = st.integers(0, 3).map(Generation)
EXTENT = st.integers(0, 2).map(ExtentId)
NODE = st.one_of(st.sampled_from(FACTS.nodes), TEXT.map(NodeId))
ERROR: st.SearchStrategy[MegamindError] = st.one_of(
    st.builds(MegamindError, TEXT),
    st.builds(RequestError, TEXT),
    st.builds(ClusterError, TEXT),
    st.builds(CapacityError, TEXT, where=TEXT, needed_bytes=COUNT, free_bytes=COUNT),
    st.builds(
        IntegrityError,
        TEXT,
        file=TEXT,
        tensor=st.none() | TEXT,
        begin=st.none() | COUNT,
        end=st.none() | COUNT,
    ),
    st.builds(SourceError, TEXT, file=TEXT, attempts=COUNT),
)
PACE = st.builds(
    ReaderPace, node=NODE, left_bytes=COUNT, begun_bytes=COUNT, bytes_per_s=st.floats(-1e18, 1e18) | st.just(0.0)
)
EVENTS: dict[type, st.SearchStrategy[Any]] = {
    ev.LoadStarted: st.builds(ev.LoadStarted),
    ev.WorkerLost: st.builds(ev.WorkerLost, rank=RANK, generation=GENERATION, reason=TEXT),
    ev.WorkerReady: st.builds(ev.WorkerReady, rank=RANK, generation=GENERATION),
    ev.RankDone: st.builds(ev.RankDone, rank=RANK, generation=GENERATION),
    ev.RankFailed: st.builds(ev.RankFailed, rank=RANK, generation=GENERATION, error=ERROR),
    ev.ExtentFailed: st.builds(ev.ExtentFailed, extent=EXTENT, node=NODE, error=ERROR, retryable=st.booleans()),
    ev.AgentLost: st.builds(ev.AgentLost, node=NODE, reason=TEXT),
    ev.NodeDropped: st.builds(
        ev.NodeDropped,
        node=NODE,
        lacking=st.lists(
            st.builds(Lacking, rank=RANK, generation=GENERATION, extents=st.lists(EXTENT, max_size=3).map(tuple)),
            max_size=2,
        ).map(tuple),
    ),
    ev.ReaderSlow: st.builds(ev.ReaderSlow, node=NODE, paces=st.lists(PACE, max_size=3).map(tuple)),
    ev.ReadsTakenBack: st.builds(
        ev.ReadsTakenBack, node=NODE, extents=st.lists(st.sampled_from([*FACTS.reader]), max_size=3).map(tuple)
    ),
    ev.PlannerRestarted: st.builds(
        ev.PlannerRestarted,
        reason=TEXT,
        lacking=st.lists(
            st.builds(Lacking, rank=RANK, generation=GENERATION, extents=st.lists(EXTENT, max_size=3).map(tuple)),
            max_size=2,
        ).map(tuple),
    ),
    ev.AgentFailed: st.builds(ev.AgentFailed, node=NODE, error=ERROR),
    ev.CancelRequested: st.builds(ev.CancelRequested, reason=TEXT),
    ev.DeadlinePassed: st.builds(ev.DeadlinePassed, what=TEXT),
}
FAULT = st.builds(Fault, kind=TEXT, where=TEXT, action=TEXT, bytes_retried=COUNT, at_s=st.none() | st.floats(-1e9, 1e9))
INSTRUCTIONS: dict[type, st.SearchStrategy[Any]] = {
    ins.StartReads: st.builds(ins.StartReads, node=NODE),
    ins.StartRank: st.builds(ins.StartRank, rank=RANK, generation=GENERATION),
    ins.ReplaceWorker: st.builds(ins.ReplaceWorker, rank=RANK, generation=GENERATION),
    ins.ReadAgain: st.builds(
        ins.ReadAgain,
        node=NODE,
        extents=st.lists(EXTENT, max_size=4).map(tuple),
        ranks=st.lists(RANK, max_size=3).map(tuple),
    ),
    ins.TakeBack: st.builds(ins.TakeBack, node=NODE, keep_bytes=COUNT),
    ins.ReadInstead: st.builds(ins.ReadInstead, node=NODE, extents=st.lists(EXTENT, max_size=4).map(tuple)),
    ins.DropNode: st.builds(
        ins.DropNode,
        node=NODE,
        moves=st.lists(
            st.builds(Move, rank=RANK, generation=GENERATION, node=NODE, gpu=st.integers(0, 7)), max_size=2
        ).map(tuple),
        joins=st.lists(NODE, max_size=2).map(tuple),
        line=st.lists(NODE, max_size=3).map(tuple),
    ),
    ins.RecordFault: st.builds(ins.RecordFault, fault=FAULT),
    ins.CompleteLoad: st.builds(ins.CompleteLoad),
    ins.AbortLoad: st.builds(ins.AbortLoad, error=ERROR),
}
ENTRIES = st.lists(
    st.builds(
        LogEntry,
        at_s=st.floats(-1e9, 1e9),
        event=st.one_of(*EVENTS.values()),
        instructions=st.lists(st.one_of(*INSTRUCTIONS.values()), max_size=4).map(tuple),
    ),
    max_size=6,
)


def recorded(*happened: ev.Event, facts: LoadFacts = FACTS) -> EventLog:
    """The log of a machine that took these events, a second apart."""
    machine = LoadMachine(facts)
    entries = [
        LogEntry(at_s=float(number), event=event, instructions=tuple(machine.handle(event)))
        for number, event in enumerate(happened)
    ]
    return EventLog(facts=facts, entries=tuple(entries), load="m#1", release="1.2.3")


@pytest.fixture
def log() -> EventLog:
    """A worker is lost and replaced, an extent moves, then all is done."""
    disk_gone = SourceError("disk gone", file="w.safetensors", attempts=4)
    return recorded(
        ev.LoadStarted(),
        ev.WorkerLost(rank=Rank(1), generation=Generation(0), reason="its process ended"),
        ev.ExtentFailed(extent=ExtentId(0), node=NodeId("a"), error=disk_gone, retryable=True),
        ev.WorkerReady(rank=Rank(1), generation=Generation(1)),
        ev.RankDone(rank=Rank(0), generation=Generation(0)),
        ev.RankDone(rank=Rank(1), generation=Generation(1)),
    )


def test_the_strategies_know_every_event_and_instruction() -> None:
    assert set(EVENTS) == set(get_args(ev.Event))
    assert set(INSTRUCTIONS) == set(get_args(ins.Instruction))


@given(ENTRIES, TEXT, TEXT)
def test_every_event_and_instruction_survives_the_file(entries: list[LogEntry], load: str, release: str) -> None:
    log = EventLog(facts=FACTS, entries=tuple(entries), load=load, release=release)

    again = EventLog.from_jsonl(log.to_jsonl())

    assert again.to_jsonl() == log.to_jsonl()
    assert again.facts == log.facts
    assert list(again.facts.reader) == list(log.facts.reader), "the order in which extents are read again"
    assert (again.load, again.release) == (load, release)
    assert [type(entry.event) for entry in again.entries] == [type(entry.event) for entry in entries]
    assert [entry.at_s for entry in again.entries] == [entry.at_s for entry in entries]


@given(st.one_of(*(EVENTS[kind] for kind in EVENTS if kind not in (ev.RankFailed, ev.ExtentFailed, ev.AgentFailed))))
def test_an_event_without_an_error_comes_back_equal(event: ev.Event) -> None:
    log = EventLog(facts=FACTS, entries=(LogEntry(at_s=0.0, event=event),))

    assert EventLog.from_jsonl(log.to_jsonl()).entries == log.entries


@given(ERROR)
def test_an_error_comes_back_with_its_class_its_text_and_its_fields(error: MegamindError) -> None:
    event = ev.AgentFailed(node=NodeId("a"), error=error)
    log = EventLog(facts=FACTS, entries=(LogEntry(at_s=0.0, event=event),))

    (entry,) = EventLog.from_jsonl(log.to_jsonl()).entries

    assert isinstance(entry.event, ev.AgentFailed)
    again = entry.event.error
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_an_error_of_a_class_of_somewhere_else_comes_back_as_what_it_derives_from() -> None:
    class ActorLostError(ClusterError):
        """As in ``actors``."""

    log = recorded(
        ev.LoadStarted(), ev.RankFailed(rank=Rank(0), generation=Generation(0), error=ActorLostError("gone"))
    )

    abort = replay(EventLog.from_jsonl(log.to_jsonl()))[-1]

    assert isinstance(abort, ins.AbortLoad)
    assert (type(abort.error), str(abort.error)) == (ClusterError, "gone")
    assert check(EventLog.from_jsonl(log.to_jsonl())) is None


def test_a_replay_gives_the_instructions_that_were_recorded(log: EventLog) -> None:
    again = EventLog.from_jsonl(log.to_jsonl())
    said = [instruction for entry in log.entries for instruction in entry.instructions]

    assert as_document(tuple(replay(again))) == as_document(tuple(said))
    assert isinstance(replay(again)[-1], ins.CompleteLoad)
    assert check(again) is None


def test_sizes_that_were_computed_with_numpy_are_written_too() -> None:
    error = CapacityError("full", where="pool", needed_bytes=np.int64(3), free_bytes=np.int64(-1))  # type: ignore[arg-type]
    log = recorded(ev.LoadStarted(), ev.AgentFailed(node=NodeId("a"), error=error))

    (_, entry) = EventLog.from_jsonl(log.to_jsonl()).entries

    assert isinstance(entry.event, ev.AgentFailed)
    assert vars(entry.event.error) == {"message": "full", "where": "pool", "needed_bytes": 3, "free_bytes": -1}


@given(ENTRIES)
def test_a_log_that_a_machine_made_is_replayed_exactly(entries: list[LogEntry]) -> None:
    log = recorded(ev.LoadStarted(), *(entry.event for entry in entries))

    assert check(EventLog.from_jsonl(log.to_jsonl())) is None


def test_the_first_difference_is_told(log: EventLog) -> None:
    entries = list(log.entries)
    other = ins.ReplaceWorker(rank=Rank(1), generation=Generation(7))
    entries[1] = replace(entries[1], instructions=(entries[1].instructions[0], other))
    entries[5] = replace(entries[5], instructions=())

    difference = check(replace(log, entries=tuple(entries)))

    assert difference is not None
    assert difference.line == 3, "the header, the start, then this"
    assert difference.entry is entries[1]
    assert difference.replayed[1] == ins.ReplaceWorker(rank=Rank(1), generation=Generation(1))


def test_other_facts_give_another_replay(log: EventLog) -> None:
    difference = check(replace(log, facts=replace(FACTS, max_worker_restarts=0)))

    assert difference is not None
    assert difference.line == 3
    assert isinstance(difference.replayed[0], ins.AbortLoad)


def edited(log: EventLog, line: int, edit: Callable[[dict[str, Any]], object]) -> str:
    lines = log.to_jsonl().splitlines()
    document = json.loads(lines[line - 1])
    edit(document)
    lines[line - 1] = json.dumps(document)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("line", "edit", "what"),
    [
        (1, lambda it: it.update(schema="megamind.events/2"), "schema is 'megamind.events/2'"),
        (1, lambda it: it.pop("facts"), "'facts' is missing"),
        (1, lambda it: it["facts"].pop("reader"), "'reader' is missing"),
        (1, lambda it: it["facts"].update(num_ranks=1), "rank 1 is not among"),
        (1, lambda it: it["facts"].update(num_ranks=10**12), "too many"),
        (1, lambda it: it["facts"]["consumers"].pop(0), "nobody consumes extent 1"),
        (1, lambda it: it["facts"]["extent_bytes"].pop(0), "the size of extent 0 is missing"),
        (1, lambda it: it["facts"]["reader"].append([0, "b"]), "twice"),
        (1, lambda it: it["facts"].update(home=["a"]), "1 nodes and 2 arenas for 2 ranks"),
        (1, lambda it: it["facts"]["spares"][0].pop("gpu"), "'gpu' is missing"),
        (3, lambda it: it["event"].update(type="WorkerFound"), "type 'WorkerFound' is not known"),
        (3, lambda it: it["event"].update(rank=2), "rank 2 is not among"),
        (3, lambda it: it["event"].update(rank=True), "True stands where a whole number should"),
        (3, lambda it: it["event"].update(rank=-1), "-1 stands where a number of something should"),
        (3, lambda it: it["event"].update(generation=10**400), "stands where a whole number should"),
        (3, lambda it: it.update(at_s=10**400), "stands where a number should"),
        (3, lambda it: it.update(at_s=None), "None stands where a number should"),
        (3, lambda it: it["event"].pop("reason"), "'reason' is missing"),
        (3, lambda it: it.update(at_s="now"), "'now' stands where a number should"),
        (3, lambda it: it["instructions"][0]["fault"].update(where=None), "None stands where text should"),
        (4, lambda it: it["event"].update(extent=9), "extent 9 is not in the facts"),
        (4, lambda it: it["event"].update(retryable=1), "1 stands where true or false should"),
        (4, lambda it: it["event"]["error"].update(type="SystemExit"), "error 'SystemExit' is not known"),
        (4, lambda it: it["event"].update(error="disk gone"), "stands where an error should"),
        (4, lambda it: it.update(instructions={}), "stands where a list should"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_damaged_is_named_with_its_line(
    log: EventLog, line: int, edit: Callable[[dict[str, Any]], object], what: str
) -> None:
    with pytest.raises(RequestError, match=rf"line {line}: .*{what}"):
        EventLog.from_jsonl(edited(log, line, edit))


def test_a_log_that_breaks_off_is_refused(log: EventLog) -> None:
    text = log.to_jsonl()

    with pytest.raises(RequestError, match="line 7: "):
        EventLog.from_jsonl(text[:-10])
    with pytest.raises(RequestError, match="line 6: it ends after 5 of 6 events"):
        EventLog.from_jsonl(text[: text.rstrip().rindex("\n") + 1])


@pytest.mark.parametrize("text", ["", "\n", "hello\n", "[]\n", "{}\n", "[" * 100_000, "NaN", "\x00"])
def test_what_is_no_log_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="event log"):
        EventLog.from_jsonl(text)


@given(st.data())
def test_whatever_is_flipped_is_refused_or_can_be_replayed(data: st.DataObject) -> None:
    """A damaged log must not end in a stack trace."""
    raw = bytearray(
        recorded(
            ev.LoadStarted(),
            ev.WorkerLost(rank=Rank(1), generation=Generation(0), reason="ended"),
            ev.WorkerReady(rank=Rank(1), generation=Generation(1)),
        )
        .to_jsonl()
        .encode()
    )
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 127))
    try:
        log = EventLog.from_jsonl(raw.decode())
    except RequestError:
        return
    check(log)
