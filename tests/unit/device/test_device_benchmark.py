"""The benchmark of copies and unpacking, on a machine that cannot run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_writes_no_result(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.device", "--quick", "--json", str(tmp_path / "result.json")]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)

    assert done.returncode == 2
    assert "no GPU here" in done.stderr
    assert not done.stdout
    assert not (tmp_path / "result.json").exists()
