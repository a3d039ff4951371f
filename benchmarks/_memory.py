"""Peak memory of one load, in a process of its own that has imported everything and loaded something small before.

Two peaks above that baseline: of all resident memory (``VmHWM``), where a mapping of the page cache counts, and of
anonymous memory (``RssAnon``), where it does not. The system keeps the first; the second is sampled from outside.
"""

from __future__ import annotations

import faulthandler
import json
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from benchmarks._checkpoint import Checkpoint, open_checkpoint
from benchmarks._contenders import OURS, Contender, Recycled
from benchmarks._page_cache import evict, fill
from benchmarks._peers import PEERS
from benchmarks._rounds import SETTINGS, Setting, settle

__all__ = ["Peak", "peak_of_load"]

_DEADLINE_S = 300
_SAMPLE_S = 0.003
_RESET_PEAK = "5"  # for /proc/self/clear_refs


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Memory over the baseline.

    Attributes:
        resident_bytes: Peak of resident memory, mapped files included.
        anonymous_bytes: Peak of anonymous memory.
    """

    resident_bytes: int
    anonymous_bytes: int


def peak_of_load(checkpoint: Checkpoint, small: Checkpoint, contender: Contender, setting: Setting) -> Peak:
    """Starts a process that loads, and watches it.

    Args:
        checkpoint: What is loaded.
        small: What is loaded before, so that code and libraries are there.
        contender: Who loads.
        setting: From where and to where. Memory that is used again is made and used after the baseline, so it counts.

    Raises:
        RuntimeError: The process failed; its last lines are in the message.
    """
    module = "benchmarks._memory"
    arguments = [str(checkpoint.folder), str(small.folder), contender.name, setting.name]
    command = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        baseline = _status(process.pid) if ready else {}
        watch = _AnonymousPeak(process.pid)
        output, errors = process.communicate("go\n", timeout=_DEADLINE_S)
        anonymous_bytes = watch.stop()
    if process.returncode or not ready:
        last = "; ".join(errors.strip().splitlines()[-3:])
        raise RuntimeError(f"measuring the memory of {contender.name}, {setting.name}: {last}")
    measured = json.loads(output)
    return Peak(
        resident_bytes=measured["peak"] - measured["baseline"], anonymous_bytes=anonymous_bytes - baseline["RssAnon"]
    )


class _AnonymousPeak:
    def __init__(self, pid: int) -> None:
        self._pid, self._peak, self._done = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak

    def _run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            try:
                self._peak = max(self._peak, _status(self._pid).get("RssAnon", 0))
            except OSError:  # it has ended
                return


def _status(pid: int | str) -> dict[str, int]:
    """Fields of ``/proc/PID/status`` that are sizes, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _load(checkpoint: Checkpoint, contender: Contender, setting: Setting, num_times: int) -> None:
    recycled = Recycled(checkpoint) if setting.recycled else None
    for _ in range(num_times):
        settle()
        load = contender.prepare(checkpoint, recycled)
        (evict if setting.cold else fill)(checkpoint.files)
        load()


def main(folder: str, small: str, name: str, setting_name: str) -> None:
    """What the child does: gets ready, says so, waits for a word, loads, tells."""
    faulthandler.dump_traceback_later(_DEADLINE_S, exit=True)  # never outlives a parent that gave up
    contender = next(one for one in (*OURS, *PEERS) if one.name == name)
    setting = next(one for one in SETTINGS if one.name == setting_name)
    checkpoint = open_checkpoint(Path(folder))
    _load(open_checkpoint(Path(small)), contender, setting, 2)
    settle()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="utf-8")
    baseline_bytes = _status("self")["VmRSS"]
    print("ready", flush=True)
    sys.stdin.readline()
    # Into memory that was used before means twice: the first load makes it so.
    _load(checkpoint, contender, setting, 2 if setting.recycled else 1)
    print(json.dumps({"baseline": baseline_bytes, "peak": _status("self")["VmHWM"]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
