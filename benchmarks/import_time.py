"""What ``import megamind_ray`` adds to the start of an interpreter, and how long ``megamind --help`` takes.

Bare interpreters and importing ones are started in turns, so that a busy machine slows down both. ``added`` is the
median of the differences of neighbours.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks._result import Measurement, parse_arguments, write_result

TARGET_S = 0.3
BARE = "pass"
IMPORT = "import megamind_ray"
HELP = (
    "import contextlib, io\n"
    "from megamind_ray.cli import main\n"
    "with contextlib.redirect_stdout(io.StringIO()): main(['--help'])"
)


def start_s(code: str) -> float:
    """Seconds that an interpreter takes from start to end."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def main() -> None:
    arguments = parse_arguments(__doc__)
    rounds = 7 if arguments.quick else 31
    for code in (BARE, IMPORT, HELP):  # fills the page cache, writes the bytecode
        start_s(code)
    turns = [(start_s(BARE), start_s(IMPORT), start_s(HELP)) for _ in range(rounds)]
    rows = [
        Measurement(name="bare interpreter", unit="s", samples=[bare for bare, _, _ in turns]),
        Measurement(
            name="added by import megamind_ray",
            unit="s",
            samples=[imported - bare for bare, imported, _ in turns],
            target=TARGET_S,
        ),
        Measurement(name="added by megamind --help", unit="s", samples=[helped - bare for bare, _, helped in turns]),
    ]
    write_result("import_time", rows, config={"rounds": rounds}, arguments=arguments)


if __name__ == "__main__":
    main()
