"""What is read to measure: a part of a checkpoint, into memory that is used again; or a temporary checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from megamind_ray.core.demands import SliceTable
from megamind_ray.core.manifest import Manifest
from megamind_ray.core.tensor import TensorInfo
from megamind_ray.device.arena import host_buffer
from megamind_ray.engine.sinks import MappingSink
from megamind_ray.engine.slice_reads import SliceRows, slice_table
from megamind_ray.engine.tune_stale import FILE_NAME, FOLDER_PREFIX, in_use
from megamind_ray.errors import CapacityError, MegamindError, RequestError
from megamind_ray.io.local_source import DIRECT_ALIGNMENT_BYTES
from megamind_ray.planning.geometry import BoxRows
from megamind_ray.units import MIB, format_bytes

__all__ = ["MIN_SAMPLE_BYTES", "Sample", "take_sample", "temporary_checkpoint"]

# A read of less says more about starting threads than about reading.
MIN_SAMPLE_BYTES: Final = 8 * MIB
# Tensors and pieces of the temporary checkpoint.
_TENSOR_BYTES: Final = 64 * MIB
# Room that a disk keeps, whatever is asked for.
_RESERVE_BYTES: Final = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A part of a checkpoint on this machine, and memory for it.

    Attributes:
        manifest: The checkpoint.
        slices: What is read, as ``read_slices`` takes it.
        sink: Where to.
        ranges: By path: the first byte and one past the last.
        nbytes: Of all slices.
    """

    manifest: Manifest
    slices: SliceTable
    sink: MappingSink
    ranges: dict[str, tuple[int, int]]
    nbytes: int


def take_sample(manifest: Manifest, num_bytes: int) -> Sample:
    """Takes the first ``num_bytes`` of a checkpoint's tensors; the last tensor may be cut.

    Raises:
        RequestError: There are less than ``MIN_SAMPLE_BYTES``.
    """
    rows: list[SliceRows] = []
    offsets: list[int] = []
    ranges: dict[str, tuple[int, int]] = {}
    left, memory_end, file_shift, file = num_bytes, 0, 0, -1
    for info in sorted(manifest.tensors.values(), key=lambda it: (it.file, it.begin)):
        taken = min(info.nbytes, left)
        if not taken:
            continue
        if info.file != file:
            # As far from a border in memory as in the file, as destinations of a load are: read into place.
            file, skew = info.file, info.begin % DIRECT_ALIGNMENT_BYTES
            file_shift = -(-memory_end // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES + skew - info.begin
        rows.append(SliceRows(info.file, len(offsets), _first_bytes(info, taken)))
        offsets.append(info.begin + file_shift)
        path = manifest.file_uri(info.file)
        ranges[path] = (ranges.get(path, (info.begin, 0))[0], info.begin + taken)
        left, memory_end = left - taken, info.begin + taken + file_shift
    nbytes = num_bytes - left
    if nbytes < MIN_SAMPLE_BYTES:
        raise RequestError(
            f"{manifest.uri}: {format_bytes(nbytes)} of tensors are too little to measure with, take a checkpoint (and "
            f"--bytes) of {format_bytes(MIN_SAMPLE_BYTES)} or more, or none: then a temporary one is written"
        )
    sink = MappingSink(host_buffer(memory_end), offsets)
    return Sample(manifest=manifest, slices=slice_table(rows), sink=sink, ranges=ranges, nbytes=nbytes)


def _first_bytes(info: TensorInfo, num_bytes: int) -> BoxRows:
    def one(value: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([value], np.int64)

    return BoxRows(one(info.begin), one(num_bytes), one(1), one(num_bytes), one(0), one(num_bytes))


@contextmanager
def temporary_checkpoint(
    folder: Path, num_bytes: int, *, deadline_s: float, clock: Callable[[], float], on_bytes: Callable[[int], None]
) -> Iterator[Path]:
    """Writes a checkpoint of random bytes, which is removed at the end, whatever the end is.

    Args:
        folder: Where; a folder of its own is made in it.
        num_bytes: Of all tensors; fewer where the disk is so slow that the deadline comes first.
        deadline_s: When to stop writing, as the clock counts.
        clock: Seconds.
        on_bytes: Told how many bytes are written.

    Yields:
        The file.

    Raises:
        CapacityError: It does not fit.
        RequestError: The folder cannot be written to.
    """
    _require_room(folder, num_bytes)
    try:
        home = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=folder))
    except OSError as error:
        raise RequestError(f"--dir {folder}: cannot be written to ({error.strerror}); take another folder") from error
    try:
        with in_use(home):
            path = home / FILE_NAME
            try:
                _write(path, num_bytes, deadline_s, clock, on_bytes)
            except OSError as error:
                raise MegamindError(
                    f"{path}: the temporary checkpoint cannot be written ({error.strerror}); take another --dir, or "
                    f"less than --bytes {format_bytes(num_bytes)}"
                ) from error
            yield path
    finally:
        shutil.rmtree(home)


def _require_room(folder: Path, num_bytes: int) -> None:
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise RequestError(f"--dir {folder}: {error.strerror}; name a folder that is there") from error
    if num_bytes + _RESERVE_BYTES > free_bytes:
        raise CapacityError(
            f"--dir {folder}: a temporary checkpoint of {format_bytes(num_bytes)} does not fit, "
            f"{format_bytes(free_bytes)} are free and {format_bytes(_RESERVE_BYTES)} stay so; take another folder, or "
            f"--bytes {max(0, free_bytes - _RESERVE_BYTES) // MIB}MiB",
            where=f"disk of {folder}",
            needed_bytes=num_bytes + _RESERVE_BYTES,
            free_bytes=free_bytes,
        )


def _write(
    path: Path, num_bytes: int, deadline_s: float, clock: Callable[[], float], on_bytes: Callable[[int], None]
) -> None:
    """Data first, header last: how much is written is known only at the end."""
    sizes = [min(_TENSOR_BYTES, num_bytes - begin) for begin in range(0, num_bytes, _TENSOR_BYTES)]
    # A whole header never fills a page, so that the data begins off its border, as in any checkpoint.
    header_bytes = len(_header(sizes, 0)) // 4096 * 4096 + 4096 - 64
    header_bytes += 4096 * (header_bytes < len(_header(sizes, 0)))
    random = np.random.default_rng()
    written: list[int] = []
    with path.open("wb", buffering=0) as file:
        file.seek(8 + header_bytes)
        for size in sizes:
            # Random: a file system that compresses or shares equal blocks would read less than it gives.
            data = memoryview(random.bytes(size))
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
            written.append(size)
            on_bytes(sum(written))
            if clock() >= deadline_s and sum(written) >= MIN_SAMPLE_BYTES:
                break
        file.seek(0)
        file.write(header_bytes.to_bytes(8, "little") + _header(written, header_bytes))
        os.fsync(file.fileno())


def _header(sizes: list[int], padded_bytes: int) -> bytes:
    entries: dict[str, object] = {}
    begin = 0
    for number, size in enumerate(sizes):
        name = f"tensor.{number}"
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [begin, begin + size]}
        begin += size
    return json.dumps(entries, separators=(",", ":")).encode().ljust(padded_bytes)
