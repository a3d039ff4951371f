"""Virtual time, and the tasks that wait for it."""

from __future__ import annotations

import pytest

from megamind_ray.sim.clock import Clock, Limit, Signal, Steps, Task, together


def run(clock: Clock) -> None:
    clock.run_until(1e9)


def test_actions_run_in_the_order_of_their_time_and_equal_times_in_the_order_of_asking() -> None:
    clock, seen = Clock(), list[str]()
    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(time_s, lambda name=name: seen.append(name))  # type: ignore[misc]
    run(clock)
    assert (seen, clock.now_s) == (["a", "b", "c"], 2.0)


def test_what_is_due_later_than_asked_for_stays() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(1.0, lambda: seen.append("early"))
    clock.at(3.0, lambda: seen.append("late"))
    clock.run_until(2.0)
    assert (seen, clock.next_s) == (["early"], 3.0)


def test_a_task_goes_on_after_each_wait_and_says_when_it_is_done() -> None:
    clock, seen = Clock(), list[float]()

    def steps() -> Steps:
        for _ in range(3):
            yield clock.sleep(0.5)
            seen.append(clock.now_s)

    Task(steps(), lambda: seen.append(-1.0))
    assert seen == []
    run(clock)
    assert seen == [0.5, 1.0, 1.5, -1.0]


def test_a_task_that_is_ended_runs_its_finally_clauses_and_nothing_else() -> None:
    clock, seen = Clock(), list[str]()

    def steps() -> Steps:
        try:
            yield clock.sleep(1.0)
            seen.append("went on")
        finally:
            seen.append("cleaned up")

    task = Task(steps())
    task.end()
    run(clock)
    assert seen == ["cleaned up"]


def test_several_that_run_together_are_done_with_the_last() -> None:
    clock, seen = Clock(), list[float]()

    def part(seconds: float) -> Steps:
        yield clock.sleep(seconds)

    def steps() -> Steps:
        yield together([part(1.0), part(3.0), part(2.0)])
        seen.append(clock.now_s)

    Task(steps())
    run(clock)
    assert seen == [3.0]


def test_a_signal_wakes_all_that_wait_and_nobody_who_comes_later() -> None:
    signal, seen = Signal(), list[str]()

    def steps(name: str) -> Steps:
        yield signal.wait
        seen.append(name)

    Task(steps("a"))
    Task(steps("b"))
    signal.notify()
    Task(steps("late"))
    assert seen == ["a", "b"]


def holder(clock: Clock, limit: Limit, name: str, amount: float, seconds: float, seen: list[str]) -> Steps:
    yield from limit.take(amount)
    seen.append(f"{name} at {clock.now_s:g}")
    yield clock.sleep(seconds)
    limit.give(amount)


def test_a_limit_serves_those_that_wait_in_their_order() -> None:
    clock, limit, seen = Clock(), Limit(2), list[str]()
    for name in "abcd":
        Task(holder(clock, limit, name, 1, 1.0, seen))
    run(clock)
    assert seen == ["a at 0", "b at 0", "c at 1", "d at 1"]
    assert (limit.used, limit.peak) == (0, 2)


def test_who_wants_more_than_is_free_does_not_hold_up_who_wants_less() -> None:
    clock, limit, seen = Clock(), Limit(10), list[str]()
    Task(holder(clock, limit, "first", 6, 2.0, seen))
    Task(holder(clock, limit, "large", 8, 1.0, seen))
    Task(holder(clock, limit, "small", 3, 1.0, seen))
    run(clock)
    assert seen == ["first at 0", "small at 0", "large at 2"]


def test_more_than_the_limit_as_a_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="11 of at most 10"):
        list(Limit(10).take(11))


def test_a_task_that_is_ended_while_it_waits_leaves_the_queue() -> None:
    clock, limit, seen = Clock(), Limit(1), list[str]()
    Task(holder(clock, limit, "holds", 1, 1.0, seen))
    waiting = Task(holder(clock, limit, "ended", 1, 1.0, seen))
    Task(holder(clock, limit, "next", 1, 1.0, seen))
    waiting.end()
    run(clock)
    assert seen == ["holds at 0", "next at 1"]
    assert limit.used == 0
