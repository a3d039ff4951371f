"""Pipeline stages: contiguous ranges of layers that minimise the largest stage in bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from megamind_ray.errors import RequestError

__all__ = ["layer_of", "partition"]

# The first numbered list of modules in a name holds the layers: model.layers.N, h.N, encoder.layer.N, encoder.block.N.
_LAYER = re.compile(r"((?:.*?\.)?(?:layers|layer|h|blocks|block)\.)0(?:\.|$)")
_NUMBER = re.compile(r"(?<![^.])0(?![^.])")


@lru_cache(maxsize=65536)
def _position(template: str) -> tuple[str, int] | None:
    match = _LAYER.match(template)
    return (match[1], len(_NUMBER.findall(match[1]))) if match else None


def layer_of(template: str, numbers: Sequence[str]) -> tuple[str, int] | None:
    """The list of layers that a tensor belongs to, and its number there; None for a tensor of no layer.

    Args:
        template: Name with 0 for each number.
        numbers: Those numbers.
    """
    found = _position(template)
    return (found[0], int(numbers[found[1]])) if found else None


def partition(layer_bytes: Sequence[int], first_bytes: int, last_bytes: int, num_stages: int) -> tuple[int, ...]:
    """The stage of each layer, so that the largest stage is as small as it can be; earlier stages are filled first.

    Args:
        layer_bytes: Size of each layer.
        first_bytes: What the first stage holds besides layers.
        last_bytes: What the last stage holds besides layers.
        num_stages: Stages; each gets at least one layer.

    Raises:
        RequestError: There are more stages than layers.
    """
    num_layers = len(layer_bytes)
    if num_stages == 1:
        return (0,) * num_layers
    if num_stages > num_layers:
        raise RequestError(
            f"pp={num_stages} needs at least {num_stages} layers, but the checkpoint has {num_layers}; "
            f"take pp of at most {max(1, num_layers)}"
        )
    sizes = list(layer_bytes)
    sizes[0] += first_bytes
    sizes[-1] += last_bytes
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _num_stages_within(sizes, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return _fill(sizes, low, num_stages)


def _num_stages_within(sizes: Sequence[int], limit: int) -> int:
    stages, load = 1, 0
    for size in sizes:
        if load + size > limit:
            stages, load = stages + 1, 0
        load += size
    return stages


def _fill(sizes: Sequence[int], limit: int, num_stages: int) -> tuple[int, ...]:
    stage_of, stage, load = list[int](), 0, 0
    for layer, size in enumerate(sizes):
        must_advance = stage_of and num_stages - stage - 1 >= len(sizes) - layer
        if stage_of and (load + size > limit or must_advance):
            stage, load = stage + 1, 0
        stage_of.append(stage)
        load += size
    return tuple(stage_of)
