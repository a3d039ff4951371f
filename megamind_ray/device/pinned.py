"""Page-locked host memory of exact size: mapped by us, registered with CUDA, given back when nobody looks at it.

Torch's own pinned allocator rounds up to a power of two and keeps what it once had; a ring of 12 MiB buffers would take
16 MiB each for as long as the process lives.

Not yet run on a GPU.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from megamind_ray.device.arena import host_buffer
from megamind_ray.device.strided import Bytes
from megamind_ray.units import format_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["ALREADY_REGISTERED", "LOCK_REMEDY", "NOT_SUPPORTED", "CudaHostRuntime", "HostRuntime", "pinned_buffer"]

# Numbers of CUDA's errors and flags (driver_types.h); torch has no names for them.
ALREADY_REGISTERED: Final = 712
NOT_SUPPORTED: Final = 801
_FLAG_READ_ONLY: Final = 8

LOCK_REMEDY: Final = (
    "raise the limit of locked memory (ulimit -l unlimited, in containers --ulimit memlock=-1) and make sure that the "
    "memory limit of the container has room"
)
_LOG: Final = logging.getLogger(__name__)


class HostRuntime(Protocol):
    """What is asked of the CUDA runtime for host memory. Any thread may call it."""

    def register(self, address: int, nbytes: int, *, read_only: bool) -> int:
        """Locks pages and makes them known to the device: 0, or the number of an error.

        Args:
            address: First byte, page-aligned.
            nbytes: Whole pages.
            read_only: The device will only read; needed where the pages are mapped so, refused by some devices.
        """

    def unregister(self, address: int) -> int:
        """Takes a registration back, by its first byte: 0, or the number of an error."""

    def describe(self, error: int) -> str:
        """An error in CUDA's words."""


class CudaHostRuntime:
    """The runtime that torch has loaded.

    Args:
        device: Whose context is used. A registration holds for all devices of the process; without this, a thread that
            chose no device would open a context on the first one, hundreds of MiB of its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int, *, read_only: bool) -> int:
        import torch

        with torch.cuda.device(self._device):
            flags = _FLAG_READ_ONLY if read_only else 0
            error = int(_cudart().cudaHostRegister(address, nbytes, flags))
        if error:
            self._absorb()
        return error

    def unregister(self, address: int) -> int:
        import torch

        with torch.cuda.device(self._device):
            error = int(_cudart().cudaHostUnregister(address))
        if error:
            self._absorb()
        return error

    def describe(self, error: int) -> str:
        runtime = _cudart()
        return f"{runtime.cudaGetErrorString(runtime.cudaError(error))} (CUDA error {error})"

    def _absorb(self) -> None:
        """A failed call leaves its error pending in its thread, and torch raises it from the next kernel's check."""
        import torch

        one = torch.empty(1, dtype=torch.uint8, device=self._device)
        with suppress(RuntimeError):
            one.fill_(0)
        one.fill_(0)  # what this one raises is wrong with the device


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def pinned_buffer(nbytes: int, runtime: HostRuntime) -> Bytes:
    """Page-locked memory, from which the copy engines read at full speed while the host goes on.

    Memory that cannot be locked is given as it is, with a warning in the log: copies from it are slower, and right.

    Args:
        nbytes: Size; rounded up to whole pages, not further.
        runtime: Registers it.
    """
    buffer = host_buffer(nbytes)
    if not nbytes:
        return buffer
    address, locked_bytes = buffer.ctypes.data, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    error = runtime.register(address, locked_bytes, read_only=False)
    if error:
        _LOG.warning(
            "a staging buffer of %s could not be page-locked: %s; copies from it are slower; %s, or lower "
            "io.extent_bytes or io.read_threads",
            format_bytes(locked_bytes),
            runtime.describe(error),
            LOCK_REMEDY,
        )
        return buffer
    # Slices and torch storages keep this array, and it the mapping: finalizers run before that goes.
    finalizer = weakref.finalize(buffer, _unregister, runtime, address, locked_bytes)
    finalizer.atexit = False  # the process's end gives everything back, and the runtime may be gone by then
    return buffer


def _unregister(runtime: HostRuntime, address: int, nbytes: int) -> None:
    error = runtime.unregister(address)
    if error:
        _LOG.warning(
            "a staging buffer of %s stays page-locked: %s; it comes back when the process ends",
            format_bytes(nbytes),
            runtime.describe(error),
        )
