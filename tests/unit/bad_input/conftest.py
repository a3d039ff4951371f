"""A small sound checkpoint, and the command line with ``--json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megamind_ray.cli import main
from megamind_ray.testing.handmade import write_llama


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    document: dict[str, Any]
    stderr: str


@pytest.fixture
def megamind(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs a command with ``--json``; its stdout must be one JSON document."""

    def run(*argv: str | Path) -> Answer:
        capsys.readouterr()
        code = main([*map(str, argv), "--json"])
        captured = capsys.readouterr()
        return Answer(code, json.loads(captured.out), captured.err)

    return run


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama")
