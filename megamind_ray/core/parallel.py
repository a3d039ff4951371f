"""The mesh and the placements that a rule can give to a tensor (docs/design/0002)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from megamind_ray.core.ids import Rank
from megamind_ray.errors import RequestError

__all__ = [
    "Coords",
    "ExpertShard",
    "Heads",
    "PackedShard",
    "Parallel",
    "Placement",
    "Replicate",
    "Rule",
    "Shard",
    "Stage",
]


# More than any cluster has GPUs: a typing error is refused before anything is planned for it.
_MAX_RANKS: Final = 16384


@dataclass(frozen=True, slots=True, order=True)
class Coords:
    """Coordinates of a rank."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The mesh: ``world = pp * dp * tp`` ranks; ``ep`` folds over the dp x tp ranks of a stage.

    Raises:
        RequestError: A size is not a positive integer, ep does not divide dp x tp, or there are too many ranks.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name}={value!r}: it must be an integer of 1 or more")
        if self.world > _MAX_RANKS:
            raise RequestError(
                f"tp={self.tp} pp={self.pp} dp={self.dp} are {self.world} ranks; a mesh has at most {_MAX_RANKS}"
            )
        if (self.dp * self.tp) % self.ep:
            raise RequestError(
                f"ep={self.ep} does not divide dp x tp = {self.dp} x {self.tp} = {self.dp * self.tp}; "
                f"take a divisor of {self.dp * self.tp}"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def ranks(self) -> range:
        return range(self.world)

    def coords(self, rank: int) -> Coords:
        """Coordinates of a rank; ranks count pp outermost, then dp, then tp."""
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Coords(pp, dp, tp)

    def rank(self, coords: Coords) -> Rank:
        return Rank((coords.pp * self.dp + coords.dp) * self.tp + coords.tp)

    def ep_group(self, coords: Coords) -> int:
        """Which of the ``ep`` groups of its stage the rank is in."""
        return (coords.dp * self.tp + coords.tp) // (self.dp * self.tp // self.ep)

    def __str__(self) -> str:
        sizes = [f"{name}={getattr(self, name)}" for name in ("tp", "pp", "dp", "ep") if getattr(self, name) > 1]
        return " ".join(sizes) or "tp=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """That a dim consists of attention heads, which are never cut.

    Attributes:
        count: Number of heads.
        setting: Name in the model's configuration, for the error message.
        kv: Heads that may be replicated: tp may also be a multiple of ``count``.
    """

    count: int
    setting: str
    kv: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """The whole tensor on every rank of its stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One dim is split over tp.

    Boundaries are decided in *features*, which all tensors of a linear layer share, and mapped to indices.

    Attributes:
        dim: The dim, from 0; negative counts from the end.
        unit: Features that stay together.
        features_per_index: Features that one index of this dim stands for: 1 for a weight, 128 for a row of its
            block scales, 8 for four-bit values in an int32.
        heads: Where the dim is made of attention heads.
    """

    dim: int
    unit: int = 1
    features_per_index: int = 1
    heads: Heads | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShard:
    """A dim that is a concatenation of blocks (gate and up; q, k and v), each split over tp by itself.

    Attributes:
        dim: The dim, from 0; negative counts from the end.
        sizes: Features of each block, in order; they add up to the dim's features.
        blocks: How each is split; their ``dim`` is ignored.
        features_per_index: As for ``Shard``.
    """

    dim: int
    sizes: tuple[int, ...]
    blocks: tuple[Shard, ...]
    features_per_index: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShard:
    """Dim 0 counts experts: split over the ep groups, or by ``inner`` over tp where ep = 1.

    Attributes:
        inner: Placement of the whole fused tensor over tp when ep = 1; its dims count from 0 with the expert dim.
        separate: The module keeps one tensor per expert, whose number follows ``experts.`` in its name. There is no
            expert dim then: with ep > 1 the whole tensor goes to the group of its expert.
    """

    inner: Shard | PackedShard | Replicate
    separate: bool = False


Placement = Replicate | Shard | PackedShard | ExpertShard
Stage = Literal["layer", "first", "last", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which placement the module tensors with matching names get.

    Attributes:
        pattern: Glob on the module tensor's whole name (``*`` also matches dots).
        placement: None leaves it to the next rule that has one.
        stage: Stages that hold it; None leaves it to the next rule that has one. ``layer`` is the stage of the
            layer whose index is in the name.
        origin: Where the rule comes from, for ``Plan.explain``.
    """

    pattern: str
    placement: Placement | None = None
    stage: Stage | None = None
    origin: str = "user"
