"""What ``megamind tune`` promises: its settings are not slower than the defaults when somebody else measures them.

A checkpoint is written to ``--dir``, tuned with the command line, then read with the defaults and with the profile in a
fresh process, in pairs. Where the defaults were kept, the settings are the same ones and the ratio of 1 is no
measurement; the pairs then show how much two readings of the same differ on this machine.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._result import Measurement, parse_arguments, write_result
from megamind_ray.config import Config, load_config
from megamind_ray.engine.tune_reads import ReadMeter, default_values
from megamind_ray.engine.tune_sample import take_sample, temporary_checkpoint
from megamind_ray.engine.tune_search import Rule, compare
from megamind_ray.io import open_manifest
from megamind_ray.units import GIB, MIB, format_bytes

_TARGET = 0.98
_ROUNDS = 31


def tune(checkpoint: str, seconds: float, profile: Path) -> dict[str, Any]:
    """The document that ``megamind tune --json`` prints."""
    command = [sys.executable, "-m", "megamind_ray.cli", "tune", checkpoint, "--seconds", f"{seconds:g}"]
    done = subprocess.run([*command, "--output", str(profile), "--json"], stdout=subprocess.PIPE, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measure_again(checkpoint: str, profile: str, sample_bytes: int, seconds: float) -> dict[str, list[list[float]]]:
    """Pairs of seconds with the defaults and with the profile, by condition."""
    tuned_config = load_config(environ={"MEGAMIND_PROFILE": profile})
    defaults = default_values()
    tuned = {name: getattr(tuned_config.io, name.removeprefix("io.")) for name in defaults}
    meter = ReadMeter(take_sample(open_manifest(checkpoint), sample_bytes), Config())
    conditions = meter.conditions()
    seen = compare(
        defaults,
        tuned,
        conditions,
        meter.measure,
        deadline_s=time.monotonic() + seconds,
        clock=time.monotonic,
        rule=Rule(compared_rounds=_ROUNDS),
    )
    return {name: [[pair.old_s, pair.new_s] for pair in pairs] for name, pairs in seen.pairs.items()}


def rows_of(pairs: dict[str, list[list[float]]], sample_bytes: int, *, is_changed: bool) -> list[Measurement]:
    """Ratios with their target, and the rates that they come from."""
    rows = []
    if not is_changed:
        same = "tuned / defaults: the same settings"
        rows.append(Measurement(name=same, unit="ratio", samples=[1.0], target=_TARGET, better="higher"))
    for condition, some in pairs.items():
        ratios = [old_s / new_s for old_s, new_s in some]
        name = f"{condition}: tuned / defaults" if is_changed else f"{condition}: defaults / defaults, noise"
        target = _TARGET if is_changed else None
        rows.append(Measurement(name=name, unit="ratio", samples=ratios, target=target, better="higher"))
        for index, name in enumerate(("defaults", "tuned")):
            rates = [sample_bytes / pair[index] for pair in some]
            rows.append(Measurement(name=f"{condition}: {name}", unit="bytes/s", samples=rates, better="higher"))
    return rows


def main() -> None:
    """Runs the benchmark."""
    arguments = parse_arguments(
        __doc__, dir={"type": Path, "default": Path(), "help": "folder on the disk to measure (default: this one)"}
    )
    seconds, again_s, num_bytes = (20.0, 15.0, GIB) if arguments.quick else (60.0, 60.0, 4 * GIB)
    with (
        tempfile.TemporaryDirectory() as settings,
        temporary_checkpoint(
            arguments.dir, num_bytes, deadline_s=time.monotonic() + 60, clock=time.monotonic, on_bytes=lambda _: None
        ) as path,
    ):
        profile = Path(settings, "profile.toml")
        document = tune(str(path), seconds, profile)
        # As large as the reads that were tuned, so that both measure the same.
        sample_bytes = max(document["sample_bytes"], 64 * MIB)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pairs = pool.apply(measure_again, (str(path), str(profile), sample_bytes, again_s))
    config = {
        "seconds": seconds,
        "sample": format_bytes(sample_bytes),
        "file_system": document["measured"]["file_system"],
        "changes": document["changes"],
        "comparison": document["comparison"] and document["comparison"]["reason"],
    }
    rows = rows_of(pairs, sample_bytes, is_changed=bool(document["changes"]))
    print(f"changes: {document['changes'] or 'none'}; pairs: {[len(some) for some in pairs.values()]}", file=sys.stderr)
    write_result("tune", rows, config=config, arguments=arguments)
    if any(row.passed is False for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
