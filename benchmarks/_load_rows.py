"""What the rounds of the load benchmark mean: rates, ratios within a round, targets, and a table to read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import _result
from benchmarks._checksum_cost import OFF, ON
from benchmarks._contenders import OURS, Contender
from benchmarks._memory import Peak
from benchmarks._rounds import Outcome

__all__ = ["checksum_rows", "memory_rows", "print_table", "setting_rows"]

_LIMIT_TARGET = 0.9
# By setting. The one that is not here is for information.
_PEER_TARGETS = {"cold": 1.0, "warm": 1.0, "recycled": 1.3}
_CHECKSUM_TARGET = 0.05
_MEMORY_TARGET_BYTES = 256 << 20


def setting_rows(
    nbytes: int, setting: str, contenders: Sequence[Contender], outcome: Outcome
) -> tuple[list[_result.Measurement], str | None]:
    """Rows of one setting, and the fastest peer.

    Only peers all of whose tensors were right and owned are compared with.
    """
    seconds = outcome.seconds
    rows = [
        _result.Measurement(
            name=f"{setting}: {name}", unit="GB/s", samples=[nbytes / one / 1e9 for one in taken], better="higher"
        )
        for name, taken in seconds.items()
    ]
    kinds = {one.name: one.kind for one in contenders}
    right = [name for name in seconds if kinds[name] == "peer" and outcome.wrong[name] == 0]
    best_peer = min(right, key=lambda name: statistics.median(seconds[name]), default=None)
    if best_peer is not None:  # what nobody could be faster than the best peer by
        bound = [theirs / limit for theirs, limit in zip(seconds[best_peer], seconds["limit"], strict=True)]
        rows.append(
            _result.Measurement(name=f"{setting}: limit / best peer", unit="ratio", samples=bound, better="higher")
        )
    for name in (one.name for one in contenders if one.kind == "ours" and one.name in seconds):
        references = [("limit", _LIMIT_TARGET if setting in _PEER_TARGETS else None)]
        if best_peer is not None:
            references.append((best_peer, _PEER_TARGETS.get(setting)))
        rows += [
            _result.Measurement(
                name=f"{setting}: {name} / {'limit' if reference == 'limit' else 'best peer'}",
                unit="ratio",
                samples=[theirs / ours for theirs, ours in zip(seconds[reference], seconds[name], strict=True)],
                target=target,
                better="higher",
            )
            for reference, target in references
        ]
        wrong = [outcome.wrong[name]]
        rows.append(
            _result.Measurement(name=f"{setting}: {name}, wrong tensors", unit="tensors", samples=wrong, target=0)
        )
    return rows, best_peer


def checksum_rows(outcomes: Mapping[str, Outcome]) -> list[_result.Measurement]:
    """What checksums cost, by setting: the share by which a load takes longer, of neighbours in one round."""
    return [
        _result.Measurement(
            name=f"{setting}: added by checksums",
            unit="ratio",
            samples=[on / off - 1 for on, off in zip(outcome.seconds[ON], outcome.seconds[OFF], strict=True)],
            target=_CHECKSUM_TARGET,
        )
        for setting, outcome in outcomes.items()
    ]


def memory_rows(nbytes: int, peaks: Mapping[tuple[str, str], Peak]) -> list[_result.Measurement]:
    """Peaks by contender and setting: what a load needs beside the checkpoint itself."""
    ours = {one.name for one in OURS}
    rows = []
    for (name, setting), peak in peaks.items():
        for what, peak_bytes in (("memory", peak.resident_bytes), ("anonymous memory", peak.anonymous_bytes)):
            target = _MEMORY_TARGET_BYTES if name in ours and what == "memory" else None
            rows.append(
                _result.Measurement(
                    name=f"{setting}: {name}, peak {what} beyond the tensors",
                    unit="bytes",
                    samples=[peak_bytes - nbytes],
                    target=target,
                )
            )
    return rows


def print_table(nbytes: int, outcomes: Mapping[str, Outcome]) -> None:
    """Median and best rates of all contenders, on stderr."""
    if not outcomes:
        return
    table = Table(title="GB/s: median (best) of all rounds")
    table.add_column("")
    for setting in outcomes:
        table.add_column(setting, justify="right")
    for name in dict.fromkeys(name for outcome in outcomes.values() for name in outcome.states):
        table.add_row(name, *(_cell(nbytes, outcome, name) for outcome in outcomes.values()))
    console = Console(stderr=True)
    console.print(table)
    for setting, outcome in outcomes.items():
        for name, state in outcome.states.items():
            if state != "ok":
                console.print(f"{setting}, {name}: {state}", highlight=False, markup=False, soft_wrap=True)


def _cell(nbytes: int, outcome: Outcome, name: str) -> str:
    if name not in outcome.seconds:
        return "-"
    flag = "*" if outcome.wrong[name] else ""
    rates = [nbytes / seconds / 1e9 for seconds in outcome.seconds[name]]
    return f"{statistics.median(rates):.2f} ({max(rates):.2f}){flag}"
