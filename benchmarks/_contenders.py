"""What a loader has to offer to be compared, the limit and ourselves in that form, and memory that was used before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

import megamind_ray as mm
from benchmarks._checkpoint import Checkpoint
from benchmarks._limit import FlatBuffer, Variant, read_flat

__all__ = ["OURS", "Contender", "Load", "Loaded", "Recycled", "Tensors", "UnavailableError", "limit", "tensors_of"]

Tensors = Mapping[str, torch.Tensor]
Loaded = Tensors | FlatBuffer
Load = Callable[[], Loaded]
"""The part that is timed; what it returns is kept until the clock has stopped."""

# For the alignment of each tensor in the arena.
_ARENA_SLACK_BYTES = 64 << 20


class UnavailableError(Exception):
    """A contender has no such way to load; the message says why."""


class Recycled:
    """Memory that was used before, one kind for each contender: its pages are there, nobody has to make them.

    Peers and the limit share one buffer, whose views are a state dict that exists already. Ours is an arena.

    Args:
        checkpoint: What has to fit.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def flat(self) -> FlatBuffer:
        """Where the limit reads to."""
        buffer = FlatBuffer(self._checkpoint, huge_pages=True)
        buffer.touch()
        return buffer

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Where peers load to."""
        return self.flat.tensors()

    @cached_property
    def arena(self) -> mm.Arena:
        """Where we load to."""
        return mm.Arena(self._checkpoint.nbytes + _ARENA_SLACK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A loader.

    Attributes:
        name: In the results.
        kind: ``limit``, ``ours``, ``peer``; ``note`` for one that is shown and not compared with, since what it gives
            is not owned memory.
        prepare: Called before each sample, off the clock: gives the load. Its memory is fresh without a ``Recycled``,
            else the ``Recycled``'s. Raises ``UnavailableError`` or ``ImportError`` where it cannot.
    """

    name: str
    kind: Literal["limit", "ours", "peer", "note"]
    prepare: Callable[[Checkpoint, Recycled | None], Load]


def tensors_of(loaded: Loaded) -> Tensors:
    """The tensors of what a load returned."""
    return loaded.tensors() if isinstance(loaded, FlatBuffer) else loaded


def limit(variant: Variant) -> Contender:
    """The limit, read in one way; for information where that is no read."""

    def prepare(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
        def load() -> FlatBuffer:
            buffer = FlatBuffer(checkpoint, huge_pages=variant.huge_pages) if recycled is None else recycled.flat
            read_flat(buffer, variant)
            return buffer

        return load

    if variant.way == "mapped":
        return Contender(name="limit, were it a mapping", kind="note", prepare=prepare)
    return Contender(name="limit", kind="limit", prepare=prepare)


def _load_state_dict(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    options = _into(recycled)
    return lambda: mm.load_state_dict(checkpoint.folder, **options)


def _load_file(checkpoint: Checkpoint, recycled: Recycled | None) -> Load:
    options = _into(recycled)

    def load() -> Tensors:
        tensors: dict[str, torch.Tensor] = {}
        for path in checkpoint.files:
            tensors.update(mm.load_file(path, **options))
        return tensors

    return load


def _into(recycled: Recycled | None) -> dict[str, Any]:
    return {} if recycled is None else {"arena": recycled.arena}


OURS = (
    Contender(name="load_state_dict", kind="ours", prepare=_load_state_dict),
    Contender(name="load_file", kind="ours", prepare=_load_file),
)
