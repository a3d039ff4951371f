"""Comparisons of layouts, and what a model larger than its GPUs takes, as tables and plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from megamind_ray.core.outcome import Outcome
from megamind_ray.planning.overflow import OverflowPlan
from megamind_ray.report.tables import plain_table
from megamind_ray.report.terminal import printable
from megamind_ray.units import format_bytes, format_duration

__all__ = ["comparison_document", "comparison_table", "overflow_document", "overflow_tables"]


def comparison_document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """All outcomes, the fastest that fits named."""
    best = _best(outcomes)
    return {
        "schema": "megamind.comparison/1",
        "predicted": True,
        "best": None if best is None else best.case,
        "cases": [outcome.to_json() for outcome in outcomes],
    }


def comparison_table(outcomes: Sequence[Outcome]) -> RenderableType:
    """One row per case, the fastest load marked; below, what bounds that one, and why the others do not fit."""
    best = _best(outcomes)
    rows = [_row(outcome, best) for outcome in outcomes if outcome.fits]
    parts: list[RenderableType] = []
    if rows:
        columns = ("case", ">predicted", ">bound", ">from storage", ">network", ">largest rank", ">nodes", "bottleneck")
        parts.append(plain_table(columns, rows))
    if best is not None:
        parts.append(Text(f"\n* loads fastest: {best.bottleneck}\nonly loading is compared, not how the model runs"))
    refused = [(outcome.case, outcome.problem) for outcome in outcomes if not outcome.fits]
    if refused:
        parts += [Text("\ncannot be loaded so:" if rows else "no case can be loaded:")]
        parts.append(plain_table(("case", "why not"), refused))
    return Group(*parts)


def _best(outcomes: Sequence[Outcome]) -> Outcome | None:
    fitting = [outcome for outcome in outcomes if outcome.seconds is not None]
    return min(fitting, key=lambda outcome: outcome.seconds or 0.0, default=None)


def _row(outcome: Outcome, best: Outcome | None) -> tuple[str, ...]:
    return (
        printable(outcome.case) + (" *" if outcome is best else ""),
        format_duration(outcome.seconds or 0.0),
        "-" if outcome.lower_bound_s is None else format_duration(outcome.lower_bound_s),
        format_bytes(outcome.bytes_from_storage),
        format_bytes(outcome.bytes_over_network),
        format_bytes(outcome.largest_rank_bytes),
        str(outcome.num_nodes),
        outcome.bottleneck.partition(";")[0],  # What would help is long: it is said once, of the best.
    )


def overflow_document(plan: OverflowPlan) -> dict[str, Any]:
    """As plain JSON values."""
    return {"schema": "megamind.overflow/1", "predicted": True, "host_bytes": plan.host_bytes, **asdict(plan)}


def overflow_tables(plan: OverflowPlan) -> RenderableType:
    """What stays where, and what streaming it costs."""
    ranks = plain_table(
        (">rank", "where", ">weights", ">resident on the GPU", ">stream slots", ">in host memory", ">experts among it"),
        [
            (
                str(rank.rank),
                f"{rank.node}:{rank.gpu}",
                format_bytes(rank.need_bytes),
                format_bytes(rank.device_bytes),
                format_bytes(rank.slot_bytes),
                format_bytes(rank.host_bytes),
                format_bytes(rank.expert_bytes),
            )
            for rank in plan.ranks
        ],
    )
    if not plan.nodes:
        return Text("all weights fit the GPUs: nothing stays in host memory")
    pools = plain_table(
        ("pool of node", ">must hold", ">has room for", "enough?"),
        [
            (
                node.node,
                format_bytes(node.host_bytes),
                format_bytes(node.room_bytes),
                "yes" if node.fits else f"no: takes an object store of {format_bytes(node.needed_pool_bytes)}",
            )
            for node in plan.nodes
        ],
    )
    costs: Mapping[str, float | None] = {
        "streaming all of it once, as a forward pass over many tokens does": plan.pass_s,
        "streaming what one token needs, if none of its experts is resident": plan.token_s,
    }
    lines = [
        f"{what}: {format_duration(seconds)} (predicted)" for what, seconds in costs.items() if seconds is not None
    ]
    return Group(ranks, Text(), pools, Text("\n" + "\n".join(lines)))
