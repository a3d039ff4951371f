"""What the cluster benchmark found: rows, what failed and why, what could therefore not be measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks._cluster_session import Loaded, LoadFailed, Order, Session, say
from benchmarks._result import Measurement
from megamind_ray.core.topology import Topology
from megamind_ray.testing.rated_server import RatedServer

__all__ = ["Found", "load_in_turns"]

_MEDIAN_TARGET, _WORST_TARGET = 0.10, 0.25


@dataclass(slots=True)
class Found:
    """The result so far.

    Attributes:
        rows: What was measured.
        failures: By case, why it did not end well.
        not_measured: Rows that are missing, by name, and why.
        details: By case, what else is worth knowing.
        errors: Of predictions, by case.
    """

    rows: list[Measurement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def row(
        self,
        name: str,
        samples: Sequence[float],
        unit: str = "ratio",
        target: float | None = None,
        better: Literal["lower", "higher"] = "lower",
    ) -> None:
        """Adds a row; without samples it is one that could not be measured."""
        if samples:
            self.rows.append(Measurement(name=name, unit=unit, samples=samples, target=target, better=better))
        else:
            why = "; ".join(f"{case}: failed" for case in self.failures if case.split(":")[0] == name.split(":")[0])
            self.not_measured[name] = why or "a load before it failed"
            say(f"{name}: not measured: {self.not_measured[name]}")

    def ended(self, case: str, samples: Sequence[bool], why: str | None = None) -> None:
        """Adds the row that says of each load of a case whether it ended well, and why the last one did not."""
        self.row(f"{case}: ended well", [float(ok) for ok in samples], "of 1", 1.0, "higher")
        if why is not None:
            self.failures[case] = why
            say(f"{case}: FAILED: {why}")

    def predicted(self, case: str, session: Session, order: Order, topology: Topology, measured_s: float) -> None:
        """Predicts a load that ended well, and adds its error."""
        try:
            answer = session.predict(order, topology)
        except LoadFailed as error:
            self.not_measured[f"predicted: {case}: error"] = str(error)
            say(f"{case}: no prediction: {error}")
            return
        self.errors[case] = abs(answer["seconds"] - measured_s) / measured_s
        self.row(f"predicted: {case}: seconds", [answer["seconds"]], "s")
        self.row(f"predicted: {case}: error", [self.errors[case]])
        self.details.setdefault(case, {})["predicted"] = dict(answer)

    def close(self) -> None:
        """Adds the rows over all predictions."""
        errors = list(self.errors.values())
        self.row("predicted: median error", errors, target=_MEDIAN_TARGET)
        self.row("predicted: worst error", [max(errors)] if errors else [], target=_WORST_TARGET)


def load_in_turns(
    found: Found,
    session: Session,
    orders: Mapping[str, Order],
    topology: Topology,
    *,
    server: RatedServer | None = None,
    rounds: int,
    predict: bool = True,
) -> dict[str, list[Loaded]]:
    """Loads by case, in turns, after a round that does not count; a case ends with its first failure.

    Args:
        found: Gets rows of seconds, of failures and of predictions.
        session: The bed.
        orders: By case.
        topology: For predictions.
        server: What the checkpoint is on, if it is on one.
        rounds: That count.
        predict: Whether the topology says what the hosts can do.
    """
    done: dict[str, list[Loaded]] = {case: [] for case in orders}
    reasons: dict[str, str] = {}
    for number in range(rounds + 1):
        for case, order in orders.items():
            if case in reasons:
                continue
            try:
                loaded = session.load(order, server)
            except LoadFailed as error:
                reasons[case] = str(error)
                continue
            about = f"{loaded.transfer_s:.2f} s, processors {loaded.busy:.0%} busy"
            say(f"{case}: {about}, ranks on {' '.join(loaded.hosts)}{_faults(loaded)}")
            if number:
                done[case].append(loaded)
    for case, loads in done.items():
        failed = [False] if case in reasons else []
        found.ended(case, [True] * len(loads) + failed, reasons.get(case))
        if loads:
            seconds = [loaded.transfer_s for loaded in loads]
            found.row(f"{case}: seconds", seconds, "s")
            found.details[case] = {
                "hosts": [list(loaded.hosts) for loaded in loads],
                "faults": [_kinds(loaded) for loaded in loads],
                "processors_busy": [loaded.busy for loaded in loads],
                "bytes_over_network": [loaded.report.bytes_over_network for loaded in loads],
            }
            if predict and not failed:
                found.predicted(case, session, orders[case], topology, statistics.median(seconds))
    return {case: loads if case not in reasons else [] for case, loads in done.items()}


def _faults(loaded: Loaded) -> str:
    kinds = _kinds(loaded)
    return f", faults: {kinds}" if kinds else ""


def _kinds(loaded: Loaded) -> dict[str, int]:
    kinds = [fault.kind for fault in loaded.report.faults]
    return {kind: kinds.count(kind) for kind in sorted({*kinds})}
