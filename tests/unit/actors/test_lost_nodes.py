"""Nodes and planners lost in the middle of a load, without Ray: every byte arrives, nothing is left in a pool."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.ids import NodeId, Rank
from megamind_ray.errors import ClusterError
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
from megamind_ray.testing.strikes import NodeStrike, PlannerStrike, Strike, WorkerStrike
from megamind_ray.testing.thread_fleet import ThreadFleet

NUM_SCHEDULES = 120
NUM_PLANNER_SCHEDULES = 120
_MOST_CALLS = 700  # a load makes about 1,000 between actors
S0, S1 = NodeId("s0"), NodeId("s1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("llama"), num_layers=6, num_files=2)


@pytest.mark.parametrize("kind", ["crash", "freeze", "cut_off"])
@pytest.mark.parametrize("after", [5, 40, 90])
def test_the_ranks_of_a_lost_node_are_loaded_on_a_spare_one(folder: Path, kind: Any, after: int) -> None:
    layout = LAYOUTS[0]
    middle = plan_of(folder, layout).line[1]
    fleet = ThreadFleet(
        transfer(folder, layout, spares=spares_on(S0)),
        config(force_pool=True),
        strikes=[NodeStrike(after=after, node=middle, kind=kind, noticed_after_s=0.0 if kind == "cut_off" else 0.05)],
    )
    fleet.run()
    require_right(fleet, folder, layout)
    (drop,) = said(fleet, ins.DropNode)
    assert [move.node for move in drop.moves] == [S0]


def test_without_a_spare_node_the_load_ends_at_once_and_leaves_nothing(folder: Path) -> None:
    layout = LAYOUTS[0]
    fleet = ThreadFleet(
        transfer(folder, layout), config(force_pool=True), strikes=[NodeStrike(after=40, node=NodeId("n1"))]
    )
    fleet.run()
    assert isinstance(fleet.error, ClusterError)
    assert re.search(r"node n1 was lost \(.*\) with rank 1; the fleet has no 1 free GPUs", str(fleet.error))
    assert fleet.live_bytes == {}


@pytest.mark.parametrize("kind", ["crash", "freeze"])
def test_two_nodes_lost_at_once_are_both_made_good(folder: Path, kind: Any) -> None:
    layout = LAYOUTS[1]
    line = plan_of(folder, layout).line
    fleet = ThreadFleet(
        transfer(folder, layout, spares=spares_on(S0, S1, gpus=1)),
        config(force_pool=True),
        strikes=[NodeStrike(after=200, node=node, kind=kind, noticed_after_s=0.05) for node in line[1:3]],
    )
    fleet.run()
    require_right(fleet, folder, layout)
    assert {move.node for drop in said(fleet, ins.DropNode) for move in drop.moves} == {S0, S1}


def test_a_spare_node_that_is_found_gone_too_is_passed_over(folder: Path) -> None:
    layout = LAYOUTS[0]
    fleet = ThreadFleet(
        transfer(folder, layout, spares=spares_on(S0, S1)),
        config(force_pool=True),
        strikes=[NodeStrike(after=50, node=S0), NodeStrike(after=100, node=NodeId("n1"))],
    )
    fleet.run()
    require_right(fleet, folder, layout)
    assert [[move.node for move in drop.moves] for drop in said(fleet, ins.DropNode)] == [[S0], [S1]]


def schedule(seed: int) -> tuple[Layout, list[Strike], list[NodeId], int, int]:
    """What is loaded, what goes wrong, who cannot read, blocks in a pool, and how many GPUs are spare on each node."""
    chance = random.Random(seed)
    layout = LAYOUTS[seed % len(LAYOUTS)]
    names = [*layout.nodes, S0, S1]
    strikes: list[Strike] = []
    at = chance.randrange(0, _MOST_CALLS)
    for node in chance.sample(names, chance.choice((1, 1, 1, 2, 2))):
        strikes.append(
            NodeStrike(
                after=at,
                node=node,
                kind=chance.choice(("crash", "freeze", "cut_off")),
                noticed_after_s=chance.choice((0.0, 0.01, 0.1)),
            )
        )
        at += chance.choice((0, 0, 30, 200))  # also at once
    for rank in chance.sample(list(layout.parallel.ranks), chance.choice((0, 0, 1, 2))):
        strikes.append(
            WorkerStrike(
                after=chance.randrange(0, _MOST_CALLS), rank=Rank(rank), noticed_after_s=chance.choice((0.0, 0.02))
            )
        )
    blind = [chance.choice(layout.nodes)] if len(layout.nodes) > 2 and chance.random() < 0.2 else []
    return layout, strikes, blind, chance.choice((4, 8, 64)), layout.gpus_per_node * 2


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_whatever_is_lost_when_every_byte_arrives_or_the_load_says_why(folder: Path, seed: int) -> None:
    layout, strikes, blind, blocks_in_pool, gpus = schedule(seed)
    fleet = ThreadFleet(
        transfer(folder, layout, spares=spares_on(S0, S1, gpus=gpus), blocks_in_pool=blocks_in_pool),
        config(force_pool=layout.force_pool),
        strikes=strikes,
        blind=blind,
        shaken=seed,
    )
    fleet.run()
    require_right_or_said_why(fleet, folder, layout, blind)


def require_right_or_said_why(fleet: ThreadFleet, folder: Path, layout: Layout, blind: Sequence[NodeId]) -> None:
    if fleet.error is None:
        require_right(fleet, folder, layout)
        return
    # Two spare nodes can be lost, too, and an extent may be left to those that cannot see the files.
    lost = {entry.event.node for entry in fleet.log if isinstance(entry.event, ev.AgentLost)}
    assert lost >= {S0, S1} or (blind and len(lost) >= len(layout.nodes)), f"{fleet.error}, {lost}"
    assert fleet.live_bytes == {}


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[5]], ids=str)
@pytest.mark.parametrize("step", [0, 2, 4, 8, 9, 11, 14])
def test_a_planner_that_dies_at_any_step_of_a_start_is_succeeded_and_no_byte_is_read_twice(
    folder: Path, layout: Layout, step: int
) -> None:
    fleet = ThreadFleet(
        transfer(folder, layout), config(force_pool=layout.force_pool), strikes=[PlannerStrike(after=step)]
    )
    fleet.run()
    statuses = [fleet.node(node).load.status() for node in layout.nodes]  # type: ignore[union-attr]
    require_right(fleet, folder, layout)
    extents = plan_of(folder, layout).tables["extents"].to_pylist()
    by_agents = [row["end"] - row["begin"] for row in extents if row["rank"] < 0]
    assert sum(status.bytes_read for status in statuses) == sum(by_agents)
    assert [status.bytes_retried for status in statuses] == [0] * len(statuses)
    assert [fault.fault.kind for fault in said(fleet, ins.RecordFault)] == ["planner_lost"]
    assert said(fleet, ins.ReadAgain) == []


def test_a_planner_that_dies_again_and_again_is_succeeded_each_time(folder: Path) -> None:
    layout = LAYOUTS[0]
    strikes = [PlannerStrike(after=step) for step in range(0, 60, 3)]
    fleet = ThreadFleet(transfer(folder, layout), config(force_pool=True), strikes=strikes)
    fleet.run()
    require_right(fleet, folder, layout)


@pytest.mark.parametrize("after", range(14))
def test_a_planner_that_dies_while_it_gives_a_node_up_leaves_that_to_the_next(folder: Path, after: int) -> None:
    """At each step of it: the load's start takes 10 or so, then come the node's loss, its detour, the moved rank."""
    layout = LAYOUTS[0]
    fleet = ThreadFleet(
        transfer(folder, layout, spares=spares_on(S0)),
        config(force_pool=True),
        strikes=[NodeStrike(after=40, node=plan_of(folder, layout).line[1]), PlannerStrike(after=10 + after)],
    )
    fleet.run()
    require_right(fleet, folder, layout)
    assert {move.node for drop in said(fleet, ins.DropNode) for move in drop.moves} == {S0}


@pytest.mark.parametrize("seed", range(NUM_PLANNER_SCHEDULES))
def test_whatever_is_lost_with_the_planner_every_byte_arrives_or_the_load_says_why(folder: Path, seed: int) -> None:
    layout, strikes, blind, blocks_in_pool, gpus = schedule(seed)
    chance = random.Random(1000 + seed)
    strikes += [PlannerStrike(after=chance.randrange(60)) for _ in range(chance.choice((1, 1, 2, 3)))]
    fleet = ThreadFleet(
        transfer(folder, layout, spares=spares_on(S0, S1, gpus=gpus), blocks_in_pool=blocks_in_pool),
        config(force_pool=layout.force_pool),
        strikes=strikes,
        blind=blind,
        shaken=seed,
    )
    fleet.run()
    require_right_or_said_why(fleet, folder, layout, blind)
