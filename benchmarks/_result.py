"""How a benchmark takes its arguments and writes its result: the same form for all of them.

A benchmark module has a ``main()`` like this::

    def main() -> None:
        arguments = parse_arguments(__doc__)
        rows = [Measurement(name="open", unit="s", samples=[0.51, 0.49], target=2.0)]
        write_result("plan", rows, config={"tp": 8}, arguments=arguments)

The document is ``{"name", "date", "machine", "config", "results": [{"name", "value", "unit", "target", "pass",
"samples"}]}``. ``value`` is the median of the samples; ``pass`` is null where there is no target. With ``--quick`` a
benchmark ends within a minute, on smaller inputs or with fewer samples.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

__all__ = ["Measurement", "parse_arguments", "write_result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row of the result.

    Attributes:
        name: What was measured.
        unit: Of the samples: ``s``, ``bytes``, ``bytes/s``, ``ratio``, ...
        samples: All values measured, in order; not empty.
        target: What it should reach, or None.
        better: Whether a value has to stay below its target, or get above it.
    """

    name: str
    unit: str
    samples: Sequence[float]
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def passed(self) -> bool | None:
        """Whether the target is reached; None without a target."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "target": self.target,
            "pass": self.passed,
            "samples": list(self.samples),
        }


def parse_arguments(doc: str | None, **extra: Mapping[str, Any]) -> argparse.Namespace:
    """Reads ``--json OUT`` and ``--quick``.

    Args:
        doc: The benchmark's docstring, shown as help.
        extra: Further options by name, as keyword arguments for ``add_argument``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the result to this file, '-' for stdout")
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    for name, options in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser.parse_args()


def write_result(
    name: str, results: Sequence[Measurement], *, config: Mapping[str, Any], arguments: argparse.Namespace
) -> None:
    """Prints the rows on stderr and writes the JSON document where ``--json`` says."""
    for row in results:
        verdict = {None: "", True: "  ok", False: "  MISSED"}[row.passed]
        target = "" if row.target is None else f"  (target {row.target:g})"
        print(f"{row.name:<44} {row.value:>14.4g} {row.unit}{target}{verdict}", file=sys.stderr)
    document = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "config": {**config, "quick": arguments.quick},
        "results": [row.to_json() for row in results],
    }
    text = json.dumps(document, indent=1) + "\n"
    if arguments.json is not None and str(arguments.json) == "-":
        sys.stdout.write(text)
    elif arguments.json is not None:
        arguments.json.write_text(text, encoding="utf-8")


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in ("numpy", "pyarrow", "torch", "ray")},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
