"""An arena in the memory of a CUDA device. Small on purpose; its tests are marked ``gpu``.

Not yet run on a GPU: the machine it was written on has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megamind_ray.device.arena import POISON, Allocation, ArenaLedger, LedgerArena, WriteTicket
from megamind_ray.device.copy_engine import CopyEngine
from megamind_ray.device.copy_engines import copy_engine
from megamind_ray.device.lease import Lease
from megamind_ray.device.memory import cuda_memory
from megamind_ray.device.strided import Bytes, Runs
from megamind_ray.errors import CapacityError
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["CudaArena"]


class CudaArena(LedgerArena):
    """An arena on a GPU: one ``torch`` allocation, filled by the device's copy engine.

    Memory that was given back is written again only after the work that was queued by then on the current stream of the
    thread that gave it back. Who used it on other streams waits for those first.

    Args:
        budget_bytes: Size.
        device: ``cuda`` or ``cuda:N``.
        poison: Test mode: freed memory is filled with ``POISON``.
        engine: Copies; by default the one that all of the process uses for the device.
        make_room: What its user can do for room, for messages.

    Raises:
        RequestError: There is no such device.
        CapacityError: It has less memory free.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        device: str = "cuda:0",
        poison: bool = False,
        engine: CopyEngine | None = None,
        make_room: str | None = None,
    ) -> None:
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
        super().__init__(ArenaLedger(where, budget_bytes, make_room) if make_room else ArenaLedger(where, budget_bytes))
        self._engine = copy_engine(self._device) if engine is None else engine
        self._engine.follow_current()
        self._poison = poison

    @property
    def device(self) -> str:
        return str(self._device)

    def host_bytes(self, allocation: Allocation) -> None:  # noqa: ARG002
        return None

    def staging(self, nbytes: int) -> Bytes:
        return self._engine.staging(nbytes)

    def write(self, allocation: Allocation, dst: Runs, src: Bytes) -> WriteTicket | None:
        return self._engine.to_device(self._bytes, dst.moved(allocation.offset), src)

    def checksum(self, allocation: Allocation, offset: int, nbytes: int) -> int | None:  # noqa: ARG002
        return None

    def _leased(self, begin: int, end: int, lease: Lease) -> torch.Tensor:
        import torch

        return torch.as_tensor(_LeasedDeviceBytes(self._bytes[begin:end], lease), device=self._device)

    def _wipe(self, allocation: Allocation) -> None:
        # Kernels that were queued while the leases were out may still read.
        self._engine.follow_current()
        if self._poison and allocation.nbytes:
            end = allocation.offset + allocation.nbytes
            self._engine.fill(self._bytes[allocation.offset : end], POISON).wait()


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
