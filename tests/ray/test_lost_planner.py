"""The planner's process is killed, or frozen: what is loaded stays, a load under way goes on, nothing leaks (0027)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import megamind_ray as mm
from megamind_ray.actors.boundary import cause_of
from megamind_ray.actors.fencing import SupersededError
from megamind_ray.core.progress import Progress
from megamind_ray.testing.background import Background
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.digests import digest_all, rank_digests
from megamind_ray.testing.fault_server import Request
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.range_server import RangeServer

BOUND_S = 90.0
SETTINGS: dict[str, dict[str, object]] = {
    "io": {"chunk_bytes": 128 * 1024, "extent_bytes": 256 * 1024},
    "deadlines": {"poll_s": 0.5, "call_s": 6.0, "close_s": 3.0},
}
TWO = mm.Parallel(tp=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("planner") / "llama", num_layers=20)


@pytest.fixture(params=[True, False], ids=["through the pool", "as planned"])
def client(cluster: mm.Cluster, request: pytest.FixtureRequest) -> Iterator[mm.Cluster]:
    settings = mm.load_config(overrides={**SETTINGS, "routing": {"force_pool": request.param}})
    with mm.connect(cluster.address, config=settings) as connection:
        yield connection


@pytest.fixture
def pooled(cluster: mm.Cluster) -> Iterator[mm.Cluster]:
    settings = mm.load_config(overrides={**SETTINGS, "routing": {"force_pool": True}})
    with mm.connect(cluster.address, config=settings) as connection:
        yield connection


def planner_pid() -> int:
    planner: Any = ray.get_actor("default/planner", namespace="megamind")
    return int(ray.get(planner.__ray_call__.remote(lambda _: os.getpid()), timeout=BOUND_S))


def kill_planner() -> None:
    os.kill(planner_pid(), signal.SIGKILL)


def actors() -> list[str]:
    return sorted(row["name"] for row in ray.util.list_named_actors(all_namespaces=True))


def free_bytes(cluster: mm.Cluster) -> list[int]:
    return [gpu.free_bytes for node in cluster.topology().nodes for gpu in node.gpus]


def require_whole(model: mm.LoadedModel, folder: Path, parallel: mm.Parallel) -> None:
    got = model.run(rank_digests)
    for rank in parallel.ranks:
        assert got[rank] == digest_all(expected_state_dict(folder, parallel, rank))


def loads_of(cluster: mm.Cluster) -> list[Any]:
    """What each worker and agent has of any load, looked at from outside."""
    held: list[Any] = []
    for name in actors():
        if name.startswith("default/worker/"):
            worker: Any = ray.get_actor(name, namespace="megamind")
            held += ray.get(worker.__ray_call__.remote(lambda one: list(one._ranks)), timeout=BOUND_S)
        elif name.startswith("default/agent/"):
            agent: Any = ray.get_actor(name, namespace="megamind")
            held += ray.get(
                agent.__ray_call__.remote(lambda one: [*one._loads, *one._kept.holdings().blocks]), timeout=BOUND_S
            )
    return held


@pytest.mark.parametrize("percent", [30, 60, 90])
def test_a_planner_killed_in_a_transfer_costs_time_and_no_byte_is_read_twice(
    client: mm.Cluster, folder: Path, percent: int
) -> None:
    before, size = free_bytes(client), (folder / "model.safetensors").stat().st_size
    with RangeServer(folder, hold_after_bytes=size * percent // 100) as server:
        load = Background(lambda: client.load(server.uri + "/model.safetensors", TWO, name="victim", keep=False))
        assert server.wait_until_holding()
        kill_planner()
        server.release()
        load.wait(BOUND_S)
    model = load.value()
    require_whole(model, folder, TWO)
    report = model.report
    assert [fault.kind for fault in report.faults] == ["planner_lost"]
    assert "went on with what had arrived" in report.faults[0].action
    assert (report.bytes_from_storage, report.bytes_retried) == (report.bytes_total, 0)
    model.unload()
    assert free_bytes(client) == before
    assert loads_of(client) == []


def test_a_planner_killed_twice_in_one_transfer(pooled: mm.Cluster, folder: Path) -> None:
    with RangeServer(folder, hold_after_bytes=2 << 20) as server:
        load = Background(lambda: pooled.load(server.uri + "/model.safetensors", TWO, name="victim", keep=False))
        assert server.wait_until_holding()
        for _ in range(2):
            kill_planner()
            assert pooled.models() == [], "a planner that has just taken over answers"
        server.release()
        load.wait(BOUND_S)
    model = load.value()
    require_whole(model, folder, TWO)
    assert [fault.kind for fault in model.report.faults] == ["planner_lost"] * 2
    model.unload()


def test_a_planner_killed_before_there_is_a_plan(pooled: mm.Cluster, folder: Path) -> None:
    """It waits for the header of the file."""
    asked, gate = threading.Event(), threading.Event()

    def hold(_: Request) -> None:
        asked.set()
        gate.wait(BOUND_S)

    with RangeServer(folder, faults=hold) as server:
        load = Background(lambda: pooled.load(server.uri + "/model.safetensors", TWO, name="victim", keep=False))
        assert asked.wait(BOUND_S)
        kill_planner()
        gate.set()
        load.wait(BOUND_S)
    model = load.value()
    require_whole(model, folder, TWO)
    (fault,) = model.report.faults
    assert (fault.kind, "begun anew" in fault.action) == ("planner_lost", True)
    model.unload()


@pytest.mark.parametrize("seed", range(6))
def test_whenever_the_planner_is_killed_the_load_comes_to_its_end(pooled: mm.Cluster, folder: Path, seed: int) -> None:
    """Without a server that holds it: the blow may come before, in the transfer, at its finish, or after the load."""
    before = free_bytes(pooled)
    victim, delay_s = planner_pid(), random.Random(seed).uniform(0.0, 0.8)
    load = Background(lambda: pooled.load(folder, TWO, name="victim"))
    time.sleep(delay_s)  # a random moment, not a wait for anything
    os.kill(victim, signal.SIGKILL)
    load.wait(BOUND_S)
    model = load.value()
    require_whole(model, folder, TWO)
    assert [one.name for one in pooled.models()] == ["victim"]
    model.unload()
    assert free_bytes(pooled) == before
    assert loads_of(pooled) == []


def test_models_stay_loaded_and_usable_when_the_planner_is_killed_between_loads(
    pooled: mm.Cluster, folder: Path
) -> None:
    first = pooled.load(folder, TWO, name="first")
    second = pooled.load(folder, mm.Parallel(tp=2), name="second", keep=False)
    infos, members = pooled.models(), actors()
    first.run(lambda ctx: ctx.state.update(mine=ctx.rank))
    kill_planner()
    assert first.run(lambda ctx: ctx.state["mine"]) == [0, 1]
    assert pooled.models() == infos
    assert pooled.model("second").report == second.report
    require_whole(second, folder, TWO)
    assert actors() == members, "nobody else was started anew"
    kill_planner()
    second.unload()
    third = pooled.load(folder, TWO, name="third")
    assert third.report.faults == ()
    assert sorted(one.name for one in pooled.models()) == ["first", "third"]
    third.unload()
    first.unload()
    assert loads_of(pooled) == []


def test_a_planner_killed_while_it_unloads(pooled: mm.Cluster, folder: Path) -> None:
    """User code holds a tensor, so that the workers wait with freeing for as long as it takes to strike."""
    before = free_bytes(pooled)
    model = pooled.load(folder, TWO, name="victim")

    def hold(ctx: Any) -> None:
        import builtins

        builtins.held = dict(ctx.state_dict)  # type: ignore[attr-defined]

    def forget() -> None:
        import builtins

        del builtins.held  # type: ignore[attr-defined]

    model.run(hold)
    unload = Background(model.unload)
    deadline = time.monotonic() + BOUND_S
    while ray.get(ray.get_actor("default/planner", namespace="megamind").models.remote()):
        assert time.monotonic() < deadline
    kill_planner()
    unload.wait(BOUND_S)
    assert unload.error is None, unload.error
    assert pooled.models() == []
    for name in actors():
        if name.startswith("default/worker/"):
            worker: Any = ray.get_actor(name, namespace="megamind")
            has = ray.get(worker.__ray_call__.remote(lambda _: hasattr(__import__("builtins"), "held")))
            if has:
                ray.get(worker.__ray_call__.remote(lambda _: forget()))
    assert free_bytes(pooled) == before


def test_a_load_cancelled_while_its_planner_is_dead_leaves_nothing(pooled: mm.Cluster, folder: Path) -> None:
    class Stop(Exception):
        pass

    before = free_bytes(pooled)
    with RangeServer(folder, hold_after_bytes=2 << 20) as server:

        def strike(progress: Progress) -> None:
            if progress.phase == "transfer" and server.wait_until_holding():
                kill_planner()
                raise Stop

        with pytest.raises(Stop):
            pooled.load(server.uri + "/model.safetensors", TWO, name="victim", on_progress=strike)
    assert pooled.models() == []
    assert free_bytes(pooled) == before
    assert loads_of(pooled) == []


def test_a_planner_that_was_only_frozen_is_succeeded_and_commands_nobody(pooled: mm.Cluster, folder: Path) -> None:
    with RangeServer(folder, hold_after_bytes=2 << 20) as server:
        load = Background(lambda: pooled.load(server.uri + "/model.safetensors", TWO, name="victim", keep=False))
        assert server.wait_until_holding()
        old = planner_pid()
        os.kill(old, signal.SIGSTOP)
        try:
            assert pooled.models() == []
            assert planner_pid() != old
        finally:
            try:
                os.kill(old, signal.SIGCONT)
            except ProcessLookupError:
                old = 0  # Ray has ended it by force
        server.release()
        load.wait(BOUND_S)
    model = load.value()
    require_whole(model, folder, TWO)
    assert [fault.kind for fault in model.report.faults] == ["planner_lost"]
    model.unload()


def test_orders_of_a_planner_that_was_succeeded_are_refused(pooled: mm.Cluster, folder: Path) -> None:
    """By every method that a planner calls, of agents and workers alike."""
    from megamind_ray.actors.fencing import Epoch, commanded

    model = pooled.load(folder, TWO, name="stays")
    for kind, orders in (("agent", ("status", "close_load", "unload")), ("worker", ("unload", "abort"))):
        name = next(name for name in actors() if name.startswith(f"default/{kind}/"))
        old = commanded(ray.get_actor(name, namespace="megamind"), Epoch(0, "old"))
        for order in orders:
            arguments = ("stays#1", False) if order == "close_load" else ("stays#1",)
            with pytest.raises(ray.exceptions.RayError) as caught:
                ray.get(getattr(old, order).remote(*arguments), timeout=BOUND_S)
            assert isinstance(cause_of(caught.value, "asking"), SupersededError)
        with pytest.raises(ray.exceptions.RayError):
            ray.get(old.leave.remote(), timeout=BOUND_S)
    require_whole(model, folder, TWO)
    model.unload()
