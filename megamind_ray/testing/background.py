"""Something on a thread of its own, for tests that strike meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Background"]

Value = TypeVar("Value")


class Background(Generic[Value]):
    """Begins at once.

    Attributes:
        error: What it raised.

    Args:
        action: What to do.
    """

    def __init__(self, action: Callable[[], Value]) -> None:
        self.error: BaseException | None = None
        self._action = action
        self._values: list[Value] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, well or not.

        Raises:
            AssertionError: It has not in that time.
        """
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "it hangs"

    def value(self) -> Value:
        """What came of it.

        Raises:
            BaseException: What it raised.
        """
        if self.error is not None:
            raise self.error
        return self._values[0]

    def _run(self) -> None:
        try:
            self._values.append(self._action())
        except BaseException as error:  # noqa: BLE001 - looked at by the test, on its own thread
            self.error = error
