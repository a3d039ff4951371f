"""The memory behind a pool, on real file systems in memory that are too small or full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamind_ray.actors.messages import AgentFacts
from megamind_ray.actors.pool_check import check_pool, find_pool_file
from megamind_ray.errors import CapacityError

MIB = 1 << 20
pytestmark = pytest.mark.cluster  # mounting needs root


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB in memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def store(tmpfs: Path) -> Iterator[Path]:
    """The file of an object store of 12 MiB, made as Ray makes it: unlinked at once, and without memory until used."""
    fd = os.open(tmpfs / "plasmaXXXXXX", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    (tmpfs / "plasmaXXXXXX").unlink()
    os.truncate(fd, 12 * MIB)
    yield tmpfs
    os.close(fd)


def facts_of(pid: int) -> AgentFacts:
    found = find_pool_file(pid)
    assert found is not None
    return AgentFacts(
        node="n0",
        address="10.0.0.1",
        memory_bytes=1 << 30,
        pool_bytes=found.size_bytes,
        pool_dir=found.folder,
        pool_dir_bytes=found.folder_bytes,
        pool_dir_free_bytes=found.folder_free_bytes,
        pool_resident_bytes=found.resident_bytes,
    )


def test_the_store_is_found_though_its_name_is_gone(store: Path) -> None:
    found = find_pool_file(os.getpid())

    assert found is not None
    assert found.folder == str(store)
    assert (found.size_bytes, found.resident_bytes, found.folder_bytes) == (12 * MIB, 0, 16 * MIB)


def test_a_process_without_a_store_has_none(tmpfs: Path) -> None:
    assert find_pool_file(os.getpid()) is None


def test_a_process_that_is_gone_has_none() -> None:
    done = subprocess.Popen(["true"])
    done.wait()

    assert find_pool_file(done.pid) is None


def test_a_store_with_room_passes(store: Path) -> None:
    check_pool(facts_of(os.getpid()), 12 * MIB)


def test_a_full_file_system_is_named_with_what_is_free_and_needed(store: Path) -> None:
    (store / "somebody-elses").write_bytes(bytes(10 * MIB))

    with pytest.raises(CapacityError, match=r"6\.00 MiB are free, this load needs 8\.00 MiB more") as caught:
        check_pool(facts_of(os.getpid()), 8 * MIB)

    assert str(store) in str(caught.value)
    assert "10.0.0.1" in str(caught.value)
    assert caught.value.missing_bytes == 2 * MIB


def test_a_load_that_fits_what_is_free_passes_on_a_fuller_file_system(store: Path) -> None:
    (store / "somebody-elses").write_bytes(bytes(10 * MIB))

    check_pool(facts_of(os.getpid()), 6 * MIB)


def test_memory_that_the_store_has_already_is_not_asked_for_again(store: Path) -> None:
    fd = next(int(link.name) for link in Path("/proc/self/fd").iterdir() if "plasma" in str(link.readlink()))
    os.pwrite(fd, bytes(9 * MIB), 0)
    (store / "somebody-elses").write_bytes(bytes(4 * MIB))

    check_pool(facts_of(os.getpid()), 12 * MIB)


def test_a_store_that_claims_more_than_the_file_system_has_is_refused(tmpfs: Path) -> None:
    fd = os.open(tmpfs / "plasmaXXXXXX", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        os.truncate(fd, 32 * MIB)
        with pytest.raises(CapacityError, match=r"has 16\.00 MiB, .* claims 32\.00 MiB .* --object-store") as caught:
            check_pool(facts_of(os.getpid()), 1)
    finally:
        os.close(fd)

    assert (caught.value.needed_bytes, caught.value.free_bytes) == (32 * MIB, 16 * MIB)
    assert str(tmpfs) in caught.value.where
