"""One chunk, from wherever it can be had right: read, checked, read again, taken from a mirror (docs/design/0012)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megamind_ray.config import RetryConfig
from megamind_ray.core.program import FileTable
from megamind_ray.core.report import Fault
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.file_sources import OWN, FileSources
from megamind_ray.errors import IntegrityError, MegamindError, RequestError, SourceError, listed
from megamind_ray.io.checksum import crc32
from megamind_ray.io.counters import ReadCounters, ReadKind
from megamind_ray.io.retry import read_with_retry
from megamind_ray.io.source import Source
from megamind_ray.io.stop import StopSignal

__all__ = ["ChunkReader", "LongRead", "tensors_in"]

_REMEDY = (
    "get the file anew from where it came from, name another copy to read such ranges from (io.mirrors, --mirror), or "
    "record the checksums again if it was changed on purpose"
)


@dataclass(frozen=True, slots=True)
class LongRead:
    """What a read of several chunks was for one of them.

    Attributes:
        failed: It brought nothing.
        crc32: Of the bytes that came; None where there is nothing to hold them to.
    """

    failed: bool = False
    crc32: int | None = None


@dataclass(slots=True)
class _Piece:
    """A chunk that is wanted, or part of one, and what came of it so far.

    Attributes:
        file, begin, end: Which bytes.
        stop: Whether they are wanted still.
        counters: What was asked of storage for it.
        kind: What the next read counts as.
        num_reads: Reads of the checkpoint's own file before those that are made for this piece alone.
        found: CRC-32 that such a read brought, which is not the right one.
        told_bytes: Of those that were read again, how many are in faults that were noted.
        failures: By base, why its bytes could not be used.
    """

    file: int
    begin: int
    end: int
    stop: StopSignal
    counters: ReadCounters
    kind: ReadKind = ReadKind.PAYLOAD
    num_reads: int = 0
    found: int | None = None
    told_bytes: int = 0
    failures: dict[int, MegamindError] = field(default_factory=dict)

    def tell(self, num_bytes: int | None = None) -> int:
        """How many bytes a fault is to say were read again because of it: so many, or all that none has told yet."""
        told = self.counters.retried_bytes - self.told_bytes if num_bytes is None else num_bytes
        self.told_bytes += told
        return told


class ChunkReader:
    """Reads chunks so that wrong bytes are never handed over where a checksum could tell. Thread-safe.

    Args:
        files: What to read from, and the checksums to hold it to.
        sources: Where to read it.
        retry: Bounds.
        counters: Where reads are counted.
        note: Takes what went wrong and was dealt with.
    """

    def __init__(
        self,
        files: FileTable,
        sources: FileSources,
        retry: RetryConfig,
        *,
        counters: ReadCounters,
        note: Callable[[Fault], None],
    ) -> None:
        self._files = files
        self._sources = sources
        self._retry = retry
        self._counters = counters
        self._note = note

    def read_long(
        self, file: int, pieces: Sequence[tuple[int, int]], buffer: Bytes, stop: StopSignal
    ) -> dict[int, LongRead]:
        """One read of chunks that follow each other, where storage prefers that. Nothing is checked yet.

        Args:
            file: File id.
            pieces: First byte of each chunk, and one past its last.
            buffer: For all of them.
            stop: Once it is set nothing is asked for.

        Returns:
            By first byte what ``read`` is to be told of it; empty where no such read was made.
        """
        if len(pieces) < 2 or stop.is_set() or self._sources.order(file)[:1] != [OWN]:
            return {}
        try:
            source = self._sources.open(OWN, file)
        except MegamindError:  # as the reads of the chunks will find
            return {}
        first = pieces[0][0]
        if not source.prefers_long_reads(first, buffer.nbytes):
            return {}
        self._counters.add(ReadKind.PAYLOAD, buffer.nbytes)
        try:
            source.read_into(first, buffer.data)
        except (OSError, MegamindError):  # which chunk it was, and whether for good, its own reads will tell
            self._sources.count(OWN, failed=True)  # once, not for each chunk
            stop.wait(self._retry.first_wait_s)
            return {begin: LongRead(failed=True) for begin, _ in pieces}
        return {
            begin: LongRead(crc32=self._sum(file, begin, end, buffer[begin - first : end - first]))
            for begin, end in pieces
        }

    def _sum(self, file: int, begin: int, end: int, data: Bytes) -> int | None:
        return None if self._reference(file, begin, end) is None else crc32(data)

    def read(
        self, file: int, begin: int, end: int, buffer: Bytes, stop: StopSignal, long_read: LongRead | None = None
    ) -> bool:
        """Fills a buffer with a chunk or part of one.

        Once ``stop`` is set, what fails is not tried again, and no further source is asked.

        Args:
            file: File id.
            begin: First byte in the file.
            end: One past the last.
            buffer: Where to.
            stop: Ends it.
            long_read: That has filled the buffer, or failed to: the first of the chunk's reads.

        Returns:
            Whether it was checked against a reference.

        Raises:
            IntegrityError: No source has the bytes that it should.
            SourceError, RequestError: No source gives any.
        """
        piece = _Piece(file, begin, end, stop, ReadCounters(self._counters))
        if long_read is not None:
            # Judged here and never again: from the next read on, whatever source it is from, the buffer holds that.
            is_proven = self._judge(piece, long_read)
            if is_proven is not None:
                return is_proven
        for base in self._sources.order(file):
            try:
                is_proven = self._read_from(base, piece, buffer)
            except (IntegrityError, RequestError, SourceError) as error:
                # Its frames hold the piece, which would hold it: a cycle that keeps the memory that was written to.
                piece.failures[base] = error.with_traceback(None)
                if stop.is_set():
                    break
                continue
            if not is_proven:
                self._sources.took_unproven(base, file)
            if piece.failures:
                self._note_mirrored(piece, base)
            return is_proven
        raise self._refusal(piece)

    def _judge(self, piece: _Piece, long_read: LongRead) -> bool | None:
        """Whether what a long read brought for a chunk was checked; None where it has to be read again."""
        piece.num_reads, piece.kind = 1, ReadKind.RETRIED
        if long_read.failed:
            return None
        expected = self._reference(piece.file, piece.begin, piece.end)
        self._sources.count(OWN, failed=long_read.crc32 != expected)
        if long_read.crc32 != expected:
            piece.found = long_read.crc32
            return None
        if expected is None:
            self._sources.took_unproven(OWN, piece.file)
        return expected is not None

    def _read_from(self, base: int, piece: _Piece, buffer: Bytes) -> bool:
        """Reads a piece from one base; a base that cannot give this file at all is given up for it."""
        expected = self._reference(piece.file, piece.begin, piece.end)
        try:
            source = self._sources.open(base, piece.file)
            if expected is None and base != OWN:
                if piece.file in self._files.reference_crc32:
                    return self._read_within_chunk(base, source, piece, buffer)
                self._sources.require_same_bytes(base, piece.file)
            return self._read_checked(base, source, piece, piece.begin, buffer, expected)
        except SourceError:
            self._sources.count(base, failed=True)
            raise
        except (RequestError, IntegrityError) as error:
            if not isinstance(error, _MismatchError):
                if base == OWN:  # a mirror without the file is no reason to leave it alone for others
                    self._sources.count(base, failed=True)
                self._sources.give_up(base, piece.file, error)
            raise

    def _read_within_chunk(self, base: int, source: Source, piece: _Piece, buffer: Bytes) -> bool:
        """Part of a chunk from a mirror: the checksum is of the whole chunk, so all of it is read."""
        info, chunk_bytes = self._files.files[piece.file], self._files.chunk_bytes
        begin = piece.begin - (piece.begin - info.data_begin) % chunk_bytes
        end = min(begin + chunk_bytes, info.size_bytes)
        chunk = np.empty(end - begin, np.uint8)
        self._read_checked(base, source, piece, begin, chunk, self._reference(piece.file, begin, end))
        buffer[:] = chunk[piece.begin - begin : piece.end - begin]
        return True

    def _read_checked(
        self, base: int, source: Source, piece: _Piece, begin: int, buffer: Bytes, expected: int | None
    ) -> bool:
        """Reads a range until it matches, at most ``retry.attempts`` times. True where there was something to match."""
        if expected is None:
            self._read_once(base, source, piece, begin, buffer, summed=False)
            self._sources.count(base, failed=False)
            return False
        found = reads = 0
        if base == OWN and piece.found is not None:
            found, reads = piece.found, piece.num_reads
        while reads == 0 or (reads < self._retry.attempts and not piece.stop.is_set()):
            reads += 1
            # After a mismatch past the cache: a copy in memory that is wrong would be wrong again.
            found = self._read_once(base, source, piece, begin, buffer, summed=True, past_cache=reads > 1)
            self._sources.count(base, failed=found != expected)
            if found == expected:
                if reads > 1:
                    action = f"read {reads} times, then it was right"
                    self._note_read("chunk_mismatch", source, piece, begin, buffer, action, reads - 1)
                return True
        self._sources.require_unchanged(source)
        raise _MismatchError(
            f"CRC-32 is {found:08x}, recorded in {self._files.reference_origin} is {expected:08x}, also after "
            f"{'1 read' if reads == 1 else f'{reads} reads'}",
            file=source.uri,
        )

    def _read_once(
        self,
        base: int,
        source: Source,
        piece: _Piece,
        begin: int,
        buffer: Bytes,
        *,
        summed: bool,
        past_cache: bool = False,
    ) -> int:
        """Reads a range; gives its CRC-32 where ``summed``, else 0."""
        num_retries, retry = 0, self._retry
        if base == OWN and piece.num_reads and piece.found is None:  # a long read that failed was the first attempt
            num_retries, piece.num_reads = piece.num_reads, 0
            retry = replace(retry, attempts=max(1, retry.attempts - num_retries))

        def wait(seconds: float) -> None:
            nonlocal num_retries
            num_retries += 1
            self._sources.count(base, failed=True)
            piece.stop.wait(seconds)

        kind, piece.kind = piece.kind, ReadKind.RETRIED
        found = read_with_retry(
            source,
            begin,
            buffer.data,
            retry,
            piece.counters,
            kind=kind,
            summed=summed,
            past_cache=past_cache,
            sleep=wait,
            stopped=piece.stop.is_set,
        )
        if num_retries:
            action = f"read in attempt {num_retries + 1}"
            self._note_read("chunk_retried", source, piece, begin, buffer, action, num_retries)
        return found

    def _reference(self, file: int, begin: int, end: int) -> int | None:
        """The trusted checksum of ``[begin, end)``, where that is a whole chunk and there is one."""
        sums = self._files.reference_crc32.get(file)
        info, chunk_bytes = self._files.files[file], self._files.chunk_bytes
        chunk, rest = divmod(begin - info.data_begin, chunk_bytes)
        if sums is None or rest or end != min(begin + chunk_bytes, info.size_bytes):
            return None
        return int(sums[chunk])

    def _note_read(
        self, kind: str, source: Source, piece: _Piece, begin: int, buffer: Bytes, action: str, times: int
    ) -> None:
        where = f"{source.uri} [{begin}, {begin + buffer.nbytes})"
        self._note(Fault(kind=kind, where=where, action=action, bytes_retried=piece.tell(times * buffer.nbytes)))

    def _note_mirrored(self, piece: _Piece, base: int) -> None:
        base_of_failure, error = next(iter(piece.failures.items()))
        self._note(
            Fault(
                kind="chunk_mirrored",
                where=f"{self._sources.uri(base_of_failure, piece.file)} [{piece.begin}, {piece.end})",
                action=f"taken from {self._sources.uri(base, piece.file)}, since: {error.message}",
                bytes_retried=piece.tell(),
            )
        )

    def _refusal(self, piece: _Piece) -> MegamindError:
        """What to raise when no source gave the right bytes; it names all of them."""
        failures = self._sources.given_up(piece.file) | piece.failures
        errors = list(failures.values())
        if len(errors) == 1 and not isinstance(errors[0], _MismatchError):
            return errors[0]
        uri, tensors = self._files.uri(piece.file), tensors_in(self._files, piece.file, piece.begin, piece.end)
        holds = f"; they hold {'tensors' if len(tensors) > 1 else 'tensor'} {listed(tensors)}" if tensors else ""
        where = f"{uri}: bytes [{piece.begin}, {piece.end})"
        if len(errors) == 1:
            text = f"{where} are wrong: {errors[0].message}{holds}; {_REMEDY}"
        else:
            reasons = "; ".join(self._reason(base, piece, error) for base, error in sorted(failures.items()))
            text = f"{where} cannot be had from any of {len(errors)} sources ({reasons}){holds}; {_REMEDY}"
        if any(isinstance(error, IntegrityError) for error in errors):
            return IntegrityError(
                text, file=uri, tensor=tensors[0] if tensors else None, begin=piece.begin, end=piece.end
            )
        if any(isinstance(error, SourceError) for error in errors):
            return SourceError(text, file=uri, attempts=self._retry.attempts)
        return RequestError(text)

    def _reason(self, base: int, piece: _Piece, error: MegamindError) -> str:
        uri = self._sources.uri(base, piece.file)
        return error.message if error.message.startswith(uri) else f"{uri}: {error.message}"


class _MismatchError(IntegrityError):
    """Bytes that storage gave again and again do not match; leaves this module as a plain ``IntegrityError``."""


def tensors_in(files: FileTable, file: int, begin: int, end: int) -> list[str]:
    """Names of the tensors on disk that have bytes in a range of a file."""
    return [name for first, last, name in files.disk_tensors.get(file, ()) if first < end and begin < last]
