"""Nodes lost in the middle of a load, without Ray: every byte arrives, and nothing is left in a pool."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from megamind_ray.actors.transfer import Transfer
from megamind_ray.config import Config, load_config
from megamind_ray.core import events as ev
from megamind_ray.core import instructions as ins
from megamind_ray.core.event_log import EventLog, check
from megamind_ray.core.ids import LoadId, NodeId, Rank
from megamind_ray.core.load_machine import LoadState
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.node_loss import Spare
from megamind_ray.core.parallel import Parallel
from megamind_ray.core.plan import Plan
from megamind_ray.core.topology import Gpu, Node, Topology
from megamind_ray.errors import ClusterError
from megamind_ray.io import open_manifest
from megamind_ray.planning import build_demands, build_plan
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.thread_fleet import NodeStrike, Strike, ThreadFleet, WorkerStrike
from megamind_ray.units import GIB, MIB

Said = TypeVar("Said")
NUM_SCHEDULES = 120
_MOST_CALLS = 700  # a load makes about 1,000 between actors
S0, S1 = NodeId("s0"), NodeId("s1")


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh on equal nodes, some of which have no GPU and only read."""

    parallel: Parallel
    gpus_per_node: int
    num_readers: int = 0
    force_pool: bool = True

    @property
    def nodes(self) -> list[NodeId]:
        return [NodeId(f"n{number}") for number in range(self.parallel.world // self.gpus_per_node)]


LAYOUTS = (
    Layout(Parallel(dp=3), 1),
    Layout(Parallel(dp=4), 1),
    Layout(Parallel(tp=2, dp=2), 1),
    Layout(Parallel(tp=2, dp=3), 2),
    Layout(Parallel(pp=2, tp=2), 2),
    Layout(Parallel(dp=3), 1, force_pool=False),
    Layout(Parallel(tp=4), 2, force_pool=False),
    Layout(Parallel(tp=2), 2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("llama"), num_layers=6, num_files=2)


@cache
def config(*, force_pool: bool) -> Config:
    overrides: dict[str, dict[str, object]] = {
        "io": {"chunk_bytes": 65536, "extent_bytes": 65536, "pool_extent_bytes": 65536, "read_threads": 2},
        "routing": {"force_pool": force_pool, "min_direct_bytes": 0},
        "placement": {"policy": "first_fit"},
        "deadlines": {"poll_s": 0.05, "silence_s": 5.0},
        "retry": {"first_wait_s": 0.0, "attempts": 2},
    }
    return load_config(overrides=overrides, environ={})


@cache
def manifest_of(folder: Path) -> Manifest:
    return open_manifest(folder)


@cache
def expected(folder: Path, parallel: Parallel, rank: Rank) -> Any:
    return digest_all(expected_state_dict(folder, parallel, rank))


@cache
def plan_of(folder: Path, layout: Layout) -> Plan:
    gpus = tuple(Gpu(index=index, memory_bytes=GIB, free_bytes=GIB) for index in range(layout.gpus_per_node))
    nodes = tuple(Node(id=name, gpus=gpus, memory_bytes=GIB, pool_bytes=64 * MIB) for name in layout.nodes)
    manifest = manifest_of(folder)
    demands = build_demands(manifest, layout.parallel)
    return build_plan(manifest, demands, Topology(nodes=nodes), config=config(force_pool=layout.force_pool))


def transfer(
    folder: Path,
    layout: Layout,
    *,
    spares: Sequence[Spare] = (),
    blocks_in_pool: int = 8,
    readers: Sequence[NodeId] = (),
) -> Transfer:
    plan = plan_of(folder, layout)
    largest = int(plan.tables["blocks"]["nbytes"].to_numpy().max())
    nodes = [*layout.nodes, *{spare.node for spare in spares}]
    return Transfer(
        load=LoadId("m#1"),
        plan=plan,
        manifest=manifest_of(folder),
        credit_bytes=dict.fromkeys(nodes, blocks_in_pool * largest),
        keep_blocks={node: np.zeros(0, np.int64) for node in layout.nodes},
        readers=tuple(readers),
        spares=tuple(spares),
    )


def spares_on(*nodes: NodeId, gpus: int = 2) -> list[Spare]:
    return [Spare(node=node, gpu=gpu, free_bytes=GIB) for node in nodes for gpu in range(gpus)]


def require_right(fleet: ThreadFleet, folder: Path, layout: Layout) -> None:
    """Every rank holds the file's bytes, no block or credit is left, and the log says the same when it is replayed."""
    assert fleet.error is None, fleet.error
    assert fleet.machine.state is LoadState.DONE
    for rank in layout.parallel.ranks:
        assert digest_all(fleet.sessions[rank].state_dict()) == expected(folder, layout.parallel, rank)
    assert fleet.settle() == {}
    fleet.close()
    assert fleet.live_bytes == {}
    log = EventLog(facts=fleet.machine.facts, entries=tuple(fleet.log))
    assert check(EventLog.from_jsonl(log.to_jsonl())) is None


def said(fleet: ThreadFleet, kind: type[Said]) -> list[Said]:
    return [one for entry in fleet.log for one in entry.instructions if isinstance(one, kind)]


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
    if fleet.error is None:
        require_right(fleet, folder, layout)
        return
    # Two spare nodes can be lost, too, and an extent may be left to those that cannot see the files.
    lost = {entry.event.node for entry in fleet.log if isinstance(entry.event, ev.AgentLost)}
    assert lost >= {S0, S1} or (blind and len(lost) >= len(layout.nodes)), f"{fleet.error}, {lost}"
    assert fleet.live_bytes == {}
