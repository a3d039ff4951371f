"""docs/faults.md: the tests that it names are there, and so are its settings and kinds of faults."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import megamind_ray as mm

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "faults.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
SETTINGS = sorted(set(re.findall(r"`((?:deadlines|straggler|load|retry)\.\w+)`(?: \((\d+)(?: s)?\))", TEXT)))
KINDS = sorted(set(re.findall(r"`(\w+_(?:lost|failed|retried|mirrored|quarantined)|straggler)`", TEXT)))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_test_that_is_named_is_there(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("setting", "default"), SETTINGS, ids=[name for name, _ in SETTINGS])
def test_a_setting_has_the_default_that_is_said(setting: str, default: str) -> None:
    section, name = setting.split(".")
    assert getattr(getattr(mm.load_config(), section), name) == float(default)


def test_the_kinds_of_faults_are_those_of_reports() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "megamind_ray").rglob("*.py"))
    assert len(KINDS) >= 9
    assert [kind for kind in KINDS if f'"{kind}"' not in code] == []
