"""Sizes, rates and durations as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from megamind_ray.errors import RequestError

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "format_bytes",
    "format_duration",
    "format_rate",
    "parse_bytes",
    "parse_duration",
    "parse_rate",
]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_MAX_BYTES: Final = (1 << 63) - 1  # sizes end up in columns of 64 bits
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40, "pi": 1 << 50}
# Bounded, since numbers of thousands of digits raise errors of their own when they are converted or shown.
_NUMBER = r"\s*(\d{1,12}(?:\.\d{1,12})?|\d{1,24}|\.\d{1,12})\s*"
_SIZE = re.compile(_NUMBER + r"([kmgtp]?i?)b?\s*", re.IGNORECASE)
_RATE = re.compile(_NUMBER + r"([kmgtp]?i?)(bit|b)(?:/s|ps)\s*", re.IGNORECASE)
_DURATION = re.compile(_NUMBER + r"([num\u00b5\u03bc]?s|min|h)\s*")  # the micro sign, and the Greek letter
_SECONDS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "\u00b5s": Decimal("1e-6"),
    "\u03bcs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}


def parse_bytes(value: int | str, *, what: str = "size") -> int:
    """Reads ``"8GiB"``, ``"500 MB"`` or a number of bytes.

    Args:
        value: Bytes, or a number with a unit (B, kB/MB/GB/TB/PB decimal, KiB ... PiB binary).
        what: Name of the setting, for the error message.

    Raises:
        RequestError: It is not a size, is negative, or needs more than 63 bits.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise RequestError(f"{what}: {value!r} is not a size; write bytes or for example '8GiB'")
    if isinstance(value, int):
        if value < 0:
            raise RequestError(f"{what}: {value} is negative; write a size of 0 bytes or more")
        return _require_size(value, what)
    match = _SIZE.fullmatch(value)
    scale = (_DECIMAL | _BINARY).get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise RequestError(f"{what}: {value!r} is not a size; write bytes or for example '8GiB' or '500MB'")
    return _require_size(int(Decimal(match[1]) * scale), what)


def _require_size(num_bytes: int, what: str) -> int:
    if num_bytes > _MAX_BYTES:
        raise RequestError(f"{what}: more than {format_bytes(_MAX_BYTES)}, which no machine has; write a smaller size")
    return num_bytes


def parse_rate(value: float | str, *, what: str = "rate") -> float:
    """Reads ``"25GB/s"``, ``"200Gbit/s"``, ``"200Gbps"`` or a number of bytes per second.

    As everywhere in networking ``b`` is a bit and ``B`` a byte: ``Gbps`` is an eighth of ``GBps``.

    Raises:
        RequestError: It is not a rate, or is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RequestError(f"{what}: {value!r} is not a rate; write for example '25GB/s' or '200Gbit/s'")
    if isinstance(value, str):
        match = _RATE.fullmatch(value)
        scale = (_DECIMAL | _BINARY).get(match[2].lower()) if match else None
        if match is None or scale is None:
            raise RequestError(f"{what}: {value!r} is not a rate; write for example '25GB/s' or '200Gbit/s'")
        rate = float(match[1]) * scale / (1 if match[3] == "B" else 8)
    else:
        rate = float(value) if abs(value) < 1e300 else float("inf")  # an integer may be too long for a float
    if not 0 < rate < float("inf"):
        raise RequestError(f"{what}: {value!r} must be more than 0 bytes per second")
    return rate


def parse_duration(value: float | str, *, what: str = "duration") -> float:
    """Reads ``"100us"``, ``"2 ms"``, ``"1.5s"``, ``"3min"`` or a number of seconds.

    Args:
        value: Seconds, or a number with a unit (ns, us, ms, s, min, h).
        what: Name of the setting, for the error message.

    Raises:
        RequestError: It is not a duration, is negative or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RequestError(f"{what}: {value!r} is not a duration; write seconds or for example '2ms' or '100us'")
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            raise RequestError(f"{what}: {value!r} is not a duration; write seconds or for example '2ms' or '100us'")
        return float(Decimal(match[1]) * _SECONDS[match[2]])
    if not 0 <= value < 1e300:  # also what is no number, and integers that are too long for a float
        raise RequestError(f"{what}: {value!r} must be 0 seconds or more")
    return float(value)


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``'1.50 KiB'``; exact below 1 KiB."""
    if num_bytes < 0:
        return "-" + format_bytes(-num_bytes)
    if num_bytes < KIB:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        num_bytes /= 1024
        if round(num_bytes, 2) < 1024:
            return f"{num_bytes:.2f} {unit}"
    return f"{num_bytes / 1024:.2f} PiB"


def format_rate(bytes_per_s: float) -> str:
    """``2.5e9`` -> ``'2.50 GB/s'`` (decimal, as disks and networks are sold)."""
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= scale:
            return f"{bytes_per_s / scale:.2f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def format_duration(seconds: float) -> str:
    """``0.0042`` -> ``'4.2 ms'``, ``222`` -> ``'3 min 42 s'``."""
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
