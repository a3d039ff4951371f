"""Reading extents straight to where their bytes belong: one rank, or one process, needs them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np

from megamind_ray.core.report import Verified
from megamind_ray.device.arena import WriteTicket
from megamind_ray.device.strided import Bytes, Runs, copy_runs
from megamind_ray.engine.cut import Move
from megamind_ray.engine.extent_reader import ExtentReader

__all__ = ["Sink", "read_to_sink"]


class Sink(Protocol):
    """Where the bytes of tensors go. Thread-safe for disjoint ranges."""

    def host(self, tensor: int) -> tuple[Bytes, int] | None:
        """A buffer that the host can write to and the offset of the tensor's first byte in it, or None."""

    def write(self, tensor: int, dst: Runs, src: Bytes) -> WriteTicket | None:
        """Copies packed bytes to runs of a tensor; used where ``host`` gives None."""


@dataclass(frozen=True, slots=True)
class _Straight:
    """A range of the file whose bytes lie in one buffer in the same order."""

    begin: int
    end: int
    buffer: Bytes
    shift: int  # offset in the buffer less offset in the file


def read_to_sink(
    reader: ExtentReader, sink: Sink, file: int, begin: int, end: int, segments: Sequence[Move]
) -> Verified:
    """Reads one extent and puts its segments in place.

    Chunks whose bytes stay in order are read straight into place; all others pass through a staging buffer. Whether
    the file changed is for the caller to check, with the reader's ``check_unchanged``, before the tensors are used.

    Args:
        reader: Of the extent's file.
        sink: Where the tensors are.
        file: File id.
        begin: First byte of the extent.
        end: One past its last.
        segments: Of the extent's blocks, all of them.

    Raises:
        IntegrityError, SourceError: As the reader's.
    """
    straight = _straight_ranges(sink, segments)
    whole = _whole(straight, begin, end, segments)
    if whole is not None:  # the usual case: one look instead of one per chunk
        return reader.read_into(file, begin, end, whole.buffer[begin + whole.shift : end + whole.shift])
    verified: Verified = "reference"
    for _, group in groupby(_choices(reader, file, begin, end, segments, straight), lambda it: id(it[2])):
        pieces = list(group)
        place = pieces[0][2]
        if place is not None:
            first, last = pieces[0][0], pieces[-1][1]
            target = place.buffer[first + place.shift : last + place.shift]
            verified = _weaker(verified, reader.read_into(file, first, last, target))
        else:
            staged_begin, staged_end = pieces[0][0], pieces[-1][1]
            with reader.staged(file, staged_begin, staged_end) as extent:
                _scatter(sink, extent.data, staged_begin, staged_end, segments)
                verified = _weaker(verified, extent.verified)
    return verified


def _weaker(left: Verified, right: Verified) -> Verified:
    return left if right == "reference" else right


def _straight_ranges(sink: Sink, segments: Sequence[Move]) -> list[_Straight]:
    """Contiguous segments, merged where they go on both in the file and in the buffer; ascending."""
    ranges: list[_Straight] = []
    for segment in sorted(segments, key=lambda it: it.src.offset):
        place = sink.host(segment.tensor)
        if place is None or not (segment.src.contiguous and segment.dst.contiguous) or not segment.nbytes:
            continue
        buffer, offset = place
        begin, shift = segment.src.offset, offset + segment.dst.offset - segment.src.offset
        last = ranges[-1] if ranges else None
        if last is not None and last.buffer is buffer and last.shift == shift and last.end == begin:
            ranges[-1] = _Straight(last.begin, begin + segment.nbytes, buffer, shift)
        else:
            ranges.append(_Straight(begin, begin + segment.nbytes, buffer, shift))
    return ranges


def _whole(straight: list[_Straight], begin: int, end: int, segments: Sequence[Move]) -> _Straight | None:
    """The range that takes a whole extent, if there is one and each byte is needed once."""
    num_needed = sum(segment.nbytes for segment in segments)
    if len(straight) != 1 or num_needed != end - begin or (straight[0].begin, straight[0].end) != (begin, end):
        return None
    return straight[0]


def _choices(
    reader: ExtentReader, file: int, begin: int, end: int, segments: Sequence[Move], straight: list[_Straight]
) -> Iterator[tuple[int, int, _Straight | None]]:
    """The chunks of an extent, each with the range that takes it whole; None where it must be staged."""
    demands = np.array([(it.src.offset, it.src.end) for it in segments], np.int64).reshape(-1, 2)
    for piece_begin, piece_end in reader.pieces(file, begin, end):
        place = next((it for it in straight if it.begin <= piece_begin and piece_end <= it.end), None)
        if place is not None:
            # Bytes that are needed twice (one tensor under two names, each with memory of its own) are staged.
            touching = (demands[:, 0] < piece_end) & (demands[:, 1] > piece_begin)
            clipped = np.minimum(demands[touching, 1], piece_end) - np.maximum(demands[touching, 0], piece_begin)
            if int(clipped.sum()) != piece_end - piece_begin:
                place = None
        yield piece_begin, piece_end, place


def _scatter(sink: Sink, data: Bytes, begin: int, end: int, segments: Sequence[Move]) -> None:
    """Puts what ``[begin, end)`` of the file has of the segments in place."""
    with ExitStack() as under_way:  # whatever happens, nobody gets the staging buffer before the device is done with it
        for segment in segments:
            clipped = _clip(segment, begin, end)
            if clipped is None:
                continue
            src, dst = clipped
            here = src.moved(-begin)
            place = sink.host(segment.tensor)
            if place is not None:
                buffer, offset = place
                copy_runs(data, here, buffer, dst.moved(offset))
                continue
            packed = data[here.offset : here.end]
            if not here.contiguous:
                packed = np.empty(here.nbytes, np.uint8)
                copy_runs(data, here, packed, here.packed())
            ticket = sink.write(segment.tensor, dst, packed)
            if ticket is not None:
                under_way.callback(ticket.wait)


def _clip(segment: Move, begin: int, end: int) -> tuple[Runs, Runs] | None:
    """The part of a segment in ``[begin, end)``; only contiguous ones ever lie across its borders."""
    src, dst = segment.src, segment.dst
    if src.end <= begin or end <= src.offset:
        return None
    if begin <= src.offset and src.end <= end:
        return src, dst
    whole = src.contiguous and dst.contiguous
    assert whole, f"{segment} would be cut at [{begin}, {end})"
    first, last = max(src.offset, begin), min(src.end, end)
    skipped, nbytes = first - src.offset, last - first
    return Runs(first, nbytes, 1, nbytes), Runs(dst.offset + skipped, nbytes, 1, nbytes)
