"""An arena in the memory of a CUDA device. Small on purpose; its tests are marked ``gpu``.

Not yet run on a GPU: the machine it was written on has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamind_ray.device.arena import POISON, Allocation, ArenaLedger, LedgerArena, WriteTicket
from megamind_ray.device.lease import Lease
from megamind_ray.device.memory import cuda_memory
from megamind_ray.device.strided import Bytes, Runs
from megamind_ray.errors import CapacityError
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["CudaArena", "copy_stream", "copy_to_device", "pinned_buffer"]


class CudaArena(LedgerArena):
    """An arena on a GPU: one ``torch`` allocation, filled on a copy stream of its own.

    Args:
        budget_bytes: Size.
        device: ``cuda`` or ``cuda:N``.
        poison: Test mode: freed memory is filled with ``POISON``.

    Raises:
        RequestError: There is no such device.
        CapacityError: It has less memory free.
    """

    def __init__(self, budget_bytes: int, *, device: str = "cuda:0", poison: bool = False) -> None:
        import torch

        self._device = torch.device("cuda", torch.device(device).index or 0)
        free_bytes = cuda_memory(self._device.index).free_bytes
        where = f"arena on {self._device}"
        try:
            self._bytes = torch.empty(budget_bytes, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(
                f"{where}: a budget of {format_bytes(budget_bytes)} does not fit, {format_bytes(free_bytes)} are free; "
                "lower the budget, or end what else runs on the GPU",
                where=where,
                needed_bytes=budget_bytes,
                free_bytes=free_bytes,
            ) from error
        super().__init__(ArenaLedger(where, budget_bytes))
        self._stream = copy_stream(self._device)
        self._poison = poison

    @property
    def device(self) -> str:
        return str(self._device)

    def host_bytes(self, allocation: Allocation) -> None:  # noqa: ARG002
        return None

    def staging(self, nbytes: int) -> Bytes:
        return pinned_buffer(nbytes)

    def write(self, allocation: Allocation, dst: Runs, src: Bytes) -> WriteTicket | None:
        return copy_to_device(self._bytes, dst.moved(allocation.offset), src, self._stream)

    def checksum(self, allocation: Allocation, offset: int, nbytes: int) -> int | None:  # noqa: ARG002
        return None

    def _leased(self, begin: int, end: int, lease: Lease) -> torch.Tensor:
        import torch

        return torch.as_tensor(_LeasedDeviceBytes(self._bytes[begin:end], lease), device=self._device)

    def _wipe(self, allocation: Allocation) -> None:
        import torch

        if self._poison:
            with torch.cuda.stream(self._stream):
                self._bytes[allocation.offset : allocation.offset + allocation.nbytes].fill_(POISON)
            self._stream.synchronize()


def pinned_buffer(nbytes: int) -> Bytes:
    """Page-locked host memory, from which the copy engines read at full speed while the host goes on."""
    import torch

    pinned: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return pinned


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for copies to memory that was just allocated on the current stream."""
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # The allocator may hand out memory that work queued earlier still writes to.
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def copy_to_device(flat: torch.Tensor, dst: Runs, src: Bytes, stream: torch.cuda.Stream) -> WriteTicket | None:
    """Copies packed host bytes to runs of device memory, on a stream.

    Args:
        flat: ``uint8 [n]`` on the device.
        dst: Runs in ``flat``.
        src: As many bytes as the runs have, contiguous.
        stream: Where the copy is queued.

    Returns:
        A ticket; ``src`` must stay as it is until its ``wait`` returns.
    """
    import torch

    if not dst.nbytes:
        return None
    source = torch.from_numpy(np.asarray(_Exported(src)))
    with torch.cuda.stream(stream):
        if dst.contiguous:
            flat[dst.offset : dst.offset + dst.nbytes].copy_(source, non_blocking=True)
        else:
            # One flat copy over the bus, then the device spreads the runs at its own memory's speed.
            packed = source.to(flat.device, non_blocking=True).view(dst.num_runs, dst.run_bytes)
            runs = flat.as_strided(
                (dst.num_runs, dst.run_bytes), (dst.stride_bytes, 1), flat.storage_offset() + dst.offset
            )
            runs.copy_(packed)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return _EventTicket(event, src)


class _EventTicket:
    """Waits for an event of the copy stream, and keeps the source alive until then."""

    def __init__(self, event: torch.cuda.Event, src: Bytes) -> None:
        self._event = event
        self._src: Bytes | None = src

    def wait(self) -> None:
        self._event.synchronize()
        self._src = None


class _Exported:
    """A read-only array that torch takes without a warning: it is only copied from."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface = dict(self._data.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        return interface


class _LeasedDeviceBytes:
    """Exports device bytes; the storage that torch makes of them keeps this object, and it the lease."""

    def __init__(self, data: torch.Tensor, lease: Lease) -> None:
        self.data = data
        self.lease = lease

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": tuple(self.data.shape),
            "typestr": "|u1",
            "data": (self.data.data_ptr(), False),
            "strides": None,
            "version": 2,
        }
