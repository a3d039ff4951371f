"""How near placements come to what none can beat, and to the optimum where it can be found.

A *ratio* is the bound of a policy's plan (``plan_bound``: the seconds of its busiest resource) over a lower bound. The
bound is over placements that keep ranks together as Best-Fit does (``as close-knit``), so a policy that tears gangs
apart may be below 1; the rows ``anywhere`` compare with all placements, and so show what keeping ranks together costs.

The bound is not always reached: four equal stages on three nodes take as long as two on one. Where Best-Fit is beyond
the target on a mesh that is small enough, the exact search says whether anything better exists.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks._plan_cases import Case, preset_cases, random_cases
from benchmarks._result import Measurement
from megamind_ray.config import Config
from megamind_ray.core.plan import Plan
from megamind_ray.errors import CapacityError
from megamind_ray.planning.bound import kept_together, lower_bound, plan_bound
from megamind_ray.planning.build import build_plan
from megamind_ray.planning.cost import CostModel
from megamind_ray.policies.registry import PLACEMENT

__all__ = ["exact_rows", "preset_rows", "random_rows"]

_OTHERS = ("first_fit", "round_robin", "largest_first", "topology_blind")
_TARGET, _TARGET_OF_OPTIMUM = 1.05, 1.02
_SEED, _MAX_SEARCHED = 1, 32


def preset_rows() -> list[Measurement]:
    """Best-Fit on the hardware that comes with the package."""
    ratios: dict[str, list[float]] = {}
    for name, case in preset_cases():
        ratios.setdefault(name, []).append(_ratios(case, ())["best_fit"])
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
    found, beyond, optimal = [], 0, 0
    for case in random_cases(number, _SEED):
        ratios = _ratios(case, _OTHERS)
        if not ratios:
            continue
        found.append(ratios)
        if ratios["best_fit"] > _TARGET:
            beyond += 1
            optimal += _is_optimal(case)
    what = f"{number} clusters: best_fit beyond 1.05 of the bound"
    return [
        *_rows(f"{number} clusters, over the bound as close-knit", found, target=_TARGET),
        Measurement(name=what, unit="cases", samples=[beyond], target=0),
        Measurement(name=f"{what}, but proven optimal", unit="cases", samples=[optimal]),
        Measurement(name=f"{what}, and not proven optimal", unit="cases", samples=[beyond - optimal]),
    ]


def _is_optimal(case: Case) -> bool:
    """Whether a search that comes to an end finds nothing better than Best-Fit."""
    if case.demands.parallel.world > _MAX_SEARCHED:
        return False
    plans, model = _plans(case, ("exact", "best_fit")), CostModel(case.topology)
    if "proven" not in plans["exact"].tables["ranks"]["reason"][0].as_py():
        return False
    exact, best = (plan_bound(plans[name], model).seconds for name in ("exact", "best_fit"))
    return best <= exact * _TARGET_OF_OPTIMUM


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


def _rows(what: str, found: Sequence[Mapping[str, float]], *, target: float) -> list[Measurement]:
    rows = []
    for name in dict.fromkeys(name for ratios in found for name in ratios):
        values = [ratios[name] for ratios in found if name in ratios]
        goal = target if name == "best_fit" else None
        for kind, value in (("median", statistics.median(values)), ("worst", max(values))):
            rows.append(Measurement(name=f"{what}: {name}, {kind}", unit="ratio", samples=[value], target=goal))
    return rows


def _ratios(case: Case, others: Iterable[str]) -> dict[str, float]:
    plans, model = _plans(case, ("best_fit", *others)), CostModel(case.topology)
    if "best_fit" not in plans:
        return {}
    best = plans["best_fit"]
    needs = best.tables["ranks"]["arena_bytes"].to_pylist()
    together = kept_together(best, case.topology)
    close = lower_bound(case.manifest, case.demands, model, rank_bytes=needs, together=together, explain=False).seconds
    anywhere = lower_bound(case.manifest, case.demands, model, rank_bytes=needs, explain=False).seconds
    ratios = {name: plan_bound(plan, model).seconds / close for name, plan in plans.items()}
    return ratios | {"best_fit anywhere": ratios["best_fit"] * close / anywhere}


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
