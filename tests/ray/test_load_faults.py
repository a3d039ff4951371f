"""What goes wrong in the middle of a load, held there by a server that does not send the rest until told to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megamind_ray as mm
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.digests import digest_all, rank_digests
from megamind_ray.testing.oracle import expected_state_dict
from megamind_ray.testing.range_server import RangeServer

BOUND_S = 90.0
SMALL_CHUNKS = {"io": {"chunk_bytes": 128 * 1024, "extent_bytes": 256 * 1024}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("faults") / "llama", num_layers=20)


@pytest.fixture
def held(folder: Path) -> Iterator[RangeServer]:
    """Serves the checkpoint, but nothing from its middle on."""
    with RangeServer(folder, hold_after_bytes=2 << 20) as server:
        yield server


class Background:
    """A load on a thread of its own."""

    def __init__(self, cluster: mm.Cluster, uri: str, parallel: mm.Parallel) -> None:
        self.model: mm.LoadedModel | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._load, args=(cluster, uri, parallel), daemon=True)
        self._thread.start()

    def _load(self, cluster: mm.Cluster, uri: str, parallel: mm.Parallel) -> None:
        try:
            self.model = cluster.load(uri, parallel, name="victim", keep=False)
        except BaseException as error:  # noqa: BLE001 - looked at by the test, on its own thread
            self.error = error

    def wait(self) -> None:
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive(), "the load hangs"


def pids(cluster: mm.Cluster, folder: Path, num_ranks: int) -> list[int]:
    """Process ids of the workers that ranks of such a mesh go to."""
    scout = cluster.load(folder, mm.Parallel(tp=num_ranks), name="scout")
    found: list[int] = scout.run(lambda ctx: os.getpid())
    scout.unload()
    return found


@pytest.mark.parametrize("force_pool", [True, False], ids=["through the pool", "as planned"])
def test_a_worker_killed_in_the_middle_costs_time_but_no_byte(
    cluster: mm.Cluster, folder: Path, held: RangeServer, force_pool: bool
) -> None:
    victim = pids(cluster, folder, 2)[1]
    config = mm.load_config(overrides={**SMALL_CHUNKS, "routing": {"force_pool": force_pool}})
    with mm.connect(cluster.address, config=config) as client:
        load = Background(client, held.uri + "/model.safetensors", mm.Parallel(tp=2))
        assert held.wait_until_holding()
        os.kill(victim, signal.SIGKILL)
        held.release()
        load.wait()
        assert load.error is None, load.error
        assert load.model is not None
        got = load.model.run(rank_digests)
        report = load.model.report
        load.model.unload()
    for rank in range(2):
        assert got[rank] == digest_all(expected_state_dict(folder, mm.Parallel(tp=2), rank))
    (fault,) = [fault for fault in report.faults if fault.kind == "worker_lost"]
    assert "rank 1" in fault.where
    assert report.bytes_from_storage >= report.bytes_total


def test_a_cancelled_load_leaves_neither_model_nor_memory(cluster: mm.Cluster, folder: Path, held: RangeServer) -> None:
    before = [gpu.free_bytes for node in cluster.topology().nodes for gpu in node.gpus]

    class Stop(Exception):
        pass

    def give_up(progress: Any) -> None:
        if progress.phase == "transfer" and held.wait_until_holding():
            raise Stop

    config = mm.load_config(overrides={**SMALL_CHUNKS, "deadlines": {"close_s": 3.0}})
    with mm.connect(cluster.address, config=config) as client:
        with pytest.raises(Stop):
            client.load(held.uri + "/model.safetensors", mm.Parallel(tp=2), on_progress=give_up)
        assert client.models() == []
        after = [gpu.free_bytes for node in client.topology().nodes for gpu in node.gpus]
    assert after == before


def test_a_load_that_stalls_ends_at_its_deadline_and_says_so(cluster: mm.Cluster, held: RangeServer) -> None:
    config = mm.load_config(overrides={**SMALL_CHUNKS, "deadlines": {"stall_s": 3.0, "poll_s": 0.5, "close_s": 3.0}})
    with mm.connect(cluster.address, config=config) as client:
        load = Background(client, held.uri + "/model.safetensors", mm.Parallel(tp=2))
        load.wait()
        held.release()
    assert isinstance(load.error, mm.ClusterError)
    assert "stall_s" in str(load.error)


def test_a_flipped_bit_on_disk_is_found_when_checksums_were_recorded(cluster: mm.Cluster, tmp_path: Path) -> None:
    from megamind_ray.io import default_sidecar_path, open_manifest, record_checksums, write_sidecar

    folder = llama_checkpoint(tmp_path / "rotten")
    manifest = open_manifest(folder)
    write_sidecar(record_checksums(manifest, chunk_bytes=64 * 1024, threads=2), default_sidecar_path(manifest))
    good = cluster.load(folder, mm.Parallel(tp=2), name="good")
    good.unload()
    assert good.report.verified == "reference"
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[len(raw) * 2 // 3] ^= 4
    status = weights.stat()
    weights.write_bytes(raw)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(mm.IntegrityError, match=r"model\.safetensors.*CRC-32") as caught:
        cluster.load(folder, mm.Parallel(tp=2))
    assert caught.value.begin is not None
    assert cluster.models() == []
