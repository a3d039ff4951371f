"""Exit codes: 0 done, 1 failed while running, 2 the request was wrong, 130 interrupted."""

from __future__ import annotations

from typing import Final

from megamind_ray.errors import CapacityError, MegamindError, RequestError

__all__ = ["DONE", "FAILED", "INTERRUPTED", "WRONG_REQUEST", "exit_code_of", "mark_started"]

DONE: Final = 0
FAILED: Final = 1
WRONG_REQUEST: Final = 2
INTERRUPTED: Final = 130

_STARTED_NOTE = "bytes were already moving"


def mark_started(error: MegamindError) -> None:
    """Records that an error came after bytes had begun to move."""
    error.add_note(_STARTED_NOTE)


def exit_code_of(error: MegamindError) -> int:
    """2 for what another request would mend, 1 for the rest.

    What does not fit (``CapacityError``) is a wrong request as long as nothing was moved; when memory runs out in the
    middle of a load, the load has failed.
    """
    if isinstance(error, RequestError):
        return WRONG_REQUEST
    if isinstance(error, CapacityError) and _STARTED_NOTE not in getattr(error, "__notes__", ()):
        return WRONG_REQUEST
    return FAILED
