"""A checkpoint's own tensors, by their names on disk, in memory that this process owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from megamind_ray.config import Config
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.tensor import TensorInfo
from megamind_ray.device.arena import host_buffer
from megamind_ray.device.cuda import pinned_buffer
from megamind_ray.device.dtypes import torch_layout
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.extent_reader import SourceOpener
from megamind_ray.engine.sinks import MappingSink, TensorSink
from megamind_ray.engine.slice_reads import ReadSummary, SliceRows, read_slices, slice_table
from megamind_ray.errors import RequestError
from megamind_ray.planning.geometry import BoxRows

if TYPE_CHECKING:
    import torch

__all__ = ["LoadedTensors", "check_device", "load_tensors"]

# Tensors keep their place relative to multiples of this, so that chunks of a file are read into place as they are.
_ALIGNMENT_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTensors:
    """What a load gave.

    Attributes:
        tensors: By name on disk.
        summary: What was read for it.
    """

    tensors: dict[str, torch.Tensor]
    summary: ReadSummary


def load_tensors(
    manifest: Manifest,
    infos: Sequence[TensorInfo],
    device: str,
    config: Config,
    *,
    raw: bool = False,
    opener: SourceOpener | None = None,
) -> LoadedTensors:
    """Reads whole tensors.

    On the host all share one mapping, which lives as long as one of them does; each has a storage of its own all the
    same, so saving one writes one. On a GPU each has an allocation of its own.

    Args:
        manifest: The checkpoint.
        infos: Which of its tensors.
        device: ``cpu``, ``cuda``, ``cuda:N``, or whatever else torch can copy to.
        config: Sizes, threads, retries.
        raw: Give dtypes that torch lacks as packed ``uint8``.
        opener: Opens files; by default ``io.open_source`` with the settings of ``config``.

    Raises:
        RequestError: Torch lacks a dtype and ``raw`` is off, or it has no such device.
        IntegrityError, SourceError: Bytes are wrong, or cannot be read.
    """
    import torch

    target = check_device(device)
    layouts = [torch_layout(info.name, info.dtype, info.shape, raw=raw) for info in infos]
    slices = slice_table([SliceRows(info.file, index, _whole(info)) for index, info in enumerate(infos)])
    if target.type == "cuda":
        flats = [torch.empty(info.nbytes, dtype=torch.uint8, device=target) for info in infos]
        sink: TensorSink | MappingSink = TensorSink(flats)
        make_buffer: Callable[[int], Bytes] = pinned_buffer
    else:
        nbytes, offsets = _lay_out(infos, config.io.max_gap_bytes)
        buffer = host_buffer(nbytes)
        sink, make_buffer = MappingSink(buffer, offsets), host_buffer
        flats = [
            _own_storage(buffer[offset : offset + info.nbytes]) for info, offset in zip(infos, offsets, strict=True)
        ]
    summary = read_slices(manifest, slices, sink, config, opener=opener, make_buffer=make_buffer)
    tensors = {
        info.name: flat.view(dtype).view(shape).to(target)
        for info, flat, (dtype, shape) in zip(infos, flats, layouts, strict=True)
    }
    return LoadedTensors(tensors=tensors, summary=summary)


def check_device(device: str | torch.device) -> torch.device:
    """The device, once it is known that this process can use it.

    Raises:
        RequestError: Torch does not know it, or has no such device.
    """
    import torch

    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
        reason = str(error).splitlines()[0]
        raise RequestError(
            f"device {str(device)!r} cannot be used ({reason}); take 'cpu', or a device of torch's"
        ) from error
    if found.type == "meta":
        raise RequestError("device 'meta' holds no bytes; take 'cpu', or a device of torch's")
    return found


def _whole(info: TensorInfo) -> BoxRows:
    def one(value: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([value] if info.nbytes else [], np.int64)

    nbytes = one(info.nbytes)
    return BoxRows(one(info.begin), nbytes, one(1), nbytes, one(0), nbytes)


def _lay_out(infos: Sequence[TensorInfo], max_gap_bytes: int) -> tuple[int, list[int]]:
    """Size of the mapping, and the offset of each tensor: as in the file, wide gaps left out, elements aligned."""
    offsets = [0] * len(infos)
    end, shift, last = 0, 0, None
    for index in sorted(range(len(infos)), key=lambda row: (infos[row].file, infos[row].begin, infos[row].end)):
        info = infos[index]
        if last is None or last.file != info.file or info.begin - last.end > max_gap_bytes:
            shift = -(-(end - info.begin) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        offset = info.begin + shift
        itemsize = max(1, info.dtype.bits // 8)
        if offset % itemsize:  # a file whose offsets are not aligned: torch could not use them
            offset = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            shift = offset - info.begin
        offsets[index] = offset
        end, last = offset + info.nbytes, info
    return end, offsets


def _own_storage(data: Bytes) -> torch.Tensor:
    import torch

    # from_numpy makes a storage of exactly these bytes and keeps the array, which keeps the mapping.
    return torch.from_numpy(data) if data.nbytes else torch.empty(0, dtype=torch.uint8)
