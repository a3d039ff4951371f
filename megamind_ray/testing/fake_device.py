"""A CUDA runtime and streams for machines without a GPU, which keep to CUDA's rules and say when somebody does not."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["FakeEvent", "FakeHostRuntime", "FakeStream"]

ALREADY_REGISTERED, NOT_REGISTERED, NOT_SUPPORTED = 712, 713, 801


class FakeHostRuntime:
    """Registrations of host memory.

    Attributes:
        registered: First address and size of what is registered.
        num_calls: Registrations that were tried.
        error: What each further registration fails with; 0: it does not.
        read_only_supported: Whether the device knows read-only registrations.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.num_calls = 0
        self.error = 0
        self.read_only_supported = True

    def register(self, address: int, nbytes: int, *, read_only: bool) -> int:
        self.num_calls += 1
        if self.error:
            return self.error
        if read_only and not self.read_only_supported:
            return NOT_SUPPORTED
        if self._touching(address, address + nbytes):
            return ALREADY_REGISTERED
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        if address not in self.registered:
            return NOT_REGISTERED
        ctypes.string_at(address, 1)  # ends the process where the memory went first
        del self.registered[address]
        return 0

    def describe(self, error: int) -> str:
        return f"fake error {error}"

    def may_copy(self, begin: int, end: int) -> bool:
        """CUDA's rule: a copy lies in one registration, or outside of all of them."""
        touching = self._touching(begin, end)
        return not touching or any(first <= begin and end <= first + nbytes for first, nbytes in touching)

    def is_registered(self, begin: int, end: int) -> bool:
        """Whether any of these bytes are."""
        return bool(self._touching(begin, end))

    def _touching(self, begin: int, end: int) -> list[tuple[int, int]]:
        return [(first, size) for first, size in self.registered.items() if first < end and begin < first + size]


class FakeEvent:
    """An event that the device passes when the test says so."""

    def __init__(self, passed: bool) -> None:
        self.passed = passed
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.passed


class FakeStream:
    """A stream that runs what is queued at once.

    Attributes:
        slow: Events stay ahead of the device until the test lets it pass them.
        events: All that were recorded.
        num_follows: How often it was told to follow the current stream.
        error: What the next operation fails with.
    """

    def __init__(self) -> None:
        self.slow = False
        self.events: list[FakeEvent] = []
        self.num_follows = 0
        self.error: BaseException | None = None

    @contextmanager
    def queueing(self) -> Iterator[None]:
        yield
        if self.error is not None:
            raise self.error

    def record(self) -> FakeEvent:
        self.events.append(FakeEvent(not self.slow))
        return self.events[-1]

    def follow_current(self) -> None:
        self.num_follows += 1
