"""Narrow terminals: whatever the width, every number is there whole."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from megamind_ray.report.tables import plain_table

ROWS = [
    ("a/rather/long/name/of/a/file.safetensors", "BF16", "1,352,832", "123.45 MiB", "a reason in words"),
    ("b", "F32", "7", "-", ""),
]
COLUMNS = ("file", "dtype", ">parameters", ">bytes", "why")


def shown(width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(plain_table(COLUMNS, ROWS))
    return out.getvalue()


@pytest.mark.parametrize("width", range(16, 140))
def test_nothing_is_cut_at_any_width(width: int) -> None:
    text = shown(width)

    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for number in ("1,352,832", "123.45 MiB", "BF16", "F32"):
        assert number in re.sub(r" +\n", "\n", text).replace("\n", " ") or number in text
    # Folded, not shortened.
    letters = re.sub(r"[^a-z]", "", text)
    assert all(header.removeprefix(">") in letters for header in ("dtype", ">parameters", ">bytes"))


def test_wide_tables_stay_tables_and_narrow_ones_become_lines() -> None:
    assert shown(120).splitlines()[0].split() == ["file", "dtype", "parameters", "bytes", "why"]
    assert "parameters: 1,352,832" in shown(30).replace(" \n", "\n")
