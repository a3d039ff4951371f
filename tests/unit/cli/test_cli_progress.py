"""Progress bars: on a terminal only, and gone at the end."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from megamind_ray.cli.progress import LoadProgress
from megamind_ray.core.progress import Phase, Progress

ROOT = Path(__file__).parents[3]
SHOW_CURSOR = "\x1b[?25h"
ERASE_LINE = "\x1b[2K"


def read_all(descriptor: int) -> str:
    """What was written to the other end of a pseudo-terminal, until that is closed."""
    chunks = []
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # Linux says so when the last writer has gone
            chunk = b""
        if not chunk:
            return b"".join(chunks).decode()
        chunks.append(chunk)


def test_a_terminal_shows_bars_that_are_gone_at_the_end(checkpoint: Path) -> None:
    terminal, stderr = pty.openpty()
    command = [sys.executable, "-m", "megamind_ray.cli", "verify", "--record", str(checkpoint)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as process:
        os.close(stderr)
        shown = read_all(terminal)
        assert process.stdout is not None
        result = process.stdout.read()
    os.close(terminal)

    assert process.returncode == 0
    assert "recording" in shown
    after_last_bar = shown[shown.rindex("recording") :]
    assert ERASE_LINE in after_last_bar
    assert SHOW_CURSOR in after_last_bar
    assert result.startswith("recorded 1 chunk of 8.00 MiB")


@pytest.mark.parametrize(
    ("phase", "moving"),
    [("queued", False), ("manifest", False), ("workers", False), ("plan", False), ("transfer", True), ("finish", True)],
)
def test_bytes_move_from_the_transfer_on(phase: Phase, moving: bool) -> None:
    with LoadProgress() as progress:
        progress.show(Progress(phase=phase))

    assert progress.moving is moving
