"""What is built is what is in the tree: no package lost to a link, none there twice."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def git_files(*paths: str) -> set[str]:
    """Files of the tree that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in listed if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist made from the tree and a wheel made from that sdist, as pip would."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
        text=True,
    )
    return folder


def test_the_wheel_holds_exactly_the_files_of_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert names == git_files("megamind_ray")
    assert "megamind_ray/actors/__init__.py" in names
    assert "megamind_ray/policies/__init__.py" in names


def test_the_wheel_claims_one_import_name(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"megamind_ray"}


def test_the_source_archive_holds_the_package_once(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {name for name in names if name.startswith("megamind_ray/")} == git_files("megamind_ray")
    assert not {name for name in names if name.split("/")[0] in ("actors", "policies", "tests")}


@pytest.mark.parametrize("name", ["actors", "policies"])
def test_the_links_are_relative_and_kept_out_of_job_archives(name: str) -> None:
    assert (ROOT / name).readlink() == Path("megamind_ray") / name
    assert f"/{name}" in (ROOT / ".rayignore").read_text().splitlines()
