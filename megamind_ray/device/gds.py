"""Reads of a local file straight into device memory: GPUDirect Storage, through kvikio (extra ``gds``).

Off unless called: bytes that never pass the host cannot be checked there while they stream. Who reads this way compares
``unpack.word_sum`` of what arrived with one that was recorded, or copies it back for a CRC-32
(docs/design/0013-cuda-path.md). Never run: neither on a GPU nor with kvikio.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from megamind_ray.device.waiting import wait_until
from megamind_ray.errors import ClusterError, RequestError, SourceError

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceFile", "DeviceRead", "available", "read_to_device"]

_DEADLINE_S: Final = 120.0


class DeviceRead(Protocol):
    """A read under way; kvikio's ``IOFuture``."""

    def done(self) -> bool:
        """Whether it ended."""

    def get(self) -> int:
        """Bytes read."""


class DeviceFile(Protocol):
    """An open file; kvikio's ``CuFile``."""

    def pread(self, buf: Any, size: int, file_offset: int) -> DeviceRead:
        """Begins to read to device memory that has ``__cuda_array_interface__``."""

    def close(self) -> None:
        """Closes it."""


def available() -> bool:
    """Whether kvikio is installed and torch sees a CUDA device.

    Where the file system or the driver lacks GPUDirect, kvikio reads through host memory instead: right, and slower.
    """
    if find_spec("kvikio") is None:
        return False
    import torch

    return torch.cuda.is_available()


def read_to_device(
    path: Path,
    offset: int,
    flat: torch.Tensor,
    *,
    deadline_s: float = _DEADLINE_S,
    open_file: Callable[[Path], DeviceFile] | None = None,
) -> None:
    """Fills device memory from a file, after the work that the current stream has now.

    Args:
        path: A local file.
        offset: First byte in the file; multiples of 4 KiB are fastest.
        flat: ``uint8 [n]``, contiguous: as many bytes are read.
        deadline_s: For the read, and for the work before it.
        open_file: Opens a file; by default kvikio does.

    Raises:
        RequestError: kvikio is not installed.
        SourceError: The file cannot be read, or ends too early.
        ClusterError: Device or file system did not answer in time; ``flat`` may be written to for as long as the
            process lives, and is kept.
    """
    assert flat.dim() == 1, flat.shape
    assert flat.is_contiguous()
    if not flat.numel():
        return
    opener = open_file or _kvikio_file
    _drain(flat, deadline_s)
    try:
        file = opener(path)
    except (OSError, RuntimeError) as error:
        raise SourceError(f"{path} cannot be opened for GPUDirect Storage: {error}", file=str(path)) from error
    try:
        reading = file.pread(flat, flat.numel(), offset)
        wait_until(reading.done, deadline_s=deadline_s, what=f"device {flat.device}: reading {path} at {offset}")
        num_bytes = reading.get()
    except (OSError, RuntimeError) as error:
        file.close()
        raise SourceError(f"{path}: reading at {offset} to {flat.device} failed: {error}", file=str(path)) from error
    except ClusterError:
        _STUCK.append((file, reading, flat))
        raise
    file.close()
    if num_bytes != flat.numel():
        raise SourceError(
            f"{path}: {num_bytes} of {flat.numel()} bytes at {offset} could be read; was the file cut short?",
            file=str(path),
        )


# Reads that never ended: whoever still writes must find the memory.
_STUCK: Final[list[tuple[DeviceFile, DeviceRead, Any]]] = []


def _drain(flat: torch.Tensor, deadline_s: float) -> None:
    """A read of a file is in no stream's order: what still uses the memory has to end first."""
    if flat.device.type != "cuda":
        return
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(flat.device))
    wait_until(event.query, deadline_s=deadline_s, what=f"device {flat.device}: the work before a read of a file")


def _kvikio_file(path: Path) -> DeviceFile:
    if find_spec("kvikio") is None:
        raise RequestError("GPUDirect Storage needs kvikio: pip install 'megamind-ray[gds]', or read without it")
    file: DeviceFile = import_module("kvikio").CuFile(path, "r")
    return file
