"""The profile on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megamind_ray.config import find_profile, load_config
from megamind_ray.core.profile import Measured, Profile
from megamind_ray.engine.tune_profile import profile_of, remove_profile, require_writable, write_profile
from megamind_ray.engine.tune_search import Pair, Trial
from megamind_ray.errors import MegamindError, RequestError

MEASURED = Measured(date="2026-01-31T12:00:00+00:00", path="/models", file_system="ext4", device="/dev/vda")
DEFAULTS = {"io.read_threads": 4, "io.direct": "auto"}
TAKEN = Trial(
    knob="io.read_threads",
    value=8,
    instead_of=4,
    verdict="taken",
    reason="",
    pairs={"warm": [Pair(1.0, 1.0)], "cold": [Pair(1.5, 1.0)]},
)


def eight_threads() -> Profile:
    return profile_of({"io.read_threads": 8, "io.direct": "auto"}, DEFAULTS, [TAKEN], MEASURED)


def test_only_what_differs_is_written_with_its_gain(tmp_path: Path) -> None:
    write_profile(eight_threads(), tmp_path / "profile.toml")

    text = (tmp_path / "profile.toml").read_text()
    assert "read_threads = 8  # 1.00x warm, 1.50x cold, against 4\n" in text
    assert "direct" not in text
    assert load_config(environ={"MEGAMIND_PROFILE": str(tmp_path / "profile.toml")}).io.read_threads == 8


def test_folders_are_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a/b/profile.toml"

    write_profile(eight_threads(), path)
    write_profile(eight_threads(), path)

    assert [file.name for file in path.parent.iterdir()] == ["profile.toml"]


def test_a_write_that_fails_leaves_the_old_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.toml"
    path.write_text("old")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(MegamindError, match=r"No space left on device\); name another file"):
        write_profile(eight_threads(), path)

    assert [file.name for file in tmp_path.iterdir()] == ["profile.toml"]
    assert path.read_text() == "old"


def test_a_link_to_the_profile_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "dotfiles").mkdir()
    link = tmp_path / "profile.toml"
    link.symlink_to("dotfiles/profile.toml")

    write_profile(eight_threads(), link)

    assert link.is_symlink()
    assert find_profile({"MEGAMIND_PROFILE": str(link)}).state == "in force"


def test_what_cannot_be_written_is_known_beforehand(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    require_writable(tmp_path / "new/folder/profile.toml")
    with pytest.raises(RequestError, match="is a folder"):
        require_writable(tmp_path)
    with pytest.raises(RequestError, match="file cannot be written to"):
        require_writable(tmp_path / "file/profile.toml")


def test_removing_says_whether_there_was_one(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.touch()

    assert remove_profile(path)
    assert not remove_profile(path)
    assert not remove_profile(path / "below-a-file")
    with pytest.raises(RequestError, match="cannot be removed"):
        remove_profile(tmp_path)


def test_a_profile_takes_the_place_of_no_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "profile.toml"
    os.mkfifo(pipe)

    for refused in (lambda: require_writable(pipe), lambda: write_profile(eight_threads(), pipe)):
        with pytest.raises(RequestError, match="is no regular file but a pipe"):
            refused()

    assert pipe.is_fifo()
