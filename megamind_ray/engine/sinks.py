"""Places that bytes of tensors go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megamind_ray.device.arena import Allocation, Arena, WriteTicket
from megamind_ray.device.copy_engines import copy_engine
from megamind_ray.device.strided import Bytes, Runs, copy_runs
from megamind_ray.errors import ClusterError

if TYPE_CHECKING:
    import torch

__all__ = ["ArenaSink", "MappingSink", "TensorSink"]


class ArenaSink:
    """Tensors in one allocation of an arena.

    Args:
        arena: The arena.
        allocation: Of it; the caller sees to it that it stays.
        offsets: First byte of each tensor in the allocation.
        leased: Whether what is being written to holds a lease, also after ``close``.
    """

    def __init__(
        self, arena: Arena, allocation: Allocation, offsets: Mapping[int, int], *, leased: bool = False
    ) -> None:
        self._arena = arena
        self._allocation = allocation
        self._bytes = arena.leased_bytes(allocation) if leased else arena.host_bytes(allocation)
        self._offsets = offsets
        self._closed = False

    def close(self) -> None:
        """Nobody gets the bytes to write to from here any more; who has them keeps the lease until the end."""
        self._closed = True
        self._bytes = None

    def host(self, tensor: int) -> tuple[Bytes, int] | None:
        data = self._bytes
        self._require_open()
        return None if data is None else (data, self._offsets[tensor])

    def write(self, tensor: int, dst: Runs, src: Bytes) -> WriteTicket | None:
        self._require_open()
        return self._arena.write(self._allocation, dst.moved(self._offsets[tensor]), src)

    def _require_open(self) -> None:
        if self._closed:
            raise ClusterError("the load that this belongs to has ended; nothing more is written for it")

    def checksum(self, tensor: int, dst: Runs) -> int | None:
        """CRC-32 of contiguous runs in place, or None where the host cannot see them."""
        return self._arena.checksum(self._allocation, self._offsets[tensor] + dst.offset, dst.nbytes)


class MappingSink:
    """Tensors in one host buffer.

    Args:
        buffer: The buffer.
        offsets: First byte of each tensor in it.
    """

    def __init__(self, buffer: Bytes, offsets: Sequence[int]) -> None:
        self._buffer = buffer
        self._offsets = offsets

    def host(self, tensor: int) -> tuple[Bytes, int]:
        return self._buffer, self._offsets[tensor]

    def write(self, tensor: int, dst: Runs, src: Bytes) -> None:
        copy_runs(src, dst.packed(), self._buffer, dst.moved(self._offsets[tensor]))


class TensorSink:
    """Tensors of torch, each with memory of its own: on the host, or on CUDA devices.

    Args:
        tensors: Contiguous; their values are overwritten behind autograd's back.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        import torch

        self._flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
        self._host = [_host_bytes(flat) for flat in self._flat]
        devices = {flat.device for flat in self._flat if flat.device.type == "cuda"}
        self._engines = {device: copy_engine(device) for device in devices}
        for engine in self._engines.values():
            engine.follow_current()

    def host(self, tensor: int) -> tuple[Bytes, int] | None:
        data = self._host[tensor]
        return None if data is None else (data, 0)

    def write(self, tensor: int, dst: Runs, src: Bytes) -> WriteTicket | None:
        flat = self._flat[tensor]
        return self._engines[flat.device].to_device(flat, dst, src)


def _host_bytes(flat: torch.Tensor) -> Bytes | None:
    if flat.device.type != "cpu":
        return None
    data: Bytes = np.asarray(flat.numpy())
    return data
