from __future__ import annotations

import os
from pathlib import Path

import pytest

from megamind_ray.io import page_cache
from megamind_ray.io.mounts import Mount, mount_of, read_mounts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "with space\ffeed"
    path.mkdir()
    return path


@pytest.fixture
def table(tmp_path: Path, folder: Path) -> Path:
    point = str(folder).replace(" ", "\\040")
    path = tmp_path / "mountinfo"
    path.write_text(
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"30 22 0:40 / {point} rw - tmpfs tmpfs rw\n"
        f"31 30 0:41 / {point} rw shared:2 master:1 - nfs4 server:/my\\040models rw,vers=4.2\n"
    )
    return path


def test_every_line_of_the_table_is_a_mount(table: Path, folder: Path) -> None:
    assert read_mounts(table) == (
        Mount(point="/", device=os.makedev(254, 0), kind="ext4", source="/dev/vda"),
        Mount(point=str(folder), device=os.makedev(0, 40), kind="tmpfs", source="tmpfs"),
        Mount(point=str(folder), device=os.makedev(0, 41), kind="nfs4", source="server:/my models"),
    )


def test_the_innermost_mount_holds_a_path_and_the_latest_hides_earlier_ones(table: Path, folder: Path) -> None:
    inside, outside = mount_of(folder / "model", table), mount_of(folder.parent, table)

    assert (inside and inside.kind, outside and outside.kind) == ("nfs4", "ext4")


def test_without_a_table_no_mount_is_known(tmp_path: Path) -> None:
    assert mount_of(tmp_path, tmp_path / "no such file") is None


def test_this_machines_table_knows_where_files_are(tmp_path: Path) -> None:
    mount = mount_of(tmp_path)

    assert mount is not None
    assert mount.kind


@pytest.mark.parametrize(
    ("device", "is_network"), [((0, 41), True), ((0, 40), False), ((254, 0), False), ((9, 9), False)]
)
def test_the_type_tells_network_file_systems(
    table: Path, device: tuple[int, int], is_network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "read_mounts", lambda: read_mounts(table))
    page_cache.is_network_file_system.cache_clear()
    try:
        assert page_cache.is_network_file_system(os.makedev(*device)) is is_network
    finally:
        page_cache.is_network_file_system.cache_clear()
