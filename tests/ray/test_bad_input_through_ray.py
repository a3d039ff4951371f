"""What can only go wrong with a cluster: files that change under it, pools and file systems that are too small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import megamind_ray as mm
from megamind_ray.core.progress import Progress
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.handmade import write_llama

BOUND_S = 120.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llama_checkpoint(tmp_path / "llama", num_layers=8)


def free_bytes(cluster: mm.Cluster) -> list[int]:
    return [gpu.free_bytes for node in cluster.topology().nodes for gpu in node.gpus]


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


class StoppedWorker:
    """A worker that does not answer. A load asks all workers for their facts between its manifest and its plan, so it
    waits there.
    """

    def __init__(self, cluster: mm.Cluster, folder: Path) -> None:
        model = cluster.load(folder, name="scout", keep=False)
        (self._pid,) = model.run(lambda ctx: os.getpid())
        model.unload()

    def __enter__(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def __exit__(self, *_error: object) -> None:
        os.kill(self._pid, signal.SIGCONT)


@pytest.mark.parametrize("force_pool", [True, False], ids=["through the pool", "as planned"])
@pytest.mark.parametrize(("change", "what"), [(grow, "size in bytes"), (touch, "mtime in ns")], ids=["size", "mtime"])
def test_a_file_that_changes_between_plan_and_read_is_named_and_nothing_is_loaded(
    cluster: mm.Cluster, folder: Path, change: Callable[[Path], None], what: str, force_pool: bool
) -> None:
    before = free_bytes(cluster)
    weights = folder / "model.safetensors"
    stopped = StoppedWorker(cluster, folder)
    changed = threading.Event()

    def change_after_manifest(progress: Progress) -> None:
        if progress.phase == "workers" and not changed.is_set():
            change(weights)
            changed.set()
            stopped.__exit__()

    config = mm.load_config(overrides={"routing": {"force_pool": force_pool}})
    with mm.connect(cluster.address, config=config) as client:
        with stopped, pytest.raises(mm.IntegrityError) as caught:
            client.load(folder, mm.Parallel(tp=2), on_progress=change_after_manifest)
        assert client.models() == []

    assert changed.is_set()
    assert f"{weights}: changed since it was planned ({what}" in str(caught.value)
    assert caught.value.file == str(weights)
    assert free_bytes(cluster) == before


def test_a_pool_too_small_for_one_block_names_node_need_and_pool(cluster: mm.Cluster, folder: Path) -> None:
    config = mm.load_config(overrides={"pool": {"max_fraction": 1e-5}, "routing": {"force_pool": True}})

    with mm.connect(cluster.address, config=config) as client:
        with pytest.raises(mm.CapacityError, match="pool") as caught:
            client.load(folder, mm.Parallel(tp=2))
        assert client.models() == []

    (node,) = cluster.topology().nodes
    assert str(node.id) in str(caught.value)
    assert caught.value.missing_bytes > 0


@pytest.mark.parametrize(
    ("make", "error", "names"),
    [
        (lambda folder: folder / "nowhere", mm.RequestError, ("nowhere", "no such file")),
        (lambda folder: _pickled(folder), mm.RequestError, ("pytorch_model.bin", "save_file")),
        (lambda folder: _truncated(folder), mm.IntegrityError, ("model.safetensors", "truncated")),
        (lambda folder: "", mm.RequestError, ("names no checkpoint",)),
        (lambda folder: "~nobody-of-this-name/x", mm.RequestError, ("~nobody-of-this-name",)),
        (lambda folder: "ftp://host/x", mm.RequestError, ("ftp://",)),
    ],
    ids=["no such path", "pickle files only", "truncated", "nothing", "no such user", "another scheme"],
)
def test_a_broken_checkpoint_is_refused_as_in_one_process(
    cluster: mm.Cluster, tmp_path: Path, make: Callable[[Path], Any], error: type[Exception], names: tuple[str, ...]
) -> None:
    uri = make(tmp_path)

    with pytest.raises(error) as caught:
        cluster.load(uri)

    for name in names:
        assert name in str(caught.value)
    assert cluster.models() == []


def _pickled(folder: Path) -> Path:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04}.")
    return folder


def _truncated(folder: Path) -> Path:
    write_llama(folder)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)
    return folder


def test_more_ranks_than_gpus_says_what_the_cluster_has(cluster: mm.Cluster, folder: Path) -> None:
    (node,) = cluster.topology().nodes

    with pytest.raises(mm.RequestError, match=rf"needs 8 GPUs, the cluster has 4 \({node.id} has 4\)"):
        cluster.load(folder, mm.Parallel(tp=4, dp=2))


# A cluster of its own on a file system in memory: in a process of its own, since this one is connected already.

_ON_SMALL_FILE_SYSTEM = """
import json, os, subprocess, sys
import ray
import megamind_ray as mm

directory, checkpoint = sys.argv[1:]
ray.init(
    address="local", num_gpus=2, object_store_memory=100 << 20, _plasma_directory=directory,
    include_dashboard=False, log_to_driver=False, logging_level="error",
)

def refusal(cluster):
    try:
        cluster.load(checkpoint, mm.Parallel(tp=2))
    except mm.CapacityError as error:
        models = len(cluster.models())
        return {"text": str(error), "needed": error.needed_bytes, "free": error.free_bytes, "models": models}

with mm.connect(device_memory="1GiB") as cluster:
    cluster.topology()  # the actors are there before the file system is full
    with open(directory + "/somebody-elses", "wb") as file:
        space = os.statvfs(directory)
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - (4 << 20))
    full = refusal(cluster)
    os.unlink(directory + "/somebody-elses")
    subprocess.run(["mount", "-o", "remount,size=64m", directory], check=True)
    small = refusal(cluster)
ray.shutdown()
print(json.dumps({"full": full, "small": small}))
"""


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 MiB in memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.cluster
def test_a_file_system_that_is_full_or_smaller_than_the_pool_is_named_before_it_kills_anybody(
    tmpfs: Path, tmp_path: Path
) -> None:
    folder = llama_checkpoint(tmp_path / "larger", total_bytes=32 << 20)

    done = subprocess.run(
        [sys.executable, "-c", _ON_SMALL_FILE_SYSTEM, str(tmpfs), str(folder)],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    full, small = answers["full"], answers["small"]
    assert f"{tmpfs} of node" in full["text"]
    assert "are free, this load needs" in full["text"]
    assert full["free"] <= 4 << 20 < full["needed"]
    assert f"{tmpfs} of node" in small["text"]
    assert "the file system has 64.00 MiB, Ray's object store on it claims 100.00 MiB" in small["text"]
    assert "--object-store-memory" in small["text"]
    assert full["models"] == small["models"] == 0
