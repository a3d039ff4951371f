"""What importing costs, and what it must not bring along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megamind_ray

ROOT = Path(__file__).parents[3]
PURE = ("core", "config", "policies", "planning", "report")


def python(code: str, *, cwd: Path = ROOT, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def modules_after(code: str) -> set[str]:
    """Top-level modules that are loaded after some code."""
    done = python(f"{code}\nimport json, sys; print(json.dumps(sorted({{n.split('.')[0] for n in sys.modules}})))")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_the_package_alone_brings_no_heavy_library() -> None:
    assert modules_after("import megamind_ray").isdisjoint({"torch", "ray", "pyarrow", "numpy", "rich", "typer"})


@pytest.mark.parametrize("package", PURE)
def test_pure_layers_bring_neither_ray_nor_torch(package: str) -> None:
    everything = (
        "import importlib, pkgutil\n"
        f"top = importlib.import_module('megamind_ray.{package}')\n"
        "for found in pkgutil.walk_packages(getattr(top, '__path__', []), top.__name__ + '.'):\n"
        "    importlib.import_module(found.name)"
    )
    assert modules_after(everything).isdisjoint({"torch", "ray"})


def test_help_brings_no_heavy_library() -> None:
    code = "from megamind_ray.cli import main\nimport io, contextlib\n"
    code += "with contextlib.redirect_stdout(io.StringIO()): main(['load', '--help'])"
    assert modules_after(code).isdisjoint({"torch", "ray", "pyarrow", "numpy"})


@pytest.mark.parametrize("name", [name for name in megamind_ray.__all__ if name != "__version__"])
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(megamind_ray, name) is not None


def test_public_names_show_in_dir_before_they_are_used() -> None:
    done = python("import megamind_ray as mm; print(set(mm.__all__) - set(dir(mm)))")

    assert done.stdout.strip() == "set()"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'load_everything'"):
        _ = megamind_ray.load_everything  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["actors", "policies"])
def test_the_short_name_explains_the_right_one(name: str) -> None:
    done = python(f"import {name}")

    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert f"'{name}'" in done.stderr
    assert "second copy of e" in done.stderr
    assert "megamind_ray" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["actors", "policies"])
def test_a_jobs_own_module_of_that_name_is_its_own(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("OWNER = 'the job'\n")
    code = f"import {name}, megamind_ray.{name}; print({name}.OWNER, megamind_ray.{name}.__name__)"

    done = python(code, cwd=tmp_path, path=os.pathsep.join([str(tmp_path), str(ROOT)]))

    assert done.stdout.split() == ["the", "job", f"megamind_ray.{name}"], done.stderr
