"""The limit: the same bytes by the simplest parallel code, a few threads that bring pieces into one buffer.

No loader has to be slower than that by more than its bookkeeping. Which piece, how many threads, ``preadv`` past the
page cache or through it, and huge pages or not is fastest depends on the machine and the setting, so a few are tried
and the best one counts.

Copying from a mapping of the files is shown beside it, and is not the limit: a file that becomes shorter, or a disk
that fails, kills the process in the middle of the copy (SIGBUS), where a read is an error that can be dealt with.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from benchmarks._checkpoint import Checkpoint

__all__ = ["MAPPED", "READS", "FlatBuffer", "Variant", "Way", "calibrate", "read_flat"]

_ALIGNMENT_BYTES = 2 << 20  # of each file in the buffer: more than O_DIRECT asks for, and a huge page
_TOUCH_BYTES = 4096
_FINALISTS = 3
Way = Literal["direct", "buffered", "mapped"]
READS: tuple[Way, ...] = ("direct", "buffered")
MAPPED: tuple[Way, ...] = ("mapped",)
_Reader = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to read.

    Attributes:
        threads: Reads in flight.
        piece_bytes: Of one read.
        way: ``direct`` is ``preadv`` past the page cache, ``buffered`` is ``preadv`` through it, ``mapped`` copies
            from a mapping of the file.
        huge_pages: Whether huge pages are asked for; without meaning where memory is there already.
    """

    threads: int
    piece_bytes: int
    way: Way
    huge_pages: bool

    def __str__(self) -> str:
        return (
            f"{self.threads} threads x {self.piece_bytes >> 20} MiB, {self.way}, "
            f"{'huge' if self.huge_pages else 'small'} pages"
        )


class FlatBuffer:
    """Fresh anonymous memory with room for whole files, one after the other.

    Args:
        checkpoint: Whose files.
        huge_pages: Ask for them.
    """

    def __init__(self, checkpoint: Checkpoint, *, huge_pages: bool) -> None:
        self.checkpoint = checkpoint
        sizes = [path.stat().st_size for path in checkpoint.files]
        rounded = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
        mapping = mmap.mmap(-1, sum(rounded) + _ALIGNMENT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The system's own choice may be huge pages anyway, so both ways are asked for.
        mapping.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        data = np.frombuffer(mapping, np.uint8)
        skip = -data.ctypes.data % _ALIGNMENT_BYTES
        begins = [skip + begin for begin in itertools.accumulate(rounded[:-1], initial=0)]
        self.files = [data[begin : begin + size] for begin, size in zip(begins, rounded, strict=True)]
        self.sizes = sizes

    def touch(self) -> None:
        """Takes all pages from the system, so that the memory was used before."""
        for file in self.files:
            file[::_TOUCH_BYTES] = 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors as views."""
        return {
            place.name: torch.from_numpy(self.files[place.file][place.begin : place.end])
            .view(place.dtype)
            .reshape(place.shape)
            for place in self.checkpoint.places
        }


def read_flat(buffer: FlatBuffer, variant: Variant) -> None:
    """Reads all files of the buffer's checkpoint into it.

    Raises:
        OSError: A read failed or came short.
    """
    step = variant.piece_bytes
    pieces = iter([(file, begin) for file, size in enumerate(buffer.sizes) for begin in range(0, size, step)])
    lock, errors = threading.Lock(), list[OSError]()

    def work(read: _Reader) -> None:
        while not errors:
            with lock:
                file, begin = next(pieces, (-1, 0))
            if file < 0:
                return
            try:
                read(file, begin, min(begin + step, buffer.sizes[file]))
            except OSError as error:
                errors.append(error)

    with (_mapped if variant.way == "mapped" else _opened)(buffer, variant.way) as read:
        threads = [threading.Thread(target=work, args=(read,)) for _ in range(variant.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _opened(buffer: FlatBuffer, way: Way) -> Iterator[_Reader]:
    with contextlib.ExitStack() as stack:
        descriptors = []
        for path in buffer.checkpoint.files:
            descriptors.append(os.open(path, os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0)))
            stack.callback(os.close, descriptors[-1])

        def read(file: int, begin: int, end: int) -> None:
            while begin < end:
                # A direct read takes whole blocks: the last one of a file is asked for in full and comes short.
                room = -(-(end - begin) // _TOUCH_BYTES) * _TOUCH_BYTES
                count = os.preadv(descriptors[file], [memoryview(buffer.files[file][begin : begin + room])], begin)
                if count == 0:
                    path = buffer.checkpoint.files[file]
                    raise OSError(f"{path} ends at {begin}, {end} expected: it changed while it was read")
                begin += count

        yield read


@contextlib.contextmanager
def _mapped(buffer: FlatBuffer, way: Way) -> Iterator[_Reader]:
    assert way == "mapped", way
    sources = [np.memmap(path, np.uint8, "r") for path in buffer.checkpoint.files]

    def read(file: int, begin: int, end: int) -> None:
        np.copyto(buffer.files[file][begin:end], sources[file][begin:end])

    yield read


def calibrate(
    seconds: Callable[[Variant], float], *, ways: tuple[Way, ...] = READS, fresh: bool, quick: bool
) -> Variant:
    """Finds the fastest variant: one knob after the other, then the best ones again.

    Args:
        seconds: Measures one; ``OSError`` says that it cannot be run here.
        ways: To choose from.
        fresh: Whether memory is fresh, so that the kind of pages matters.
        quick: Try ways and few threads alone.
    """
    measured: dict[Variant, list[float]] = {}

    def measure(variant: Variant) -> None:
        if variant not in measured:
            # Not every file system knows O_DIRECT.
            with contextlib.suppress(*([OSError] if variant.way == "direct" else [])):
                measured[variant] = [seconds(variant)]

    def best() -> Variant:
        return min(measured, key=lambda variant: min(measured[variant]))

    for way, threads in itertools.product(ways, (2, 8) if quick else (2, 4, 8)):
        measure(Variant(threads=threads, piece_bytes=8 << 20, way=way, huge_pages=True))
    if not quick:
        for piece_bytes in (1 << 20, 32 << 20):
            measure(replace(best(), piece_bytes=piece_bytes))
        if fresh:
            measure(replace(best(), huge_pages=False))
    finalists = sorted(measured, key=lambda variant: min(measured[variant]))[:_FINALISTS]
    for variant in finalists:
        measured[variant].append(seconds(variant))
    return best()
