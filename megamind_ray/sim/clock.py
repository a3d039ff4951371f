"""Virtual time: what happens when, in order, and tasks that wait for it.

A **task** is a generator. It yields a ``Wait`` where it goes on later: a function that is given what to call then, and
returns what to call if the task is ended before. Nothing here reads a real clock: equal simulations are equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

__all__ = ["Action", "Clock", "Limit", "Signal", "Steps", "Task", "Wait", "together"]

Action: TypeAlias = Callable[[], None]
Wait: TypeAlias = Callable[[Action], Action]
Steps: TypeAlias = Generator[Wait, None, None]


class Clock:
    """Actions in the order of their time; those of equal times in the order in which they were asked for.

    Attributes:
        now_s: Time of the action that runs, in seconds from the start.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._serial = count()

    def at(self, time_s: float, action: Action) -> None:
        """Calls ``action`` at a time, which may not have passed by more than the order of actions allows for."""
        heappush(self._due, (time_s, next(self._serial), action))

    def sleep(self, seconds: float) -> Wait:
        """A wait for so long."""

        def begin(resume: Action) -> Action:
            self.at(self.now_s + seconds, resume)
            return _nothing  # a task that was ended takes no notice

        return begin

    @property
    def next_s(self) -> float:
        """When the next action is due; infinity where there is none."""
        return self._due[0][0] if self._due else float("inf")

    def run_until(self, end_s: float) -> None:
        """Runs what is due up to ``end_s``, that included, and what comes of it by then."""
        due = self._due
        while due and due[0][0] <= end_s:
            self.now_s, _, action = heappop(due)
            action()


class Task:
    """Runs a generator to its end, or until it is ended.

    Attributes:
        is_done: It has come to its end, or was ended.
    """

    def __init__(self, steps: Steps, on_end: Action | None = None) -> None:
        """Begins at once.

        Args:
            steps: What to do.
            on_end: Called at its end; not if it is ended before.
        """
        self.is_done = False
        self._steps = steps
        self._on_end = on_end
        self._cancel: Action = _nothing
        self._go_on()

    def end(self) -> None:
        """Ends it where it waits: its ``finally`` clauses run, what it waits for is called off."""
        if not self.is_done:
            self.is_done = True
            self._cancel()
            self._steps.close()

    def _go_on(self) -> None:
        if self.is_done:
            return
        try:
            wait = next(self._steps)
        except StopIteration:
            self.is_done = True
            if self._on_end is not None:
                self._on_end()
            return
        self._cancel = wait(self._go_on)


def together(many: Sequence[Steps]) -> Wait:
    """A wait until all of several have come to their end, none of them at once; they run at the same time."""

    def begin(resume: Action) -> Action:
        left = len(many)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                resume()

        tasks = [Task(steps, one_less) for steps in many]

        def end() -> None:
            for task in tasks:
                task.end()

        return end

    return begin


class Signal:
    """Something that tasks wait for; whoever waits goes on at the next ``notify``."""

    def __init__(self) -> None:
        self._waiting: list[Action] = []

    def wait(self, resume: Action) -> Action:
        """A ``Wait`` for the next ``notify``."""
        self._waiting.append(resume)
        return lambda: self._waiting.remove(resume) if resume in self._waiting else None

    def notify(self) -> None:
        """Lets all that wait go on."""
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


class Limit:
    """At most so much at a time: threads, requests, bytes of credit. First come, first served among those that fit.

    Who asks for more than is free does not hold up who asks for less: as threads on a condition do.

    Attributes:
        limit: Most that may be taken.
        used: Taken now.
        peak: Most that was taken at a time.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.used = 0.0
        self.peak = 0.0
        self._queue: deque[tuple[float, Action]] = deque()

    def take(self, amount: float = 1) -> Iterable[Wait]:
        """Steps of a task that takes ``amount``, waiting until it is free: ``yield from limit.take(n)``.

        Raises:
            ValueError: It is more than the limit; it would never be free.
        """
        if amount > self.limit:
            raise ValueError(f"{amount} of at most {self.limit}")
        if self.used + amount <= self.limit:
            self._add(amount)
        else:
            yield lambda resume: self._enqueue(amount, resume)

    def give(self, amount: float = 1) -> None:
        """Gives back; those that wait and now fit go on."""
        self.used -= amount
        if not self._queue:
            return
        served = []
        for entry in tuple(self._queue):
            if self.used + entry[0] <= self.limit:
                self._queue.remove(entry)
                self._add(entry[0])
                served.append(entry[1])
        for resume in served:
            resume()

    def _enqueue(self, amount: float, resume: Action) -> Action:
        entry = (amount, resume)
        self._queue.append(entry)

        def leave() -> None:
            if entry in self._queue:
                self._queue.remove(entry)
            else:  # it was given, and nobody is there to use it
                self.give(amount)

        return leave

    def _add(self, amount: float) -> None:
        self.used += amount
        self.peak = max(self.peak, self.used)


def _nothing() -> None:
    """What there is to call off of a wait that ends by itself."""
