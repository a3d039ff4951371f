"""Moments, in the many forms that storage gives them in."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime

__all__ = ["nanoseconds"]


def nanoseconds(moment: object) -> int | None:
    """Nanoseconds since the epoch, of seconds, a datetime, or text as in HTTP or ISO 8601; None of anything else."""
    if isinstance(moment, str):
        for parse in (datetime.fromisoformat, parsedate_to_datetime):
            with suppress(ValueError, TypeError, OverflowError, IndexError):  # what they have for odd dates
                return round(parse(moment).timestamp() * 1e9)
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    if isinstance(moment, int | float):
        return round(moment * 1e9)
    return None
