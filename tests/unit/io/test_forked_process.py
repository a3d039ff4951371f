"""A process that was forked has its parent's memory, and must not use its connections."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from megamind_ray.testing.range_server import RangeServer

BOUND_S = 60
DATA = np.random.default_rng(0).bytes(1_000_000)
# The parent reads before the fork, then both read at a time. Nonzero where a byte is wrong.
_PROGRAM = """
import os, sys
from megamind_ray.config import RetryConfig
from megamind_ray.io.http_source import HttpSource

source = HttpSource(sys.argv[1], RetryConfig(attempts=1, request_s=30.0))
data = open(sys.argv[2], "rb").read()

def is_right(begin):
    buffer = bytearray(50_000)
    source.read_into(begin, memoryview(buffer))
    return buffer == data[begin : begin + 50_000]

assert is_right(0)
child = os.fork()
ok = all(is_right(begin) for begin in range(0, 950_000, 50_000))
if child == 0:
    os._exit(not ok)
sys.exit(os.waitpid(child, 0)[1] or not ok)
"""


def test_parent_and_child_read_over_connections_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(DATA)
    with RangeServer(tmp_path) as server:
        result = subprocess.run(
            [sys.executable, "-c", _PROGRAM, f"{server.uri}/data.bin", tmp_path / "data.bin"],
            capture_output=True,
            timeout=BOUND_S,
            check=False,
        )

        assert result.returncode == 0, result.stderr.decode()
        assert server.num_connections == 2
