"""What `megamind plan` says beyond the plan itself: a prediction, other layouts beside it, what overflows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamind_ray.errors import CapacityError, RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megamind_ray.api.whatif import Case, Study
    from megamind_ray.core.plan import Plan

__all__ = ["GUESSED", "Told", "compared", "overflowing", "planned_or_nearest", "predicted"]

Told = tuple[dict[str, Any], list["RenderableType"]]
GUESSED = (
    "the rates of disks, networks and memory are guesses, as no hardware was named: name it with --topology, a preset "
    "(megamind topology --list) or a file that `megamind topology` measured"
)
_OFFLOAD = "the same command with --offload"


def planned_or_nearest(study: Study, case: Case) -> Plan:
    """The plan of a case.

    Raises:
        RequestError, CapacityError: It cannot be loaded so; the message names the nearest layout that can.
    """
    try:
        return study.plan(case)
    except (RequestError, CapacityError) as error:
        nearest = study.nearest(case)
        if nearest is not None and f"{nearest.label} would need" in error.message:
            raise
        if nearest is not None:
            raise _with_advice(error, f"The nearest layout that works on this hardware: {nearest.label}") from error
        if isinstance(error, CapacityError):
            raise _with_advice(error, f"What host memory could hold instead: {_OFFLOAD}") from error
        raise


def _with_advice(error: RequestError | CapacityError, advice: str) -> RequestError | CapacityError:
    message = f"{error.message.rstrip('.')}. {advice}"
    if isinstance(error, CapacityError):
        return CapacityError(message, where=error.where, needed_bytes=error.needed_bytes, free_bytes=error.free_bytes)
    return RequestError(message)


def predicted(plan: Plan, case: Case, record: Path | None, *, guessed: bool) -> Told:
    """How long the load would take, as a report and a timeline; written to a folder too if one is given.

    Args:
        plan: Of the load.
        case: What it was made for.
        record: A folder, new or empty.
        guessed: Nobody named the hardware: its rates are nobody's, which the report says, too.
    """
    from rich.text import Text

    from megamind_ray.api.record import write_record
    from megamind_ray.api.simulate import run_simulation
    from megamind_ray.core.recording import LoadRecord
    from megamind_ray.report.timeline_text import TimelineText
    from megamind_ray.units import format_duration

    simulation = run_simulation(plan, case.topology, config=case.config)
    report = simulation.report
    if guessed:
        report = replace(report, notes=(*report.notes, GUESSED))
    line = f"\npredicted: {format_duration(report.seconds['total'])}, from started workers to the last byte"
    if report.lower_bound_s is not None:
        line += f"; this plan cannot take less than {format_duration(report.lower_bound_s)}"
    if guessed:
        line += f"\n{GUESSED}"
    parts: list[RenderableType] = [Text(line), TimelineText(timeline=simulation.timeline, report=report)]
    document: dict[str, Any] = {"predicted": report.to_json(), "rates_guessed": guessed}
    if record is not None:
        write_record(record, LoadRecord(timeline=simulation.timeline, events=simulation.events), report)
        document["recorded"] = str(record)
        parts.append(Text(f"\nprediction written to {record}: open timeline.html in a browser"))
    return document, parts


def compared(study: Study, base: Case, cases: Sequence[str], sweep: str | None, *, guessed: bool) -> Told:
    """The base case and others, each planned and simulated.

    Args:
        study: Of the checkpoint.
        base: The case that others are compared with.
        cases: The others, as the user wrote them.
        sweep: Axes of which all layouts are compared.
        guessed: Nobody named the hardware of the base case.

    Raises:
        RequestError: A case that cannot be read. One that cannot be loaded is a row that says why.
    """
    from megamind_ray.api.cases import parse_case, sweep_meshes
    from megamind_ray.report.whatif import comparison_document, comparison_table

    chosen = [parse_case(text, base) for text in cases]
    if chosen and sweep is None:
        chosen.insert(0, base)
    if sweep is not None:
        axes = [axis.strip() for axis in sweep.split(",")]
        meshes = sweep_meshes(axes, base.parallel, base.topology.num_gpus)
        chosen += [replace(base, parallel=mesh, label=str(mesh)) for mesh in meshes]
    outcomes = [study.outcome(case) for case in chosen]
    document, parts = comparison_document(outcomes), [comparison_table(outcomes)]
    if guessed and any(case.topology is base.topology for case in chosen):
        from rich.text import Text

        parts.append(Text(GUESSED))
        document["rates_guessed"] = True
    return document, parts


def overflowing(study: Study, case: Case) -> Told:
    """What of a model stays in host memory.

    Raises:
        RequestError, CapacityError: Not even so.
    """
    from megamind_ray.report.whatif import overflow_document, overflow_tables

    plan = study.overflow(case)
    return overflow_document(plan), [overflow_tables(plan)]
