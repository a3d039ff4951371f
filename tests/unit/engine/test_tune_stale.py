"""Temporary checkpoints of runs that were killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megamind_ray.engine.tune_sample import temporary_checkpoint
from megamind_ray.engine.tune_stale import in_use, remove_stale
from megamind_ray.units import MIB


def left_behind(folder: Path, *, name: str = "megamind-tune-ab12_xyz", age_s: float = 90_000.0) -> Path:
    left = folder / name
    left.mkdir()
    file = left / "model.safetensors"
    file.write_bytes(bytes(2048))
    for path in (file, left):
        state = path.stat()
        os.utime(path, (state.st_atime - age_s, state.st_mtime - age_s))
    return left


def test_one_that_is_more_than_a_day_old_is_removed(tmp_path: Path) -> None:
    left = left_behind(tmp_path)

    assert remove_stale(tmp_path) == [f"{left} (2.00 KiB) was left by a run that was killed and is removed"]
    assert not left.exists()


def test_a_younger_one_is_told_and_left(tmp_path: Path) -> None:
    left = left_behind(tmp_path, age_s=7300.0)

    (note,) = remove_stale(tmp_path)

    assert note.startswith(f"{left} (2.00 KiB) was left by a run that was killed 2 h 1 min ago; remove it if")
    assert left.exists()


def test_one_that_a_run_uses_is_left_however_old(tmp_path: Path) -> None:
    left = left_behind(tmp_path)

    with in_use(left):
        assert remove_stale(tmp_path) == []
    assert left.exists()


def test_a_run_uses_its_own(tmp_path: Path) -> None:
    with temporary_checkpoint(
        tmp_path, 8 * MIB, deadline_s=1e9, clock=lambda: 0.0, on_bytes=lambda _done: None
    ) as path:
        os.utime(path, (0, 0))
        os.utime(path.parent, (0, 0))

        assert remove_stale(tmp_path) == []
        assert path.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["megamind-tune-mine", "megamind-tune-ABCDEFGH", "models"])
def test_folders_with_other_names_are_left(tmp_path: Path, name: str) -> None:
    left = left_behind(tmp_path, name=name)

    assert remove_stale(tmp_path) == []
    assert left.exists()


def test_a_folder_with_something_else_in_it_is_left(tmp_path: Path) -> None:
    left = left_behind(tmp_path)
    (left / "thesis.tex").touch()

    assert remove_stale(tmp_path) == []
    assert left.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = left_behind(tmp_path, name="models")
    (tmp_path / "megamind-tune-ab12_xyz").symlink_to(target)

    assert remove_stale(tmp_path) == []
    assert target.exists()


def test_a_folder_that_is_not_there_has_none() -> None:
    assert remove_stale(Path("/no/such/folder")) == []
