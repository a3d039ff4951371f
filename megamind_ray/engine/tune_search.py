"""Which settings are faster: candidates in, decisions out. What a candidate costs is measured by whoever calls.

Each candidate is compared with the best so far in pairs that are measured one right after the other, in turns which
comes first: what else the machine does meanwhile slows both. One knob after the other, until a pass changes nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from megamind_ray.errors import MegamindError

__all__ = [
    "Clock",
    "Comparison",
    "Knob",
    "Measure",
    "Pair",
    "Pairs",
    "Rule",
    "Search",
    "Trial",
    "Values",
    "compare",
    "is_better",
    "median_ratio",
    "search",
    "spread",
]

Values = Mapping[str, object]
# Seconds that some work takes with these values, in this condition (``cold``, ``warm``).
Measure = Callable[[Values, str], float]
Clock = Callable[[], float]
Verdict = Literal["taken", "kept", "undecided", "skipped", "not tried"]

_MAX_CHANCE: Final = 1 / 16
# What is written to a file that later runs load has at least so many pairs behind it, whatever the time.
_MIN_COMPARED: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When a candidate is taken.

    It must gain in one condition at least, and lose in none. It gains where the median of the paired ratios reaches
    ``min_gain``, and so few pairs say the contrary (one of 7, six of 21) that a coin would do so once in 16 times:
    a sign test, which asks nothing of how the noise is distributed. It is stricter than a lower quartile above 1.

    Attributes:
        min_gain: Old time by new time.
        floor: A median below this is a loss.
        first_rounds: Pairs after which a candidate that shows no gain is given up.
        rounds: Pairs of one that is taken.
        compared_rounds: Pairs of the comparison at the end, where there is time.
        compared_floor: A median of the comparison below this is a loss. Nearer to 1 than the 0.98 that is promised of
            every later measurement, since that has noise as well.
        max_passes: Over all knobs.
    """

    min_gain: float = 1.03
    floor: float = 0.98
    first_rounds: int = 3
    rounds: int = 7
    compared_rounds: int = 21
    compared_floor: float = 0.99
    max_passes: int = 3

    def __post_init__(self) -> None:
        assert 1 <= self.first_rounds <= self.rounds, self
        assert self.rounds >= 4, "fewer have no quartiles"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two measurements, one right after the other.

    Attributes:
        old_s: With the values to beat.
        new_s: With the candidate's.
    """

    old_s: float
    new_s: float

    @property
    def ratio(self) -> float:
        """Above 1 where the candidate is faster."""
        return self.old_s / self.new_s


Pairs = Mapping[str, Sequence[Pair]]


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting and what to try for it.

    Attributes:
        name: Of the setting.
        values: In the order in which they are tried.
    """

    name: str
    values: tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate.

    Attributes:
        knob: What was changed.
        value: To what.
        instead_of: The value to beat.
        verdict: ``taken``; ``kept`` (the old value); ``undecided`` (no time to the end: the old value is kept, too);
            ``skipped`` (it cannot be measured); ``not tried`` (no time).
        reason: Why.
        pairs: By condition.
    """

    knob: str
    value: object
    instead_of: object
    verdict: Verdict
    reason: str
    pairs: Pairs = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        """Whether it is known what it is worth."""
        return self.verdict in ("taken", "kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was found.

    Attributes:
        best: The values to use.
        trials: All candidates, in order.
        out_of_time: Whether there was more to try.
    """

    best: Values
    trials: tuple[Trial, ...]
    out_of_time: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sets of values, measured against each other.

    Attributes:
        pairs: By condition.
        better: Whether the new one gains somewhere and loses nowhere.
        reason: Why, in words.
    """

    pairs: Pairs
    better: bool
    reason: str


class OutOfTime(Exception):
    """The deadline came in the middle of a candidate."""


class CandidateFailed(Exception):
    """The candidate cannot be measured; the values to beat can."""


def median_ratio(pairs: Sequence[Pair]) -> float:
    """Median of the paired ratios."""
    return statistics.median(pair.ratio for pair in pairs)


def is_better(pairs: Pairs, rule: Rule) -> bool:
    """Whether the pairs show a gain in one condition and a loss in none."""
    return any(_gains(some, rule) for some in pairs.values()) and not _losses(pairs, rule)


def spread(trials: Sequence[Trial], condition: str) -> float:
    """How far measurements of the same differ: standard deviation by mean, median over the trials; 0 without any."""
    shares = []
    for trial in trials:
        seconds = [pair.old_s for pair in trial.pairs.get(condition, ())]
        if len(seconds) > 1:
            shares.append(statistics.stdev(seconds) / statistics.fmean(seconds))
    return statistics.median(shares) if shares else 0.0


def search(
    knobs: Sequence[Knob],
    start: Values,
    conditions: Sequence[str],
    measure: Measure,
    *,
    deadline_s: float,
    clock: Clock,
    rule: Rule | None = None,
    on_trial: Callable[[Knob, object], None] = lambda _knob, _value: None,
) -> Search:
    """Looks for values that are faster than those to start from.

    Args:
        knobs: What to change, in this order.
        start: A value for each knob, and whatever else the measurement wants to know.
        conditions: Each candidate is measured in all of them, the cheapest first.
        measure: Gives seconds; a ``MegamindError`` for a candidate means that it cannot be used here.
        deadline_s: When to stop, as the clock counts; nothing new is measured after it.
        clock: Seconds.
        rule: When a candidate is taken.
        on_trial: Told of each candidate before it is measured.

    Raises:
        MegamindError: The values to start from cannot be measured.
    """
    rule = rule or Rule()
    hunt = _Hunt(conditions, measure, deadline_s, clock, rule)
    candidates = [(knob, value) for knob in knobs for value in knob.values]
    best, trials, seen = dict(start), list[Trial](), set[tuple[tuple[str, object], ...]]()
    for _ in range(rule.max_passes):
        before = dict(best)
        for knob, value in candidates:
            values = {**best, knob.name: value}
            key = tuple(sorted(values.items()))
            if value == best[knob.name] or key in seen:
                continue
            if clock() >= deadline_s:
                trials.append(_not_tried(knob, value, best))
                continue
            seen |= {key, tuple(sorted(best.items()))}
            on_trial(knob, value)
            trials.append(hunt.trial(knob, value, best))
            if trials[-1].verdict == "taken":
                best = values
        if best == before or clock() >= deadline_s:
            break
    out_of_time = any(trial.verdict == "not tried" for trial in trials)
    return Search(best=best, trials=tuple(trials), out_of_time=out_of_time)


def compare(
    old: Values,
    new: Values,
    conditions: Sequence[str],
    measure: Measure,
    *,
    deadline_s: float,
    clock: Clock,
    rule: Rule | None = None,
) -> Comparison:
    """Measures two sets of values against each other, in fresh pairs.

    Raises:
        MegamindError: One of them cannot be measured.
    """
    rule = rule or Rule()
    pairs: dict[str, list[Pair]] = {condition: [] for condition in conditions}
    for number in range(rule.compared_rounds):
        for condition in conditions:
            if number < _MIN_COMPARED or clock() < deadline_s:
                pairs[condition].append(_pair(old, new, condition, measure, number))
    strict = replace(rule, floor=rule.compared_floor)
    return Comparison(pairs=pairs, better=is_better(pairs, strict), reason=_why(pairs, strict))


class _Hunt:
    """Measures candidates until it is clear what they are worth, or the time is over."""

    def __init__(
        self, conditions: Sequence[str], measure: Measure, deadline_s: float, clock: Clock, rule: Rule
    ) -> None:
        self._conditions = conditions
        self._measure = measure
        self._deadline_s = deadline_s
        self._clock = clock
        self._rule = rule

    def trial(self, knob: Knob, value: object, best: Values) -> Trial:
        pairs: dict[str, list[Pair]] = {}
        verdict: Verdict = "kept"
        try:
            for condition, number in self._schedule(pairs):
                if self._clock() >= self._deadline_s:
                    raise OutOfTime
                pair = _pair(best, {**best, knob.name: value}, condition, self._candidate(best), number)
                pairs.setdefault(condition, []).append(pair)
        except CandidateFailed as failure:
            verdict, reason = "skipped", str(failure.__cause__)
        except OutOfTime:
            verdict, reason = "undecided", "the time was over before it was decided"
        else:
            verdict = "taken" if self._complete(pairs) and is_better(pairs, self._rule) else "kept"
            reason = _why(pairs, self._rule)
        return Trial(
            knob=knob.name,
            value=value,
            instead_of=best[knob.name],
            verdict=verdict,
            reason=reason,
            pairs={condition: tuple(some) for condition, some in pairs.items()},
        )

    def _candidate(self, best: Values) -> Measure:
        def measure(values: Values, condition: str) -> float:
            try:
                return self._measure(values, condition)
            except MegamindError as error:
                if values is best:
                    raise
                raise CandidateFailed from error

        return measure

    def _schedule(self, pairs: Mapping[str, Sequence[Pair]]) -> Iterator[tuple[str, int]]:
        """Conditions and numbers of rounds, as long as the pairs so far leave hope."""
        rule = self._rule
        for condition in self._conditions:
            yield from ((condition, number) for number in range(rule.first_rounds))
            if _losses(pairs, rule):
                return
        hope = (1 + rule.min_gain) / 2
        if not any(median_ratio(some) >= hope for some in pairs.values()):
            return
        for condition in self._conditions:
            yield from ((condition, number) for number in range(rule.first_rounds, rule.rounds))
            if _losses(pairs, rule):
                return

    def _complete(self, pairs: Mapping[str, Sequence[Pair]]) -> bool:
        return all(len(pairs.get(condition, ())) == self._rule.rounds for condition in self._conditions)


def _pair(old: Values, new: Values, condition: str, measure: Measure, number: int) -> Pair:
    """Measures both; which comes first changes from round to round, since the first may leave traces."""
    if number % 2:
        new_s = measure(new, condition)
        return Pair(measure(old, condition), new_s)
    old_s = measure(old, condition)
    return Pair(old_s, measure(new, condition))


def _gains(pairs: Sequence[Pair], rule: Rule) -> bool:
    against = sum(pair.ratio <= 1 for pair in pairs)
    chance = sum(math.comb(len(pairs), number) for number in range(against + 1)) / 2 ** len(pairs)
    return median_ratio(pairs) >= rule.min_gain and chance <= _MAX_CHANCE


def _losses(pairs: Pairs, rule: Rule) -> list[str]:
    return [condition for condition, some in pairs.items() if some and median_ratio(some) < rule.floor]


def _why(pairs: Pairs, rule: Rule) -> str:
    shown = ", ".join(f"{median_ratio(some):.2f}x {condition}" for condition, some in pairs.items() if some)
    lost = _losses(pairs, rule)
    if lost:
        return f"{shown}: slower {' and '.join(lost)}"
    return f"{shown}: faster" if is_better(pairs, rule) else f"{shown}: within the noise"


def _not_tried(knob: Knob, value: object, best: Values) -> Trial:
    return Trial(knob=knob.name, value=value, instead_of=best[knob.name], verdict="not tried", reason="no time left")
