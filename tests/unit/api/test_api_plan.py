from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

import megamind_ray as mm
from megamind_ray.config import Config, RetryConfig
from megamind_ray.testing.checkpoints import llama_checkpoint


@pytest.fixture
def failing_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint in fsspec's memory file system, whose first read fails."""
    filesystem: Any = fsspec.filesystem("memory")
    filesystem.put(str(llama_checkpoint(tmp_path / "llama", num_layers=1)), "/failing_once", recursive=True)
    cat_file, num_calls = type(filesystem).cat_file, 0

    def flaky(*args: Any, **options: Any) -> bytes:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise OSError("connection reset")
        content: bytes = cat_file(*args, **options)
        return content

    monkeypatch.setattr(type(filesystem), "cat_file", flaky)
    return "memory://failing_once"


def test_plan_retries_as_often_as_its_configuration_says(failing_once: str) -> None:
    with pytest.raises(mm.SourceError, match="failed once, last with: connection reset"):
        mm.plan(failing_once, config=Config(retry=RetryConfig(attempts=1)))


def test_plan_survives_a_passing_fault(failing_once: str) -> None:
    plan = mm.plan(failing_once, config=Config(retry=RetryConfig(attempts=2, first_wait_s=0.0)))

    assert plan.bytes_total > 0
