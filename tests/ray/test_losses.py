"""Actors that die or fall silent: what goes on, what is lost, and what is said."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import megamind_ray as mm
from megamind_ray.core.progress import Progress
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.digests import digest_all, rank_digests
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.range_server import RangeServer

BOUND_S = 90.0
SETTINGS: dict[str, dict[str, object]] = {
    "io": {"chunk_bytes": 128 * 1024, "extent_bytes": 256 * 1024},
    "routing": {"force_pool": True},
    "deadlines": {"poll_s": 0.5, "call_s": 4.0},
}
FOUR = mm.Parallel(tp=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("losses") / "llama", num_layers=20)


@pytest.fixture
def held(folder: Path) -> Iterator[RangeServer]:
    """Serves the checkpoint, but nothing from its middle on."""
    with RangeServer(folder, hold_after_bytes=2 << 20) as server:
        yield server


@pytest.fixture
def client(cluster: mm.Cluster) -> Iterator[mm.Cluster]:
    with mm.connect(cluster.address, config=mm.load_config(overrides=SETTINGS)) as connection:
        yield connection


class Background:
    """Something on a thread of its own."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._action = action
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._action()
        except BaseException as error:  # noqa: BLE001 - looked at by the test, on its own thread
            self.error = error

    def wait(self) -> None:
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive(), "it hangs"


def pids(cluster: mm.Cluster, folder: Path) -> list[int]:
    """Process ids of the workers, by rank of a mesh of four."""
    scout = cluster.load(folder, FOUR, name="scout", keep=False)
    found: list[int] = scout.run(lambda ctx: os.getpid())
    scout.unload()
    return found


def agent_pid() -> int:
    """Of the one node agent that this process's cluster has."""
    rows = ray.util.list_named_actors(all_namespaces=True)
    (name,) = [row["name"] for row in rows if row["name"].startswith("default/agent/")]
    agent: Any = ray.get_actor(name, namespace="megamind")
    return int(ray.get(agent.__ray_call__.remote(lambda _: os.getpid()), timeout=BOUND_S))


def free_bytes(cluster: mm.Cluster) -> list[int]:
    return [gpu.free_bytes for node in cluster.topology().nodes for gpu in node.gpus]


def leave(ctx: Any, rank: int) -> None:
    if ctx.rank == rank:
        os._exit(1)


def test_a_load_right_after_a_worker_died_has_its_gpu_again(client: mm.Cluster, folder: Path) -> None:
    """The actor is known to be dead before Ray counts its GPU as free."""
    first = client.load(folder, FOUR, name="first")
    with pytest.raises(mm.ClusterError, match="died"):
        first.run(leave, 1)
    second = client.load(folder, FOUR, name="second")
    assert second.run(lambda ctx: ctx.rank) == [0, 1, 2, 3]
    with pytest.raises(mm.ClusterError, match="rank 1 was lost with its worker"):
        first.run(lambda ctx: ctx.rank)
    first.unload()
    second.unload()


@pytest.mark.parametrize("victims", [(0, 1), (2, 1)])
def test_workers_lost_at_once_are_all_replaced(
    client: mm.Cluster, folder: Path, held: RangeServer, victims: tuple[int, int]
) -> None:
    """Ray gives the first new worker any of the two GPUs."""
    found = pids(client, folder)
    load = Background(lambda: client.load(held.uri + "/model.safetensors", FOUR, name="victim", keep=False))
    assert held.wait_until_holding()
    for rank in victims:
        os.kill(found[rank], signal.SIGKILL)
    held.release()
    load.wait()
    assert load.error is None, load.error
    got = load.result.run(rank_digests)
    load.result.unload()
    for rank in FOUR.ranks:
        assert got[rank] == digest_all(expected_state_dict(folder, FOUR, rank))
    assert [fault.kind for fault in load.result.report.faults] == ["worker_lost", "worker_lost"]


def test_a_silent_worker_is_replaced_at_its_deadline(client: mm.Cluster, folder: Path, held: RangeServer) -> None:
    found = pids(client, folder)
    load = Background(lambda: client.load(held.uri + "/model.safetensors", FOUR, name="victim", keep=False))
    assert held.wait_until_holding()
    os.kill(found[2], signal.SIGSTOP)
    held.release()
    load.wait()
    assert load.error is None, load.error
    (fault,) = load.result.report.faults
    assert (fault.kind, "rank 2" in fault.where, "no answer within 4 s" in fault.where) == ("worker_lost", True, True)
    load.result.unload()


def test_a_worker_lost_again_and_again_ends_the_load_and_its_memory_comes_back(
    cluster: mm.Cluster, folder: Path, held: RangeServer
) -> None:
    settings = mm.load_config(overrides={**SETTINGS, "load": {"max_worker_restarts": 0}})
    with mm.connect(cluster.address, config=settings) as client:
        found = pids(client, folder)
        before = free_bytes(client)
        load = Background(lambda: client.load(held.uri + "/model.safetensors", FOUR, name="victim"))
        assert held.wait_until_holding()
        os.kill(found[3], signal.SIGKILL)
        held.release()
        load.wait()
        assert isinstance(load.error, mm.ClusterError)
        assert "max_worker_restarts = 0" in str(load.error)
        assert free_bytes(client) == before


def test_a_lost_agent_ends_the_load_and_takes_kept_blocks_but_no_model(
    client: mm.Cluster, folder: Path, held: RangeServer
) -> None:
    other = client.load(folder, FOUR, name="other")
    workers = other.run(lambda ctx: os.getpid())
    assert client.models()[0].kept_bytes > 0
    load = Background(lambda: client.load(held.uri + "/model.safetensors", FOUR, name="victim"))
    assert held.wait_until_holding()
    os.kill(agent_pid(), signal.SIGKILL)
    load.wait()
    assert isinstance(load.error, mm.ClusterError)
    assert other.run(lambda ctx: os.getpid()) == workers, "workers are replaced only for their own loss"
    held.release()
    again = client.load(folder, FOUR, name="again")
    assert {model.name: model.kept_bytes > 0 for model in client.models()} == {"other": False, "again": True}
    again.unload()
    other.unload()


def test_a_load_that_queues_can_be_cancelled_at_once(cluster: mm.Cluster, folder: Path, held: RangeServer) -> None:
    class Stop(Exception):
        pass

    def give_up(progress: Progress) -> None:
        assert progress.phase == "queued"
        raise Stop

    settings = mm.load_config(overrides={**SETTINGS, "deadlines": {"close_s": 3600.0}})
    with mm.connect(cluster.address, config=settings) as client:
        first = Background(lambda: client.load(held.uri + "/model.safetensors", FOUR, name="first", keep=False))
        assert held.wait_until_holding()
        second = Background(lambda: client.load(folder, FOUR, name="second", on_progress=give_up))
        second.wait()
        assert isinstance(second.error, Stop)
        held.release()
        first.wait()
        assert [model.name for model in client.models()] == ["first"]
        client.unload("first")


def test_a_load_that_ended_while_its_caller_gave_up_leaves_no_model(client: mm.Cluster, folder: Path) -> None:
    """The caller's thread is interrupted after the last byte came and before it took the report."""
    from megamind_ray.actors.client import _LoadCall
    from megamind_ray.actors.messages import LoadRequest

    inside = client._client
    request = LoadRequest(uri=str(folder), parallel=FOUR, name=None, keep=False, config=mm.load_config())
    call = _LoadCall(inside._reach, "ticket", request)
    ray.wait([call.ref], timeout=BOUND_S)
    assert len(client.models()) == 1
    inside._call_off(call, KeyboardInterrupt())
    assert client.models() == []


def test_a_call_ends_with_a_lost_rank_though_others_still_wait_for_it(
    client: mm.Cluster, folder: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    def wait_for_gate(ctx: Any) -> None:
        import time

        if ctx.rank == 1:
            os._exit(1)
        while not gate.exists():
            time.sleep(0.05)

    model = client.load(folder, FOUR, name="waits")
    call = Background(lambda: model.run(wait_for_gate))
    call.wait()
    assert isinstance(call.error, mm.ClusterError)
    gate.touch()
    model.unload()


def test_what_cannot_be_pickled_is_a_mistake_that_is_named(client: mm.Cluster, folder: Path) -> None:
    model = client.load(folder, FOUR, name="pickles")
    lock = threading.Lock()
    with pytest.raises(mm.RequestError, match="lock"):
        model.run(lambda ctx: lock)
    with pytest.raises(TypeError, match="cannot pickle"):
        model.run(lambda ctx: threading.Lock())
    assert model.run(lambda ctx: ctx.rank) == [0, 1, 2, 3]
    model.unload()


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"lifetime": "detached"}, "ends with the process that started it"), ({"device_memory": "3GiB"}, "3.00 GiB")],
    ids=str,
)
def test_a_running_fleet_is_not_joined_with_settings_that_it_does_not_have(
    cluster: mm.Cluster, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(mm.RequestError, match=text):
        mm.connect(cluster.address, **settings)
    assert cluster.models() == []


def test_one_connection_closed_leaves_the_other_open(cluster: mm.Cluster) -> None:
    first, second = mm.connect(cluster.address), mm.connect(cluster.address)
    first.close()
    assert second.models() == []
    second.close()
    assert cluster.models() == []


def test_another_cluster_is_not_silently_taken_for_the_one_asked_for(cluster: mm.Cluster) -> None:
    with pytest.raises(mm.RequestError, match="connected to"):
        mm.connect("127.0.0.1:1")
    assert cluster.models() == []
