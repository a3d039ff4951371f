"""How near placements come to what none can beat, and to the optimum where it can be found.

A *ratio* is the bound of a policy's plan (``plan_bound``: the seconds of its busiest resource) over a lower bound. The
bound is over placements that keep ranks together as Best-Fit does (``as close-knit``), so a policy that tears gangs
apart may be below 1; the rows ``anywhere`` compare with all placements, and so show what keeping ranks together costs.

The bound is not always reached: four equal stages on three nodes take as long as two on one. Where Best-Fit is beyond
the target, a search goes through all placements and either proves that none is sooner than some deadline, which is a
bound as well, or comes to no end. Rows say which bound a ratio is over: ``the bound`` is the formula's, ``the larger
bound`` that or the search's, and how many cases hang on which. What is left is named in the rows' notes on stderr.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks._plan_cases import Case, preset_cases, random_cases
from benchmarks._result import Measurement
from megamind_ray.config import Config
from megamind_ray.core.plan import Plan
from megamind_ray.errors import CapacityError
from megamind_ray.planning.bound import kept_together, lower_bound, plan_bound, search
from megamind_ray.planning.build import build_plan
from megamind_ray.planning.cost import CostModel
from megamind_ray.policies.registry import PLACEMENT

__all__ = ["exact_rows", "preset_rows", "random_rows"]

_OTHERS = ("first_fit", "round_robin", "largest_first", "topology_blind")
_TARGET, _TARGET_OF_OPTIMUM = 1.05, 1.02
_SEED = 1
# How far below the plan nothing is to be proven to be, the easiest first.
_FACTORS, _MAX_STEPS = (1.05, 1.02, 1.005), 20_000


def preset_rows() -> list[Measurement]:
    """Best-Fit on the hardware that comes with the package."""
    ratios: dict[str, list[float]] = {}
    for name, case in preset_cases():
        compared = _compared(case, ())
        assert compared is not None, f"{case.name} does not fit"
        ratios.setdefault(name, []).append(compared.ratios["best_fit"])
    return [
        Measurement(
            name=f"{name}: best_fit over the bound as close-knit, worst of {len(values)} meshes",
            unit="ratio",
            samples=[max(values)],
            target=_TARGET,
        )
        for name, values in ratios.items()
    ]


def random_rows(number: int) -> list[Measurement]:
    """All policies on random clusters."""
    found, larger, by_search, left = [], [], 0, 0
    for case in random_cases(number, _SEED):
        compared = _compared(case, _OTHERS)
        if compared is None:
            continue
        found.append(compared.ratios)
        ratio = compared.ratios["best_fit"]
        if ratio > _TARGET:
            ratio = compared.best_s / max(compared.bound_s, _searched_s(case, compared))
            by_search += ratio <= _TARGET
            left += ratio > _TARGET
            if ratio > _TARGET:
                print(f"{case.name}: {ratio:.3f} of what is proven", file=sys.stderr)
        larger.append({"best_fit": ratio})
    what = f"{number} clusters: best_fit beyond 1.05 of the bound"
    return [
        *_rows(f"{number} clusters, over the bound as close-knit", found, target=None),
        *_rows(f"{number} clusters, over the larger bound as close-knit", larger, target=_TARGET),
        Measurement(name=what, unit="cases", samples=[by_search + left]),
        Measurement(name=f"{what}, within 1.05 of what a search proves", unit="cases", samples=[by_search]),
        Measurement(name=f"{what}, and of what a search proves", unit="cases", samples=[left], target=0),
    ]


def _searched_s(case: Case, compared: _Compared) -> float:
    """Seconds than which a search that comes to an end finds nothing sooner; 0 where it proves nothing."""
    plan, proven_s = compared.plan, 0.0
    needs = plan.tables["ranks"]["arena_bytes"].to_pylist()
    together, model = kept_together(plan, case.topology), CostModel(case.topology)
    for factor in _FACTORS:
        deadline_s = compared.best_s / factor
        arguments = (case.manifest, case.demands, model, deadline_s)
        if not search(*arguments, rank_bytes=needs, together=together, max_steps=_MAX_STEPS).is_proven:
            break
        proven_s = deadline_s
    return proven_s


def exact_rows(number: int) -> list[Measurement]:
    """All policies against the optimum on clusters small enough to find it."""
    found, unproven = [], 0
    for case in random_cases(number, _SEED + 1, small=True):
        plans = _plans(case, ("exact", "best_fit", *_OTHERS))
        if "exact" not in plans:
            continue  # Best-Fit is complete: the model does not fit
        unproven += "proven" not in plans["exact"].tables["ranks"]["reason"][0].as_py()
        model = CostModel(case.topology)
        seconds = {name: plan_bound(plan, model).seconds for name, plan in plans.items()}
        found.append({name: value / seconds["exact"] for name, value in seconds.items() if name != "exact"})
    return [
        *_rows(f"{number} small clusters, over the optimum as close-knit", found, target=_TARGET_OF_OPTIMUM),
        Measurement(name=f"{number} small clusters: not proven optimal", unit="cases", samples=[unproven], target=0),
    ]


def _rows(what: str, found: Sequence[Mapping[str, float]], *, target: float | None) -> list[Measurement]:
    rows = []
    for name in dict.fromkeys(name for ratios in found for name in ratios):
        values = [ratios[name] for ratios in found if name in ratios]
        goal = target if name == "best_fit" else None
        for kind, value in (("median", statistics.median(values)), ("worst", max(values))):
            rows.append(Measurement(name=f"{what}: {name}, {kind}", unit="ratio", samples=[value], target=goal))
    return rows


@dataclass(frozen=True, slots=True)
class _Compared:
    """Policies on a case: their seconds over the bound, Best-Fit's plan and seconds, and the bound."""

    ratios: Mapping[str, float]
    plan: Plan
    best_s: float
    bound_s: float


def _compared(case: Case, others: Iterable[str]) -> _Compared | None:
    """None where the model does not fit."""
    plans, model = _plans(case, ("best_fit", *others)), CostModel(case.topology)
    if "best_fit" not in plans:
        return None
    best = plans["best_fit"]
    needs = best.tables["ranks"]["arena_bytes"].to_pylist()
    together = kept_together(best, case.topology)
    close = lower_bound(case.manifest, case.demands, model, rank_bytes=needs, together=together, explain=False).seconds
    anywhere = lower_bound(case.manifest, case.demands, model, rank_bytes=needs, explain=False).seconds
    seconds = {name: plan_bound(plan, model).seconds for name, plan in plans.items()}
    ratios = {name: value / close for name, value in seconds.items()}
    return _Compared(ratios | {"best_fit anywhere": seconds["best_fit"] / anywhere}, best, seconds["best_fit"], close)


def _plans(case: Case, policies: Iterable[str]) -> dict[str, Plan]:
    """Plans by policy; without those of policies that find no placement."""
    plans = {}
    for name in policies:
        try:
            plans[name] = build_plan(
                case.manifest, case.demands, case.topology, config=Config(), placement=PLACEMENT[name]()
            )
        except CapacityError:
            continue
    return plans
