"""A checkpoint's own tensors, by their names on disk, in memory that this process owns."""

from __future__ import annotations

import mmap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from megamind_ray.config import Config
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.program import View
from megamind_ray.core.tensor import TensorInfo
from megamind_ray.device.arena import Arena, host_buffer
from megamind_ray.device.copy_engines import copy_engine
from megamind_ray.device.dtypes import torch_layout
from megamind_ray.device.empty import empty_tensor
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.direct import Sink
from megamind_ray.engine.extent_reader import SourceOpener
from megamind_ray.engine.sinks import ArenaSink, MappingSink, TensorSink
from megamind_ray.engine.slice_reads import ReadSummary, read_slices, whole_tensors
from megamind_ray.errors import RequestError
from megamind_ray.io.local_source import DIRECT_ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch

__all__ = ["LoadedTensors", "check_device", "load_tensors"]

# An element may not lie across the borders of its own size.
_ELEMENT_ALIGNMENT_BYTES: Final = 64


_Read = Callable[[Sink, Callable[[int], Bytes]], ReadSummary]
"""Reads what was asked for into a sink, with staging buffers of that make."""


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
    device: str | int | torch.device,
    config: Config,
    *,
    arena: Arena | None = None,
    raw: bool = False,
    opener: SourceOpener | None = None,
) -> LoadedTensors:
    """Reads whole tensors.

    On the host all share one mapping, which lives as long as one of them does; each has a storage of its own all the
    same, so saving one writes one. On a GPU each has an allocation of its own. In an arena they share an allocation,
    which is given back with the last of them.

    Args:
        manifest: The checkpoint.
        infos: Which of its tensors.
        device: ``cpu``, ``cuda``, ``cuda:N``, or whatever else torch can copy to, as ``check_device`` has it.
        config: Sizes, threads, retries.
        arena: Where to, instead of fresh memory; its device is the tensors'.
        raw: Give dtypes that torch lacks as packed ``uint8``.
        opener: Opens files; by default ``io.open_source`` with the settings of ``config``.

    Raises:
        RequestError: Torch lacks a dtype and ``raw`` is off, or it has no such device.
        CapacityError: The arena has no room, or the device no memory.
        IntegrityError, SourceError: Bytes are wrong, or cannot be read.
    """
    target = check_device(device)
    layouts = [torch_layout(info.name, info.dtype, info.shape, raw=raw) for info in infos]
    slices = whole_tensors(infos)

    def read(sink: Sink, make_buffer: Callable[[int], Bytes]) -> ReadSummary:
        return read_slices(manifest, slices, sink, config, opener=opener, make_buffer=make_buffer)

    if arena is not None:
        tensors, summary = _read_into_arena(infos, arena, config, read)
        return LoadedTensors(tensors=tensors, summary=summary)
    flats, summary = (_read_to_gpu if target.type == "cuda" else _read_to_host)(infos, target, config, read)
    tensors = {
        info.name: flat.view(dtype).view(shape).to(target)
        for info, flat, (dtype, shape) in zip(infos, flats, layouts, strict=True)
    }
    return LoadedTensors(tensors=tensors, summary=summary)


def _read_into_arena(
    infos: Sequence[TensorInfo], arena: Arena, config: Config, read: _Read
) -> tuple[dict[str, torch.Tensor], ReadSummary]:
    nbytes, offsets = _lay_out(infos, config.io.max_gap_bytes)
    allocation = arena.allocate(nbytes, mmap.PAGESIZE)
    sink = ArenaSink(arena, allocation, dict(enumerate(offsets)), leased=True)
    try:
        with arena.lease(allocation):
            summary = read(sink, arena.staging)
            views = [
                View(
                    name=info.name,
                    tensor=index,
                    dtype=info.dtype,
                    shape=info.shape,
                    offset=offset,
                    nbytes=info.nbytes,
                )
                for index, (info, offset) in enumerate(zip(infos, offsets, strict=True))
            ]
            return {view.name: arena.tensor(allocation, view) for view in views}, summary
    except BaseException as error:
        _forget_frames(error)
        raise
    finally:
        # Threads that an interrupt did not wait for hold leases of their own: nobody gets this memory before they end.
        sink.close()
        arena.free_when_unused(allocation)


def _forget_frames(error: BaseException) -> None:
    """Frames of an error that somebody keeps would keep the memory that was written to."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def _read_to_host(
    infos: Sequence[TensorInfo],
    target: torch.device,  # noqa: ARG001 - as _read_to_gpu
    config: Config,
    read: _Read,
) -> tuple[list[torch.Tensor], ReadSummary]:
    nbytes, offsets = _lay_out(infos, config.io.max_gap_bytes)
    buffer = host_buffer(nbytes)
    summary = read(MappingSink(buffer, offsets), host_buffer)
    places = zip(infos, offsets, strict=True)
    return [_own_storage(buffer[offset : offset + info.nbytes]) for info, offset in places], summary


def _read_to_gpu(
    infos: Sequence[TensorInfo],
    target: torch.device,
    config: Config,  # noqa: ARG001 - as _read_to_host
    read: _Read,
) -> tuple[list[torch.Tensor], ReadSummary]:
    import torch

    flats = [empty_tensor((info.nbytes,), torch.uint8, target) for info in infos]
    return flats, read(TensorSink(flats), copy_engine(target).staging)


def check_device(device: str | int | torch.device) -> torch.device:
    """The device, once it is known that this process can use it.

    Args:
        device: As torch takes it: a name, a ``torch.device``, or the index of a CUDA device.

    Raises:
        RequestError: Torch does not know it, or has no such device.
    """
    import torch

    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)) or device == "":
        raise RequestError(
            f"device={device!r:.80}: give 'cpu', 'cuda:0', a torch.device, or the index of a CUDA device"
        )
    named = f"cuda:{device}" if isinstance(device, int) else device
    try:
        found = torch.device(named)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises an AssertionError
        reason = str(error).splitlines()[0]
        raise RequestError(
            f"device {str(named)!r} cannot be used ({reason}); take 'cpu', or a device of torch's"
        ) from error
    if found.type == "meta":
        raise RequestError("device 'meta' holds no bytes; take 'cpu', or a device of torch's")
    if str(found) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _lay_out(infos: Sequence[TensorInfo], max_gap_bytes: int) -> tuple[int, list[int]]:
    """Size of the memory for the tensors, and the offset of each in it.

    They lie as in the file, wide gaps left out and elements aligned, and as far from the borders of blocks as there:
    so chunks are read into place as they are, also past the page cache.
    """
    offsets = [0] * len(infos)
    end, shift, last = 0, 0, None
    for index in sorted(range(len(infos)), key=lambda row: (infos[row].file, infos[row].begin, infos[row].end)):
        info = infos[index]
        if last is None or last.file != info.file or info.begin - last.end > max_gap_bytes:
            shift = _round_up(end - info.begin, DIRECT_ALIGNMENT_BYTES)
        offset = info.begin + shift
        itemsize = max(1, info.dtype.bits // 8)
        if offset % itemsize:  # a file whose offsets are not aligned: torch could not use them
            offset = _round_up(end, _ELEMENT_ALIGNMENT_BYTES)
            shift = offset - info.begin
        offsets[index] = offset
        end, last = offset + info.nbytes, info
    return end, offsets


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _own_storage(data: Bytes) -> torch.Tensor:
    import torch

    # from_numpy makes a storage of exactly these bytes and keeps the array, which keeps the mapping.
    return torch.from_numpy(data) if data.nbytes else torch.empty(0, dtype=torch.uint8)
