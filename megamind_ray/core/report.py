"""The report of a load, measured or predicted. Pure data; rendering is in ``report``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from megamind_ray.core.field_types import require_field_types
from megamind_ray.errors import RequestError

__all__ = ["SCHEMA", "Fault", "Kept", "LoadReport", "RankReport", "Verified"]

SCHEMA = "megamind.report/1"
Verified = Literal["reference", "transit", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that went wrong and was dealt with.

    Attributes:
        kind: ``worker_lost``, ``chunk_retried``, ``extent_failed``, ...
        where: What and where, in words.
        action: What was done about it.
        bytes_retried: Bytes read again because of it.
        at_s: Seconds after the start of the load; None for reads, which do not know when it began.
    """

    kind: str
    where: str
    action: str
    bytes_retried: int = 0
    at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a load left in the pool."""

    num_blocks: int = 0
    num_bytes: int = 0
    bytes_not_kept: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's share.

    Attributes:
        rank, pp, dp, tp: Which rank.
        node, gpu: Where it ran.
        num_tensors: Names in its state dict.
        arena_bytes: Device memory that its views take, alignment included.
        bytes_to_device: Bytes written into its arena.
        bytes_direct: Of those, read by the rank itself.
        bytes_pool: Of those, from the pool.
        seconds: By step: ``read``, ``wait``, ``copy``, ``total``.
        sample_tensor: A tensor it holds and its local shape, for people.
    """

    rank: int
    pp: int
    dp: int
    tp: int
    node: str
    gpu: int
    num_tensors: int
    arena_bytes: int
    bytes_to_device: int
    bytes_direct: int = 0
    bytes_pool: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    sample_tensor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load moved, how long it took, what it proved (docs/design/0003).

    ``lower_bound_s``, ``bottleneck`` (in words) and ``utilisation`` (by resource, 0 to 1) are known for a prediction.
    """

    kind: Literal["load", "swap", "simulation"] = "load"
    model: str
    uri: str
    parallel: Mapping[str, int]
    started_at: str
    bytes_total: int
    bytes_from_storage: int
    bytes_headers: int = 0
    bytes_retried: int = 0
    bytes_over_network: int = 0
    bytes_by_wire: Mapping[str, int] = field(default_factory=dict)
    bytes_to_device: int
    bytes_replicated: int
    seconds: Mapping[str, float]
    throughput_bytes_per_s: float
    ranks: tuple[RankReport, ...]
    faults: tuple[Fault, ...] = ()
    kept: Kept = Kept()
    verified: Verified
    notes: tuple[str, ...] = ()
    lower_bound_s: float | None = None
    bottleneck: str = ""
    utilisation: Mapping[str, float] = field(default_factory=dict)
    schema: str = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Reads ``to_json``'s output; unknown fields are ignored, so older readers keep working.

        Raises:
            RequestError: The document is not a report of this schema.
        """
        schema = document.get("schema") if isinstance(document, Mapping) else None
        if schema != SCHEMA:
            raise RequestError(f"report schema {schema!r:.80}; this release reads {SCHEMA!r}")
        known = {name: value for name, value in document.items() if name in cls.__dataclass_fields__}
        try:
            known["ranks"] = tuple(_pick(RankReport, row) for row in document["ranks"])
            known["faults"] = tuple(_pick(Fault, row) for row in document.get("faults", ()))
            known["kept"] = _pick(Kept, document.get("kept", {}))
            known["notes"] = tuple(document.get("notes", ()))
            report = cls(**known)
            require_field_types(report)
            return report
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise RequestError(f"report of schema {SCHEMA!r} is incomplete or malformed: {error}") from error


def _pick(cls: Any, row: Mapping[str, Any]) -> Any:
    return cls(**{name: value for name, value in row.items() if name in cls.__dataclass_fields__})
