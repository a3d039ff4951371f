"""A cluster loads a checkpoint whose own storage has rotted, from a mirror."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import megamind_ray as mm
from megamind_ray.io import default_sidecar_path, open_manifest, record_checksums, write_sidecar
from megamind_ray.testing.checkpoints import llama_checkpoint
from megamind_ray.testing.digests import digest_all, rank_digests
from megamind_ray.testing.oracle import expected_state_dict

CHUNK_BYTES = 128 * 1024


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint with recorded checksums."""
    folder = llama_checkpoint(tmp_path_factory.mktemp("mirrors") / "good", num_layers=4)
    manifest = open_manifest(folder)
    write_sidecar(record_checksums(manifest, chunk_bytes=CHUNK_BYTES), default_sidecar_path(manifest))
    return folder


@pytest.fixture
def rotten(mirror: Path, tmp_path: Path) -> Path:
    """A copy of which the last byte of the data is wrong, and nothing tells but the checksums."""
    folder = Path(shutil.copytree(mirror, tmp_path / "rotten"))
    path = sorted(folder.glob("*.safetensors"))[0]
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return folder


@pytest.mark.parametrize("force_pool", [True, False], ids=["through the pool", "as planned"])
def test_chunks_that_rotted_come_from_the_mirror(
    cluster: mm.Cluster, rotten: Path, mirror: Path, force_pool: bool
) -> None:
    io = {"chunk_bytes": CHUNK_BYTES, "extent_bytes": 2 * CHUNK_BYTES, "mirrors": [str(mirror)]}
    routing = {"force_pool": force_pool, "min_direct_bytes": 0}
    config = mm.load_config(overrides={"io": io, "routing": routing}, profile=False)
    with mm.connect(cluster.address, config=config) as client:
        model = client.load(rotten, mm.Parallel(tp=2), name="mirrored", keep=False)
        got, report = model.run(rank_digests), model.report
        model.unload()

    for rank in range(2):
        assert got[rank] == digest_all(expected_state_dict(mirror, mm.Parallel(tp=2), rank))
    assert report.verified == "reference"
    (fault,) = [fault for fault in report.faults if fault.kind == "chunk_mirrored"]
    assert str(rotten) in fault.where
    assert str(mirror) in fault.action


def test_without_the_mirror_the_same_load_is_an_integrity_error(cluster: mm.Cluster, rotten: Path) -> None:
    with pytest.raises(mm.IntegrityError, match="are wrong: CRC-32 is"):
        cluster.load(rotten, mm.Parallel(tp=2), name="rotten")
