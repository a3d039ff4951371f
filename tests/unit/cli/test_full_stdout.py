"""Stdout on a full disk, or a pipe whose reader has gone: one line, exit code 1, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MEGAMIND = [sys.executable, "-m", "megamind_ray.cli"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [(), ("--json",), ("--help",), ("--tensors",)])
def test_a_full_disk_is_one_line(checkpoint: Path, options: tuple[str, ...], unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [*MEGAMIND, "inspect", str(checkpoint), *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )

    assert ended.returncode == 1
    assert ended.stderr == (
        "megamind: stdout cannot be written (No space left on device); what was to be printed is lost\n"
    )


def test_an_error_whose_document_cannot_be_written_is_still_told(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [*MEGAMIND, "inspect", str(tmp_path / "none"), "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert ended.returncode == 1
    first, second = ended.stderr.splitlines()
    assert "RequestError" in first
    assert "stdout cannot be written" in second


def test_a_reader_that_has_gone_is_one_line(checkpoint: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        ended = subprocess.run(
            [*MEGAMIND, "inspect", str(checkpoint)],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
