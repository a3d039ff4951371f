"""How many bytes can be read, or taken in, in the seconds that are left."""

from __future__ import annotations

from collections.abc import Sequence

from megamind_ray.policies.costs import Float64Array

__all__ = ["at_most", "is_enough", "most_of"]

_ROUNDING = 1e-6
_LARGE = 1e300


def at_most(left: Float64Array, each: Float64Array) -> float:
    """Bytes for which there are seconds of every kind left."""
    used = each > 0
    return float((left[used] / each[used]).min(initial=_LARGE))


def is_enough(between: Sequence[float], at_end: Sequence[float], nbytes: float) -> bool:
    """Whether some bytes are read where two stand at the ends; who cannot stand between others has less than none."""
    if sum(most < 0 for most in between) > 2:
        return False
    more = sorted((end - max(most, 0.0) for end, most in zip(at_end, between, strict=True)), reverse=True)
    return sum(max(most, 0.0) for most in between) + sum(more[:2]) >= nbytes * (1 - _ROUNDING)


def most_of(left: Float64Array, read: Float64Array, take: Float64Array, wanted: float) -> float:
    """Of bytes that are read or else taken in, how many are read at most in the seconds that are left of each kind.

    Returns:
        Bytes; -1 where there is not time enough, whatever is read.
    """
    # x read, the rest taken: left >= x read + (wanted - x) take.
    slack, slope = left - wanted * take, read - take
    most = float((slack[slope > 0] / slope[slope > 0]).min(initial=wanted))
    least = float((slack[slope < 0] / slope[slope < 0]).max(initial=0.0))
    tolerance = wanted * _ROUNDING
    if (slack[slope == 0] < 0).any() or most < -tolerance or least > most + tolerance:
        return -1.0
    return max(most, 0.0)
