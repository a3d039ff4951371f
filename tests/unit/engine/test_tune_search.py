"""Decisions of the search, from measurements that are made up here."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from megamind_ray.engine.tune_search import Knob, Pair, Rule, Search, Values, compare, is_better, search, spread
from megamind_ray.errors import RequestError, SourceError

START = {"threads": 4, "mode": "auto"}
THREADS = Knob("threads", (8, 2, 16))
MODE = Knob("mode", ("always", "never"))
Cost = Callable[[Values, str], float]


class Machine:
    """Reads take what ``cost`` says, times noise; its clock goes on by as much."""

    def __init__(self, cost: Cost, *, noise: float = 0.0, seed: int = 0) -> None:
        self.cost = cost
        self.now_s = 0.0
        self.reads: list[tuple[dict[str, object], str]] = []
        self._noise = noise
        self._random = random.Random(seed)

    def measure(self, values: Values, condition: str) -> float:
        seconds = self.cost(values, condition) * self._random.lognormvariate(0, self._noise)
        self.reads.append((dict(values), condition))
        self.now_s += seconds
        return seconds

    def clock(self) -> float:
        return self.now_s

    def search(self, *knobs: Knob, seconds: float = 1e9, conditions: tuple[str, ...] = ("warm", "cold")) -> Search:
        return search(knobs, START, conditions, self.measure, deadline_s=seconds, clock=self.clock)


def by_threads(costs: Mapping[object, float]) -> Cost:
    return lambda values, _condition: costs.get(values["threads"], 1.0)


def test_a_candidate_that_is_better_is_taken() -> None:
    found = Machine(by_threads({8: 0.8, 16: 0.9, 2: 1.5}), noise=0.02).search(THREADS, MODE)

    assert found.best == {"threads": 8, "mode": "auto"}
    taken = [(trial.knob, trial.value, trial.instead_of) for trial in found.trials if trial.verdict == "taken"]
    assert taken == [("threads", 8, 4)]
    assert not found.out_of_time


def test_the_best_of_several_better_ones_is_taken() -> None:
    assert Machine(by_threads({8: 0.8, 16: 0.6}), noise=0.02).search(THREADS).best["threads"] == 16


def test_equal_candidates_leave_the_default_in_nearly_all_noisy_searches() -> None:
    changed = 0
    for seed in range(100):
        machine = Machine(lambda *_: 1.0, noise=0.02, seed=seed)
        changed += machine.search(THREADS, MODE).best != START

    assert changed <= 5


def test_a_gain_below_the_smallest_that_counts_is_not_taken() -> None:
    found = Machine(by_threads({8: 0.98})).search(THREADS)

    assert found.best == START
    assert found.trials[0].verdict == "kept"
    assert found.trials[0].reason == "1.02x warm, 1.02x cold: within the noise"


def test_pairs_that_disagree_are_noise_however_large_the_median() -> None:
    def pairs(*ratios: float) -> dict[str, list[Pair]]:
        return {"cold": [Pair(ratio, 1.0) for ratio in ratios]}

    assert not is_better(pairs(1.3, 1.3, 1.3, 1.3, 1.3, 0.7, 0.7), Rule())
    assert is_better(pairs(1.3, 1.3, 1.3, 1.3, 1.3, 1.3, 0.7), Rule())
    assert not is_better(pairs(1.3, 1.3, 1.3, 0.7), Rule())
    assert not is_better(pairs(1.3, 1.3, 1.3), Rule())


def test_what_gains_cold_and_loses_warm_is_not_taken() -> None:
    def cost(values: Values, condition: str) -> float:
        if values["mode"] != "always":
            return 1.0
        return 0.5 if condition == "cold" else 1.1

    found = Machine(cost).search(MODE)

    assert found.best == START
    assert found.trials[0].reason == "0.91x warm: slower warm"


def test_what_gains_in_one_condition_and_is_equal_in_the_other_is_taken() -> None:
    def cost(values: Values, condition: str) -> float:
        return 0.5 if (values["mode"], condition) == ("always", "cold") else 1.0

    assert Machine(cost).search(MODE).best["mode"] == "always"


def test_knobs_that_depend_on_each_other_are_looked_at_again() -> None:
    def cost(values: Values, _condition: str) -> float:
        many = values["threads"] == 16
        return {"always": 0.5 if many else 0.8, "never": 1.0, "auto": 1.2 if many else 1.0}[str(values["mode"])]

    found = Machine(cost).search(THREADS, MODE)

    assert found.best == {"threads": 16, "mode": "always"}


def test_nothing_is_measured_twice_against_the_same() -> None:
    found = Machine(lambda *_: 1.0).search(THREADS, MODE)

    assert [(trial.knob, trial.value) for trial in found.trials] == [
        *(("threads", value) for value in THREADS.values),
        *(("mode", value) for value in MODE.values),
    ]


def test_pairs_are_interleaved_and_take_turns() -> None:
    machine = Machine(by_threads({8: 0.5}))

    machine.search(Knob("threads", (8,)), conditions=("warm",))

    assert [values["threads"] for values, _ in machine.reads] == [4, 8, 8, 4, 4, 8, 8, 4, 4, 8, 8, 4, 4, 8]


def test_a_hopeless_candidate_is_given_up_early() -> None:
    machine = Machine(by_threads({2: 3.0}))

    machine.search(Knob("threads", (2,)))

    assert len(machine.reads) == 2 * Rule().first_rounds


def test_the_end_of_the_time_ends_the_search() -> None:
    machine = Machine(by_threads({8: 0.5, 2: 0.4}))

    found = machine.search(THREADS, MODE, seconds=25.0)

    assert found.out_of_time
    assert found.best["threads"] == 8
    assert found.trials[1].verdict == "undecided"
    assert found.trials[1].reason == "the time was over before it was decided"
    assert [trial.is_measured for trial in found.trials] == [True] + [False] * (len(found.trials) - 1)
    assert {trial.verdict for trial in found.trials[2:]} == {"not tried"}
    assert machine.now_s <= 25.0 + 2


def test_without_any_time_nothing_is_measured() -> None:
    machine = Machine(lambda *_: 1.0)

    found = machine.search(THREADS, seconds=0.0)

    assert machine.reads == []
    assert found.best == START
    assert [trial.verdict for trial in found.trials] == ["not tried"] * 3


def test_a_candidate_that_the_time_cut_short_is_not_taken() -> None:
    found = Machine(by_threads({8: 0.5})).search(THREADS, seconds=8.0)

    assert found.best == START
    assert found.trials[0].verdict == "undecided"
    assert found.trials[0].pairs


def test_a_candidate_that_fails_is_skipped_with_its_reason() -> None:
    def cost(values: Values, _condition: str) -> float:
        if values["threads"] == 8:
            raise SourceError("/m: no direct reads here", file="/m")
        return {16: 0.5}.get(values["threads"], 1.0)  # type: ignore[call-overload, no-any-return]

    found = Machine(cost).search(THREADS)

    assert (found.trials[0].verdict, found.trials[0].reason) == ("skipped", "/m: no direct reads here")
    assert found.best["threads"] == 16


def test_what_fails_with_the_values_to_start_from_ends_the_search() -> None:
    def cost(values: Values, _condition: str) -> float:
        raise SourceError("/m: the disk is gone", file="/m")

    with pytest.raises(SourceError, match="the disk is gone"):
        Machine(cost).search(THREADS)


def test_a_bug_of_the_measurement_is_no_skipped_candidate() -> None:
    def cost(values: Values, _condition: str) -> float:
        return 1.0 if values["threads"] == 4 else 1 / 0

    with pytest.raises(ZeroDivisionError):
        Machine(cost).search(THREADS)


def test_a_comparison_says_whether_the_new_values_hold() -> None:
    machine = Machine(by_threads({8: 0.8, 2: 1.1}))

    def against(threads: int) -> tuple[bool, str]:
        new = {**START, "threads": threads}
        seen = compare(START, new, ("warm", "cold"), machine.measure, deadline_s=1e9, clock=machine.clock)
        return seen.better, seen.reason

    assert against(8) == (True, "1.25x warm, 1.25x cold: faster")
    assert against(2) == (False, "0.91x warm, 0.91x cold: slower warm and cold")
    assert against(16) == (False, "1.00x warm, 1.00x cold: within the noise")


def test_a_comparison_is_stricter_about_losses_than_the_search() -> None:
    def cost(values: Values, condition: str) -> float:
        if values["threads"] == 4:
            return 1.0
        return 0.5 if condition == "cold" else 1 / 0.984

    machine, new = Machine(cost), {**START, "threads": 8}

    assert machine.search(Knob("threads", (8,))).best == new
    seen = compare(START, new, ("warm", "cold"), machine.measure, deadline_s=1e9, clock=machine.clock)
    assert (seen.better, seen.reason) == (False, "0.98x warm, 2.00x cold: slower warm")


def test_a_comparison_measures_as_long_as_there_is_time() -> None:
    machine = Machine(lambda *_: 1.0)

    seen = compare(START, START, ("cold",), machine.measure, deadline_s=20.0, clock=machine.clock)

    assert len(seen.pairs["cold"]) == 10


def test_a_comparison_has_a_few_pairs_whatever_the_time() -> None:
    machine = Machine(lambda *_: 1.0)

    seen = compare(START, START, ("cold",), machine.measure, deadline_s=0.0, clock=machine.clock)

    assert len(seen.pairs["cold"]) == 4


def test_a_comparison_passes_on_what_fails() -> None:
    def cost(values: Values, _condition: str) -> float:
        raise RequestError("no")

    machine = Machine(cost)

    with pytest.raises(RequestError, match="no"):
        compare(START, START, ("cold",), machine.measure, deadline_s=9.0, clock=machine.clock)


def test_the_spread_is_of_measurements_of_the_same() -> None:
    quiet = Machine(by_threads({8: 0.5, 16: 0.25})).search(THREADS)
    noisy = Machine(lambda *_: 1.0, noise=0.2).search(THREADS)

    assert spread(quiet.trials, "cold") == pytest.approx(0)
    assert 0.1 < spread(noisy.trials, "cold") < 0.4
    assert spread((), "cold") == 0
