"""Memory that loads use again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megamind_ray.device.arena import Arena as Memory
from megamind_ray.device.arena import HostArena
from megamind_ray.device.memory import device_budget_bytes
from megamind_ray.errors import RequestError
from megamind_ray.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["Arena", "memory_of"]

_MAKE_ROOM = "drop tensors of earlier loads"


class Arena:
    """Memory of a fixed size for tensors of ``load_file`` and ``load_state_dict``, used again by later loads.

    The first touch of a page costs more than reading its bytes from memory does: whoever loads again and again loads
    into an arena. Tensors in it are views that hold a lease. With the last tensor of a load (and the last view of one)
    its memory goes to the next load; memory that somebody still holds never does, a load that finds no room raises.

    ```python
    arena = mm.Arena("16GiB")
    for uri in checkpoints:
        weights = mm.load_state_dict(uri, arena=arena)
        ...
        del weights  # before the next load, or the arena needs room for both
    ```

    Args:
        budget: Size in bytes, or text with a unit.
        device: ``cpu``, ``cuda`` or ``cuda:N``, a ``torch.device``, or the index of a CUDA device.
        prefault: Take all pages of host memory now, with one thread per core, and not when they are first written to.
        poison: Test mode: memory is overwritten when it is given back, so that a stale pointer shows.

    Raises:
        RequestError: The budget is no size, or torch has no such device.
        CapacityError: The device, or this process's limits, have less memory free.
    """

    def __init__(
        self,
        budget: int | str,
        device: str | int | torch.device = "cpu",
        *,
        prefault: bool = True,
        poison: bool = False,
    ) -> None:
        from megamind_ray.engine.state_dict import check_device

        target = check_device(device)
        if target.type not in ("cpu", "cuda"):
            raise RequestError(
                f"device {device!r}: an arena is in host memory or on a CUDA device; take 'cpu' or 'cuda'"
            )
        asked_bytes = parse_bytes(budget, what="budget of the arena")
        if asked_bytes <= 0:
            raise RequestError(f"budget of the arena = {budget!r}: must be more than nothing")
        budget_bytes = device_budget_bytes(target.type if target.type == "cpu" else str(target), asked_bytes)
        self._memory = _make(target, budget_bytes, prefault=prefault, poison=poison)

    @property
    def device(self) -> str:
        """As torch names it."""
        return self._memory.device

    @property
    def budget_bytes(self) -> int:
        """Size."""
        return self._memory.budget_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that no tensor uses; a load needs them in one piece."""
        return self._memory.free_bytes

    def require_device(self, device: str | int | torch.device | None) -> None:
        """Makes sure that somebody who names a device means this one.

        Raises:
            RequestError: It is another one.
        """
        if device is None:
            return
        from megamind_ray.engine.state_dict import check_device

        asked, own = check_device(device), check_device(self.device)
        if asked.type != own.type or (own.type == "cuda" and asked.index != own.index):
            raise RequestError(f"device={device!r}, but the arena is on {self.device}; leave the device out")

    def __repr__(self) -> str:
        return f"Arena({format_bytes(self.budget_bytes)} on {self.device}, {format_bytes(self.free_bytes)} free)"


def _make(device: torch.device, budget_bytes: int, *, prefault: bool, poison: bool) -> Memory:
    if device.type != "cpu":
        from megamind_ray.device.cuda import CudaArena

        return CudaArena(budget_bytes, device=str(device), poison=poison, make_room=_MAKE_ROOM)
    host = HostArena(budget_bytes, poison=poison, keep_pages=True, where="arena", make_room=_MAKE_ROOM)
    if prefault:
        host.prefault(len(os.sched_getaffinity(0)))
    return host


def memory_of(arena: Arena) -> Memory:
    """The memory itself, for the engine."""
    return arena._memory
