"""What the engine finds when bytes go wrong on their way, what it repairs, and what nothing can find.

1. With recorded checksums: seeded damages between storage and arena (flipped bits, reads cut short in silence, chunks
   swapped), one a load, half of the loads through the pool's blocks. A second read is good, or a mirror is, or nothing.
   Then as many loads without damage.
2. A table of what goes wrong and how much of it is found, without recorded checksums and with them. Nothing in it is a
   target: some of it no checksum can see.

``--quick`` injects 90 damages in place of 1,000.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._result import Measurement, parse_arguments, write_result
from megamind_ray.testing.blind_spots import TRIALS, Trial
from megamind_ray.testing.campaign import REMEDIES, Bench, CampaignResult, Outcome, Remedy, run_campaign, run_clean

_SEED = 12


def main() -> None:
    """Runs both parts and writes the result."""
    arguments = parse_arguments(__doc__)
    num_injections, num_trials = (90, 4) if arguments.quick else (1000, 50)
    rows = [*campaign(num_injections), *table(num_trials)]
    config = {"num_injections": num_injections, "num_trials_per_row": num_trials, "seed": _SEED}
    write_result("integrity", rows, config=config, arguments=arguments)


def campaign(num_injections: int) -> list[Measurement]:
    """Damages and clean loads, with recorded checksums; half of each through the pool."""
    results, clean = [], Counter[Outcome]()
    for through_pool, number in ((False, num_injections - num_injections // 2), (True, num_injections // 2)):
        with tempfile.TemporaryDirectory(prefix="megamind-integrity-") as folder:
            bench = Bench.make(Path(folder), through_pool=through_pool)
            results.append(run_campaign(bench, number, seed=_SEED + through_pool, on_done=_progress(number)))
            clean += run_clean(bench, number)
    return [
        Measurement(name="injected", unit="loads", samples=[sum(result.count() for result in results)]),
        Measurement(
            name="found",
            unit="loads",
            samples=[sum(result.found for result in results)],
            target=num_injections,
            better="higher",
        ),
        *(_of_remedy(results, remedy) for remedy in REMEDIES),
        _never("wrong tensors handed out", results, "unnoticed"),
        _never("damages that did no harm", results, "harmless"),
        _never("errors that do not name the chunk", results, "misnamed"),
        Measurement(name="clean loads", unit="loads", samples=[clean.total()]),
        Measurement(
            name="false alarms in clean loads", unit="loads", samples=[clean.total() - clean["harmless"]], target=0
        ),
    ]


def table(num_trials: int) -> list[Measurement]:
    """The share that was found of each thing that can go wrong."""
    rows = []
    print(f"{'share found':<56}{'without':>10}{'with recorded checksums':>26}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="megamind-integrity-") as folder:
        benches = {
            recorded: Bench.make(Path(folder) / str(recorded), recorded=recorded, through_pool=True).without_mirror()
            for recorded in (False, True)
        }
        for name, trial in TRIALS.items():
            found = {recorded: _found(bench, trial, num_trials) for recorded, bench in benches.items()}
            print(f"  {name:<54}{found[False]:>10.0%}{found[True]:>26.0%}", file=sys.stderr)
            rows += [
                Measurement(
                    name=f"found {'with' if recorded else 'without'} checksums: {name}", unit="ratio", samples=[share]
                )
                for recorded, share in found.items()
            ]
    return rows


def _found(bench: Bench, trial: Trial, num_trials: int) -> float:
    """The share of harmful trials that were found."""
    outcomes: Counter[Outcome] = Counter()
    for number in range(num_trials):
        with tempfile.TemporaryDirectory(prefix="megamind-integrity-") as folder:
            outcomes[trial(bench, Path(folder), random.Random(_SEED + number))] += 1
    harmful = outcomes.total() - outcomes["harmless"]
    return (outcomes["refused"] + outcomes["repaired"]) / harmful if harmful else 0.0


def _never(name: str, results: Sequence[CampaignResult], outcome: Outcome) -> Measurement:
    number = sum(result.count(outcome=outcome) for result in results)
    return Measurement(name=name, unit="loads", samples=[number], target=0)


def _of_remedy(results: Sequence[CampaignResult], remedy: Remedy) -> Measurement:
    """How many of the damages that could be repaired were; refused, where there was no good source."""
    wanted: Outcome = "refused" if remedy == "none" else "repaired"
    injected = sum(result.count(remedy=remedy) for result in results)
    done = sum(result.count(remedy=remedy, outcome=wanted) for result in results)
    where = {"second read": "by another read", "mirror": "from the mirror", "none": "with no good source left"}[remedy]
    return Measurement(name=f"{wanted} {where}", unit="loads", samples=[done], target=injected, better="higher")


def _progress(total: int) -> Callable[[int], None]:
    def show(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total} damages", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    main()
