"""Nodes lost in the middle of a load: three Ray nodes on this machine, and a driver that strikes one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import megamind_ray as mm
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.digests import digest_all
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.real_cluster import RealCluster

_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "io": {"chunk_bytes": 128 * 1024, "extent_bytes": 256 * 1024},
    "routing": {"force_pool": True},
    "placement": {"policy": "round_robin"},  # a rank on each node
    "deadlines": {"silence_s": 2.0},
}
# Loads until storage holds back, strikes the agent of a node that is not the driver's, and lets storage go on.
_LOAD = """
import json, os, signal, sys, threading, time
from pathlib import Path
import ray
import megamind_ray as mm
from megamind_ray.testing.digests import rank_digests
from megamind_ray.testing.range_server import RangeServer

address, folder, mesh, settings, blow, hold = sys.argv[1:]
found = {}
with (
    RangeServer(Path(folder), hold_after_bytes=int(hold)) as server,
    mm.connect(address, config=mm.load_config(overrides=json.loads(settings))) as cluster,
):
    def load():
        try:
            uri, parallel = server.uri + "/model.safetensors", mm.Parallel(**json.loads(mesh))
            found["model"] = cluster.load(uri, parallel, keep=False)
        except mm.MegamindError as error:
            found["error"] = f"{type(error).__name__}: {error}"

    def answer(agent):
        return ray.get(agent.__ray_call__.remote(lambda _: (os.getpid(), ray.get_runtime_context().get_node_id())))

    began = threading.Thread(target=load)
    began.start()
    assert server.wait_until_holding()
    here = ray.get_runtime_context().get_node_id()
    names = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True) if "/agent/" in row["name"]]
    places = {node: pid for pid, node in (answer(ray.get_actor(name, namespace="megamind")) for name in names)}
    victim = sorted(set(places) - {here})[0]
    os.kill(places[victim], getattr(signal, blow))
    struck = time.monotonic()
    server.release()
    began.join(60)
    if "model" in found:
        found["report"] = found["model"].report.to_json()
        found["held"] = found.pop("model").run(rank_digests)
    if blow == "SIGSTOP":
        os.kill(places[victim], signal.SIGCONT)
    print(json.dumps(found | {"victim": victim, "seconds": time.monotonic() - struck}))
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RealCluster]:
    with RealCluster(num_gpus=2, pool_bytes=128 << 20) as cluster:
        cluster.add_node(num_gpus=2, pool_bytes=128 << 20)
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("lost") / "llama", num_layers=20)


def load(nodes: RealCluster, folder: Path, mesh: Mapping[str, int], blow: str) -> Any:
    words = [str(folder), json.dumps(mesh), json.dumps(_SETTINGS), blow, str(2 << 20)]
    return json.loads(nodes.python(_LOAD, nodes.address, *words).splitlines()[-1])


@pytest.mark.parametrize("blow", ["SIGKILL", "SIGSTOP"])
def test_ranks_of_a_lost_agent_are_loaded_on_another_node(nodes: RealCluster, folder: Path, blow: str) -> None:
    """One that is killed, and one that is silent and wakes up when all is over."""
    parallel = mm.Parallel(dp=2)
    answer = load(nodes, folder, {"dp": 2}, blow)
    assert "error" not in answer, answer["error"]
    report = mm.LoadReport.from_json(answer["report"])
    for rank in parallel.ranks:
        assert answer["held"][rank] == json.loads(json.dumps(digest_all(expected_state_dict(folder, parallel, rank))))
    assert [fault.kind for fault in report.faults] == ["node_lost"]
    assert answer["victim"] not in {rank.node for rank in report.ranks}


def test_without_a_free_gpu_the_load_ends_at_once_and_says_what_to_do(nodes: RealCluster, folder: Path) -> None:
    answer = load(nodes, folder, {"dp": 4}, "SIGKILL")
    assert answer["error"].startswith("ClusterError: ")
    assert f"node {answer['victim']} was lost" in answer["error"]
    assert "add one or unload other models" in answer["error"]
