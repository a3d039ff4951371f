"""A reader ten times slower than the others, without Ray: what it has not begun is read by others, and once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.ids import NodeId, Rank
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.fleet_cases import (
    LAYOUTS,
    Layout,
    config,
    plan_of,
    require_right,
    said,
    spares_on,
    transfer,
)
from megamind_ray.testing.strikes import NodeStrike, PlannerStrike, SlowStorage, Strike, WorkerStrike
from megamind_ray.testing.thread_fleet import ThreadFleet

NUM_SCHEDULES = 36
_MOST_CALLS = 700
_IN_FLIGHT = 2  # threads that read on a node
S0 = NodeId("s0")
SEVERAL = [layout for layout in LAYOUTS if layout.force_pool and len(layout.nodes) > 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("llama"), num_layers=6, num_files=2)


def reads_of(storage: SlowStorage) -> Counter[tuple[str, int]]:
    """How often each extent was read, by anybody."""
    return Counter(read for node in storage.by_node.values() for read in node.reads)


def taken_back(fleet: ThreadFleet) -> list[ev.ReadsTakenBack]:
    return [entry.event for entry in fleet.log if isinstance(entry.event, ev.ReadsTakenBack)]


def num_by_plan(folder: Path, layout: Layout, node: NodeId) -> int:
    return plan_of(folder, layout).tables["extents"]["node"].to_pylist().count(node)


@pytest.mark.parametrize("layout", SEVERAL, ids=lambda layout: f"{layout.parallel}")
@pytest.mark.parametrize("place", [0, 1])
def test_what_a_slow_reader_has_not_begun_is_read_by_others(folder: Path, layout: Layout, place: int) -> None:
    slow = layout.nodes[place]
    storage = SlowStorage(layout.nodes, [slow])
    fleet = ThreadFleet(transfer(folder, layout), config(force_pool=True), storage=storage)
    fleet.run()
    statuses = {node: fleet.node(node).load.status() for node in layout.nodes}  # type: ignore[union-attr]
    require_right(fleet, folder, layout)

    # Every extent once, whoever reads it: what was given away was not begun, and what was begun was not given away.
    plan = plan_of(folder, layout)
    assert set(reads_of(storage).values()) == {1}
    assert sum(reads_of(storage).values()) == len(plan.tables["extents"])
    assert sum(status.bytes_read for status in statuses.values()) == plan.bytes_from_storage
    assert [status.bytes_retried for status in statuses.values()] == [0] * len(layout.nodes)
    assert {status.reads.left_bytes for status in statuses.values()} == {0}

    # Threads that get no processor for a few reads are slow, too: others may give some away as well.
    taken = [extent for event in taken_back(fleet) if event.node == slow for extent in event.extents]
    given = [extent for order in said(fleet, ins.ReadInstead) if order.node == slow for extent in order.extents]
    assert len(storage.by_node[slow].reads) == num_by_plan(folder, layout, slow) - len(taken) + len(given)
    assert len(taken) > len(given)
    faults = [one.fault for one in said(fleet, ins.RecordFault)]
    assert {fault.kind for fault in faults} == {"straggler"}
    assert any(fault.where.startswith(f"node {slow}: ") for fault in faults)
    assert {fault.bytes_retried for fault in faults} == {0}


@pytest.mark.parametrize("step", range(10, 40, 2))
def test_what_a_slow_reader_gave_away_is_read_though_the_planner_that_took_it_dies(folder: Path, step: int) -> None:
    """Before it asks, between the answer and the orders to others, and after them."""
    layout = LAYOUTS[0]
    storage = SlowStorage(layout.nodes, [layout.nodes[0]])
    fleet = ThreadFleet(
        transfer(folder, layout), config(force_pool=True), storage=storage, strikes=[PlannerStrike(after=step)]
    )
    fleet.run()
    require_right(fleet, folder, layout)


def test_switched_off_the_slow_reader_reads_all_of_its_own(folder: Path) -> None:
    layout, settings = LAYOUTS[0], config(force_pool=True)
    slow = layout.nodes[0]
    storage = SlowStorage(layout.nodes, [slow], times=3)
    off = replace(settings, straggler=replace(settings.straggler, replan=False))
    fleet = ThreadFleet(transfer(folder, layout), off, storage=storage)
    fleet.run()
    require_right(fleet, folder, layout)
    assert len(storage.by_node[slow].reads) == num_by_plan(folder, layout, slow)
    assert said(fleet, ins.TakeBack) == []


def test_a_slow_reader_that_alone_sees_the_files_keeps_them(folder: Path) -> None:
    layout = LAYOUTS[0]
    slow = layout.nodes[0]
    storage = SlowStorage(layout.nodes, [slow], times=3)
    only = transfer(folder, layout, readers=[slow])
    fleet = ThreadFleet(only, config(force_pool=True), storage=storage)
    fleet.run()
    require_right(fleet, folder, layout)
    assert set(reads_of(storage).values()) == {1}
    assert {order.node for order in said(fleet, ins.ReadInstead)} <= {slow}
    assert said(fleet, ins.RecordFault) == []


def test_a_block_goes_along_the_line_from_its_new_reader(folder: Path) -> None:
    """Each node takes a block in once, whoever reads it: nobody is served by the new reader alone."""
    layout = LAYOUTS[1]
    slow = plan_of(folder, layout).line[0]
    fleet = ThreadFleet(transfer(folder, layout), config(force_pool=True), storage=SlowStorage(layout.nodes, [slow]))
    fleet.run()
    sent = {node: fleet.node(node).load.status().bytes_sent for node in layout.nodes}  # type: ignore[union-attr]
    require_right(fleet, folder, layout)
    nbytes = int(plan_of(folder, layout).tables["blocks"]["nbytes"].to_numpy().sum())
    assert sum(sent.values()) == (len(layout.nodes) - 1) * nbytes
    assert max(sent.values()) <= 2 * nbytes


def schedule(seed: int) -> tuple[Layout, list[NodeId], list[Strike], list[NodeId], int]:
    """What is loaded, who is slow, what goes wrong beside that, who cannot see the files, and blocks in a pool."""
    chance = random.Random(seed)
    layout = SEVERAL[seed % len(SEVERAL)]
    slow = [chance.choice(layout.nodes)]
    strikes: list[Strike] = []
    if chance.random() < 0.5:
        node = chance.choice([*layout.nodes, *slow])
        kind = chance.choice(("crash", "freeze", "cut_off"))
        after = chance.randrange(0, _MOST_CALLS)
        strikes.append(NodeStrike(after=after, node=node, kind=kind, noticed_after_s=chance.choice((0.0, 0.05))))
    if chance.random() < 0.5:
        rank = Rank(chance.choice(list(layout.parallel.ranks)))
        strikes.append(WorkerStrike(after=chance.randrange(0, _MOST_CALLS), rank=rank))
    blind = [chance.choice(layout.nodes)] if len(layout.nodes) > 2 and chance.random() < 0.2 else []
    return layout, slow, strikes, blind, chance.choice((4, 8, 64))


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_whatever_else_goes_wrong_every_byte_arrives(folder: Path, seed: int) -> None:
    layout, slow, strikes, blind, blocks_in_pool = schedule(seed)
    storage = SlowStorage([*layout.nodes, S0], slow)
    fleet = ThreadFleet(
        transfer(folder, layout, spares=spares_on(S0, gpus=2), blocks_in_pool=blocks_in_pool),
        config(force_pool=True),
        strikes=strikes,
        blind=blind,
        storage=storage,
        shaken=seed,
    )
    fleet.run()
    if fleet.error is not None:
        lost = {entry.event.node for entry in fleet.log if isinstance(entry.event, ev.AgentLost)}
        assert blind, fleet.error
        assert len(lost) + len(blind) >= len(layout.nodes), f"{fleet.error}, {lost}"
        return
    require_right(fleet, folder, layout)
    given = Counter(extent for order in said(fleet, ins.ReadInstead) for extent in order.extents)
    assert max(given.values(), default=1) <= config(force_pool=True).straggler.max_moves
    if not strikes and not blind:
        assert set(reads_of(storage).values()) == {1}
