"""The header-only DeepSeek-V3 checkpoint, through the benchmark that users run. Memory is asserted, time is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]


def test_deepseek_v3_is_planned_for_sixteen_and_for_a_thousand_ranks_below_one_gib(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.plan", "--quick", "--only", "scale", "--json", str(out)],
        cwd=CHECKOUT,
        timeout=150,
        check=False,
    )
    document = json.loads(out.read_text())
    rows = {row["name"]: row for row in document["results"]}
    assert set(document) == {"name", "date", "machine", "config", "results"}
    assert rows["tp=8 pp=2: peak memory"]["pass"] is True
    assert rows["tp=8 pp=2: segments"]["value"] > 91_991
    assert rows["tp=8 pp=2 dp=64: peak memory"]["pass"] is True
