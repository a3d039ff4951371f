"""Whatever of ours starts Ray, or says how to, asks for a token."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Documents, and code that starts nodes; records of decisions tell what was tried.
PLACES = [
    *(ROOT / name for name in ("README.md", "cluster.yaml", "Makefile", "docs")),
    *(ROOT / name for name in ("megamind_ray", "examples", "benchmarks", ".github")),
]
STARTS = re.compile(r"^\s*ray start\b|\"ray\", \"start\"", re.MULTILINE)
TOKEN = re.compile(r"RAY_AUTH_MODE=token|\"RAY_AUTH_MODE\": \"token\"")
OPEN = re.compile(r"RAY_AUTH_MODE[\"':= ]+disabled")


def texts() -> dict[str, str]:
    files = [file for place in PLACES for file in ([place] if place.is_file() else place.rglob("*"))]
    wanted = [file for file in files if file.suffix in (".py", ".md", ".yaml", ".yml", ".toml", "") and file.is_file()]
    return {str(file.relative_to(ROOT)): file.read_text() for file in wanted if "design" not in file.parts}


STARTING = {name: text for name, text in texts().items() if STARTS.search(text)}


def test_the_places_that_start_ray_are_found() -> None:
    assert {"README.md", "cluster.yaml", "megamind_ray/testing/testbed/ray_nodes.py"} <= set(STARTING)


@pytest.mark.parametrize("name", sorted(STARTING))
def test_what_starts_ray_sets_the_token(name: str) -> None:
    assert TOKEN.search(STARTING[name])


def test_nothing_switches_it_off() -> None:
    assert [name for name, text in texts().items() if OPEN.search(text)] == []
