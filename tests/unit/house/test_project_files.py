"""The project's own files agree with each other."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_every_required_package_is_pinned_to_a_version_it_allows(project: dict[str, Any], pins: dict[str, str]) -> None:
    extras = project["project"]["optional-dependencies"]
    tested = [
        *project["project"]["dependencies"],
        *extras["dev"],
        *extras["hf"],
        *extras["s3"],
        *extras["transformers"],
    ]
    required = [Requirement(text) for text in tested]

    for requirement in required:
        if requirement.name != "megamind-ray":
            pinned = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pinned), f"{requirement} against {pinned}"


def test_pins_hold_on_any_machine(pins: dict[str, str]) -> None:
    for name, version in pins.items():
        assert re.fullmatch(r"[A-Za-z0-9.]+", version), f"{name}=={version}: no local versions, paths or markers"


def test_the_import_layers_are_kept() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_a_hanging_test_fails_and_shows_where_it_hangs(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(
        "import threading\n\ndef test_waits_for_nobody():\n    threading.Event().wait()\n"
    )
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-o", "timeout=1"]
    command += ["-p", "no:cacheprovider", str(tmp_path / "test_hangs.py")]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "threading.Event().wait()" in done.stdout
    assert "Timeout" in done.stdout


def test_a_warning_fails_a_test(tmp_path: Path) -> None:
    (tmp_path / "test_warns.py").write_text("import warnings\n\ndef test_warns():\n    warnings.warn('careful')\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]

    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "UserWarning: careful" in done.stdout


def test_make_names_its_public_targets() -> None:
    (public,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)

    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True)

    listed = [line.split()[1] for line in done.stdout.splitlines()]
    assert sorted(listed) == sorted(set(public.split()) - {"help"})
