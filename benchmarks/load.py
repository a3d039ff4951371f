"""How fast a checkpoint gets into host memory: ours, other loaders, and the limit, in turns within one run.

Settings: ``cold`` (files not in the page cache, fresh memory), ``warm`` (files in the page cache, fresh memory),
``recycled`` (in the page cache, memory that was used before) and, for information, ``cold-recycled``. Further parts:
``checksums`` (what checking every chunk costs, in the first three settings) and ``memory`` (the peak over what the
process had before). The limit is the same bytes read by the simplest parallel code, the fastest of several ways;
``limit, were it a mapping`` is for information, since a file that is cut short then kills the process.

Each round runs every contender once, in another order each time. Ratios are of neighbours in one round, and the value
is their median. All tensors are compared with the files before anything counts. Fresh memory is new to the process, and
not new to the machine: what a host takes back from a virtual machine is fetched before each load.

    python -m benchmarks.load --json out.json              # 4 GB in 5 files, 15 to 25 minutes on two cores
    python -m benchmarks.load --json out.json --quick      # 256 MB, one minute, figures are rough
    python -m benchmarks.load --only warm --peers none     # ours and the limit alone
    python -m benchmarks.load --size 1GB --only cold recycled --rounds 9 --peers safetensors fastsafetensors --keep
    python -m benchmarks.load --profile recycled --profile-s 60 &     # loads again and again; then, with its pid:
    py-spy top --pid PID

A run that exceeds --deadline-s (a peer that hangs) prints the stacks of all threads and ends with status 1; the
checkpoint then stays where it is. The status is 1 too if a part could not be measured, or if a target is missed
(which does not count with --quick).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._checkpoint import Checkpoint, open_checkpoint, write_llama
from benchmarks._checksum_cost import ChecksumCost
from benchmarks._contenders import OURS, Contender, Recycled, limit
from benchmarks._host_pages import reports_free_pages
from benchmarks._limit import MAPPED
from benchmarks._load_rows import checksum_rows, memory_rows, print_table, setting_rows
from benchmarks._memory import Peak, peak_of_load
from benchmarks._neighbours import Neighbours
from benchmarks._page_cache import PageCacheError, file_system
from benchmarks._peers import PEERS, versions
from benchmarks._result import Measurement, parse_arguments, write_result
from benchmarks._rounds import SETTINGS, Outcome, Setting, find_limit, require_memory, run_rounds, say, timed
from megamind_ray.units import parse_bytes

__all__ = ["Options", "Run", "main", "run"]

_PARTS = (*(setting.name for setting in SETTINGS), "checksums", "memory")
_SIZE, _QUICK_SIZE, _SMALL_BYTES = "4GB", "256MB", 8_000_000
_ROUNDS, _QUICK_ROUNDS = 5, 2
_QUICK_PARTS = ("cold", "warm", "recycled", "checksums", "memory")
# With --quick the slow parts are measured where there is most to lose: without a disk to wait for, and in an arena.
_QUICK_CHECKSUMS, _QUICK_MEMORY = ("recycled",), ("warm", "recycled")
# These need a few ms for each tensor whatever its size: most of a minute, and no match where tensors are small.
_SLOW_PEERS = ("accelerate", "transformers")
_CHECKSUMS = ("cold", "warm", "recycled")
_BUSY_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        folder: Where the checkpoint goes.
        total_bytes: Its size.
        num_rounds: Rounds that count.
        parts: Settings, ``checksums``, ``memory``.
        peers: Who we are compared with.
        ours: Ours.
        quick: Fewer ways to find the limit with, checksums in one setting, peak memory of our first loader alone.
    """

    folder: Path
    total_bytes: int
    num_rounds: int
    parts: Sequence[str]
    peers: Sequence[Contender] = PEERS
    ours: Sequence[Contender] = OURS
    quick: bool = False


@dataclass(slots=True, kw_only=True)
class Run:
    """What was measured.

    Attributes:
        rows: The result.
        outcomes: By setting.
        config: What the result says about how it was measured.
        failures: What could not be measured though it should have been.
    """

    rows: list[Measurement] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run(checkpoint: Checkpoint, options: Options, done: Run | None = None) -> Run:
    """Measures all parts, one after the other.

    Args:
        checkpoint: What is loaded.
        options: What to measure.
        done: Where results go as they come, so that an error leaves those from before it.
    """
    done = Run() if done is None else done
    done.config = _config(checkpoint, options)
    settings = [setting for setting in SETTINGS if setting.name in options.parts]
    for setting in settings:
        done.config["settings"][setting.name] = _run_setting(checkpoint, setting, options, done)
    if "checksums" in options.parts:
        _run_checksums(checkpoint, options, done)
    if "memory" in options.parts:
        _run_memory(checkpoint, options, done)
    return done


def _config(checkpoint: Checkpoint, options: Options) -> dict[str, Any]:
    return {
        "checkpoint": {
            "bytes": checkpoint.nbytes,
            "files": len(checkpoint.files),
            "tensors": len(checkpoint.places),
            "file_system": file_system(checkpoint.folder),
        },
        "rounds": options.num_rounds,
        "parts": list(options.parts),
        "versions": versions(),
        # Free memory is touched before each load, so that this makes no difference; see _host_pages.
        "reports_free_pages_to_host": reports_free_pages(),
        "settings": {},
        "memory": {},
        "peers": {peer.name: {} for peer in options.peers},
        "peers_not_asked_for": [peer.name for peer in PEERS if peer not in options.peers],
    }


def _run_setting(checkpoint: Checkpoint, setting: Setting, options: Options, done: Run) -> dict[str, Any]:
    """Runs the rounds of one setting, adds its rows, and returns what is to be said about it."""
    recycled = Recycled(checkpoint) if setting.recycled else None
    neighbours = Neighbours()
    try:
        require_memory(checkpoint, setting)
        variant = find_limit(checkpoint, setting, recycled, quick=options.quick)
        say(f"{setting.name}: the limit is {variant}")
        mapped = find_limit(checkpoint, setting, recycled, ways=MAPPED, quick=True)
        contenders = [limit(variant), limit(mapped), *options.ours, *options.peers]
        outcome = run_rounds(checkpoint, contenders, setting, recycled, num_rounds=options.num_rounds)
    except PageCacheError as error:
        done.failures.append(f"{setting.name}: not run: {error}")
        say(done.failures[-1])
        return {"state": f"not run: {error}"}
    share = neighbours.cpu_share()
    if share > _BUSY_SHARE:
        say(f"{setting.name}: other processes took {share:.0%} of the CPU time; compare figures of quiet runs only")
    rows, best_peer = setting_rows(checkpoint.nbytes, setting.name, contenders, outcome)
    done.rows += rows
    done.outcomes[setting.name] = outcome
    for peer in options.peers:
        done.config["peers"][peer.name][setting.name] = outcome.states[peer.name]
    return {"state": "measured", "limit": str(variant), "best_peer": best_peer, "cpu_share_of_others": round(share, 3)}


def _run_checksums(checkpoint: Checkpoint, options: Options, done: Run) -> None:
    outcomes: dict[str, Outcome] = {}
    cost = ChecksumCost(checkpoint)
    try:
        cost.check_it_is_on()
        for setting in SETTINGS:
            if setting.name not in (_QUICK_CHECKSUMS if options.quick else _CHECKSUMS):
                continue
            recycled = Recycled(checkpoint) if setting.recycled else None
            try:
                require_memory(checkpoint, setting)
                outcomes[setting.name] = run_rounds(
                    checkpoint, cost.contenders(), setting, recycled, num_rounds=options.num_rounds
                )
            except PageCacheError as error:
                done.failures.append(f"checksums, {setting.name}: not run: {error}")
                say(done.failures[-1])
    finally:
        cost.close()
    done.rows += checksum_rows(outcomes)


def _run_memory(checkpoint: Checkpoint, options: Options, done: Run) -> None:
    """Peaks of ours in every setting, of peers in the warm one; and for each whether it was measured."""
    settings = [one for one in SETTINGS if not options.quick or one.name in _QUICK_MEMORY]
    asked = [(one, setting) for one in options.ours[: 1 if options.quick else None] for setting in settings]
    asked += [(one, SETTINGS[1]) for one in options.peers if not options.quick]
    peaks: dict[tuple[str, str], Peak] = {}
    states: dict[str, str] = done.config["memory"]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="small-") as folder:
        small = write_llama(Path(folder), total_bytes=min(_SMALL_BYTES, options.total_bytes))
        for contender, setting in asked:
            key = f"{contender.name}, {setting.name}"
            try:
                peak = peak_of_load(checkpoint, small, contender, setting)
            except RuntimeError as error:  # the child's own words are in it
                states[key] = f"failed: {error}"
                say(str(error))
                if contender.kind == "ours":
                    done.failures.append(str(error))
                continue
            peaks[contender.name, setting.name] = peak
            states[key] = "measured"
            say(
                f"memory: {key}: peak {peak.resident_bytes / 1e6:.0f} MB, anonymous {peak.anonymous_bytes / 1e6:.0f} MB"
            )
    done.rows += memory_rows(checkpoint.nbytes, peaks)


def _profile(checkpoint: Checkpoint, setting: Setting, contender: Contender, seconds: float) -> None:
    say(f"{contender.name}, {setting.name}, for {seconds:g} s; the process is {os.getpid()}")
    recycled = Recycled(checkpoint) if setting.recycled else None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        taken = timed(checkpoint, contender, setting, recycled)[0]
        say(f"{checkpoint.nbytes / taken / 1e9:.2f} GB/s")


@contextlib.contextmanager
def checkpoint_in(folder: Path, total_bytes: int, *, keep: bool) -> Iterator[Checkpoint]:
    """A checkpoint of this size in a folder: one that an earlier run kept, or a new one, deleted at the end."""
    target = folder / f"llama-{total_bytes}"
    if target.exists():
        yield open_checkpoint(target)
        return
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 1.1 * total_bytes:
        raise SystemExit(f"{folder}: {free_bytes / 1e9:.1f} GB are free, {1.1 * total_bytes / 1e9:.1f} GB are needed")
    with tempfile.TemporaryDirectory(dir=folder, prefix="writing-") as temporary:
        say(f"writing {total_bytes / 1e9:.2f} GB to {folder} ({file_system(folder)})")
        written = Path(temporary) / "checkpoint"
        write_llama(written, total_bytes=total_bytes)
        if keep:
            yield open_checkpoint(written.rename(target))
        else:
            yield open_checkpoint(written)


def _arguments() -> argparse.Namespace:
    names = [peer.name for peer in PEERS]
    peers_help = f"of {names}, or none; with --quick all but {list(_SLOW_PEERS)}"
    return parse_arguments(
        __doc__,
        dir={"type": Path, "default": Path("build/load"), "help": "where the checkpoint goes (a disk, not tmpfs)"},
        keep={"action": "store_true", "help": "keep the checkpoint in --dir for the next run of the same size"},
        size={"metavar": "BYTES", "help": f"of the checkpoint ({_SIZE}; {_QUICK_SIZE} with --quick)"},
        rounds={"type": int, "help": f"that count ({_ROUNDS}; {_QUICK_ROUNDS} with --quick)"},
        only={"nargs": "+", "choices": _PARTS, "metavar": "PART", "help": f"of {', '.join(_PARTS)}"},
        peers={"nargs": "+", "choices": [*names, "none"], "metavar": "PEER", "help": peers_help},
        deadline_s={"type": float, "default": 3600.0, "help": "of the whole run (3600)"},
        profile={"choices": [one.name for one in SETTINGS], "help": "load in this setting, again and again"},
        profile_s={"type": float, "default": 30.0, "help": "how long (30)"},
        contender={
            "choices": [one.name for one in OURS],
            "default": OURS[0].name,
            "help": f"whom to profile ({OURS[0].name})",
        },
    )


def main() -> None:
    """Runs the benchmark."""
    arguments = _arguments()
    quick = arguments.quick
    faulthandler.dump_traceback_later(arguments.deadline_s, exit=True)
    peers = arguments.peers or [peer.name for peer in PEERS if not (quick and peer.name in _SLOW_PEERS)]
    options = Options(
        folder=arguments.dir,
        total_bytes=parse_bytes(arguments.size or (_QUICK_SIZE if quick else _SIZE)),
        num_rounds=arguments.rounds or (_QUICK_ROUNDS if quick else _ROUNDS),
        parts=arguments.only or (_QUICK_PARTS if quick else _PARTS),
        peers=[peer for peer in PEERS if peer.name in peers],
        quick=quick,
    )
    with checkpoint_in(arguments.dir, options.total_bytes, keep=arguments.keep) as checkpoint:
        if arguments.profile is not None:
            setting = next(one for one in SETTINGS if one.name == arguments.profile)
            contender = next(one for one in OURS if one.name == arguments.contender)
            _profile(checkpoint, setting, contender, arguments.profile_s)
            return
        done = Run()
        try:
            run(checkpoint, options, done)
        except BaseException as error:
            done.failures.append(f"ended early: {type(error).__name__}: {error}")
            raise
        finally:  # what was measured before an error, or before somebody lost patience, is worth having
            config = {**done.config, "failures": done.failures}
            write_result("load", done.rows, config=config, arguments=arguments)
    faulthandler.cancel_dump_traceback_later()
    print_table(checkpoint.nbytes, done.outcomes)
    missed = any(row.passed is False for row in done.rows)
    if done.failures or (missed and not quick):
        sys.exit(1)


if __name__ == "__main__":
    main()
