"""Files that somebody names for output: whole or not at all, through links, never in the place of something else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megamind_ray.core.output_file import require_output_place, write_output
from megamind_ray.errors import RequestError


def test_text_and_bytes_are_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_output(tmp_path / "a", "ü")
    write_output(tmp_path / "a", b"bytes")

    assert (tmp_path / "a").read_bytes() == b"bytes"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/target").write_text("old")
    (tmp_path / "link").symlink_to("folder/target")
    (tmp_path / "link of link").symlink_to("link")

    write_output(tmp_path / "link of link", "new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link of link").is_symlink()
    assert (tmp_path / "folder/target").read_text() == "new"


def test_a_link_whose_target_is_not_there_yet_makes_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")

    write_output(tmp_path / "link", "new")

    assert (tmp_path / "target").read_text() == "new"


def test_a_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.touch()
    path.chmod(0o664)

    write_output(path, "new")

    assert stat.S_IMODE(path.stat().st_mode) == 0o664


@pytest.mark.parametrize(("make", "what"), [(os.mkfifo, "a pipe"), (os.mkdir, "is a folder")])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path, make: object, what: str, linked: bool) -> None:
    path = tmp_path / "there"
    make(path)  # type: ignore[operator]
    before = path.lstat()
    if linked:
        (tmp_path / "link").symlink_to(path)

    with pytest.raises(RequestError, match=f"^--out .*{what}.*name of a file"):
        write_output(tmp_path / "link" if linked else path, "new", what="--out")

    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert len(list(tmp_path.iterdir())) == 1 + linked


def test_a_device_is_refused() -> None:
    # Only looked at: with a write that goes wrong, root would lose the device.
    with pytest.raises(RequestError, match="/dev/null: is no regular file but a device"):
        require_output_place("/dev/null")


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    with pytest.raises(RequestError, match="leads back to itself"):
        write_output(tmp_path / "a", "new")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_output(tmp_path / "a", "new")

    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def _writers() -> dict[str, str]:
    """Source of every module of the package that renames or writes files by itself."""
    package = Path(require_output_place.__code__.co_filename).parents[1]
    texts = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    marks = ("os.replace(", "os.rename(", "temporary.replace(", ".write_text(", ".write_bytes(")
    return {name: text for name, text in texts.items() if any(mark in text for mark in marks)}


def test_no_other_module_writes_files_that_users_name() -> None:
    assert [name for name in sorted(_writers()) if not name.startswith("testing/")] == ["core/output_file.py"]
