"""Recording and checking the checksums of a whole checkpoint: every byte is read once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.core.manifest import FileInfo, Manifest, Reference
from megamind_ray.errors import RequestError
from megamind_ray.io.checksum import crc32
from megamind_ray.io.counters import ReadCounters, ReadKind
from megamind_ray.io.opening import open_source
from megamind_ray.io.retry import call_with_retry, read_with_retry
from megamind_ray.io.sidecar import Sidecar, SidecarFile, check_chunk_bytes
from megamind_ray.io.source import Source

__all__ = ["Mismatch", "Progress", "VerifyResult", "record_checksums", "verify_checksums"]

Progress = Callable[[int, int], None]
"""Called in the caller's thread with the bytes done so far and the bytes in total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A range whose bytes are not the recorded ones.

    Attributes:
        file: Path or URI of the file.
        begin: First byte of the range.
        end: One past the last byte.
        tensors: Names of the tensors with bytes in it; empty for the header, which concerns all.
        expected_crc32: As recorded.
        actual_crc32: As read.
    """

    file: str
    begin: int
    end: int
    tensors: tuple[str, ...]
    expected_crc32: int
    actual_crc32: int

    @property
    def is_header(self) -> bool:
        return self.begin == 0

    def __str__(self) -> str:
        what = "header" if self.is_header else f"tensors {', '.join(self.tensors)}"
        return (
            f"{self.file}: bytes [{self.begin}, {self.end}) ({what}): "
            f"CRC-32 is {self.actual_crc32:08x}, recorded {self.expected_crc32:08x}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What a check of a whole checkpoint found.

    Attributes:
        origin: Where the reference comes from.
        mismatches: In file order; empty where all is well.
        num_files: Files read.
        num_chunks: Chunks compared, headers not counted.
        num_bytes: Bytes compared, headers included.
    """

    origin: str
    mismatches: tuple[Mismatch, ...]
    num_files: int
    num_chunks: int
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Whether every byte is as recorded."""
        return not self.mismatches


@dataclass(frozen=True, slots=True)
class _Range:
    """A summed range; the header of a file comes first, then its chunks in order."""

    file: int
    begin: int
    end: int
    crc32: int


def record_checksums(
    manifest: Manifest,
    *,
    chunk_bytes: int | None = None,
    threads: int | None = None,
    retry: RetryConfig | None = None,
    counters: ReadCounters | None = None,
    on_progress: Progress | None = None,
) -> Sidecar:
    """Reads a checkpoint and records its checksums; nothing is written.

    Args:
        manifest: The checkpoint; every file must still be as it was when this was read.
        chunk_bytes: Grid; 8 MiB by default.
        threads: Reads in flight.
        retry: Bounds of the attempts.
        counters: Where reads are counted.
        on_progress: Called as bytes are done.

    Raises:
        RequestError: A chunk size that is not allowed, or a file that is gone.
        IntegrityError: A file changed since the manifest was read, or while it was read.
        SourceError: The storage does not answer.
    """
    grid_bytes = IoConfig().chunk_bytes if chunk_bytes is None else chunk_bytes
    check_chunk_bytes(grid_bytes)
    sums: list[list[int]] = [[] for _ in manifest.files]
    scan = _Scan(manifest, grid_bytes, threads, retry, counters, on_progress)
    for item in scan.ranges():
        sums[item.file].append(item.crc32)
    files = (
        SidecarFile(
            path=file.path,
            size_bytes=file.size_bytes,
            data_begin=file.data_begin,
            header_crc32=values[0],
            chunks_crc32=tuple(values[1:]),
        )
        for file, values in zip(manifest.files, sums, strict=True)
    )
    created_at = datetime.now(UTC).isoformat(timespec="seconds")
    return Sidecar(chunk_bytes=grid_bytes, created_at=created_at, files=tuple(files))


def verify_checksums(
    manifest: Manifest,
    *,
    threads: int | None = None,
    retry: RetryConfig | None = None,
    counters: ReadCounters | None = None,
    on_progress: Progress | None = None,
) -> VerifyResult:
    """Reads a checkpoint and compares every byte with its reference; goes on after a mismatch.

    Args:
        manifest: A checkpoint with a reference.
        threads: Reads in flight.
        retry: Bounds of the attempts.
        counters: Where reads are counted.
        on_progress: Called as bytes are done.

    Raises:
        RequestError: There is no reference, or a file is gone.
        IntegrityError: A file changed since the manifest was read, or while it was read.
        SourceError: The storage does not answer.
    """
    reference = manifest.reference
    if reference is None:
        raise RequestError(
            f"{manifest.uri}: no recorded checksums to compare with; record some first (megamind verify --record)"
        )
    scan = _Scan(manifest, reference.chunk_bytes, threads, retry, counters, on_progress)
    mismatches = []
    num_ranges = 0
    for item in scan.ranges():
        num_ranges += 1
        expected = _expected(reference, manifest.files[item.file], item)
        if item.crc32 != expected:
            mismatches.append(_mismatch(manifest, item, expected))
    return VerifyResult(
        origin=reference.origin,
        mismatches=tuple(mismatches),
        num_files=len(manifest.files),
        num_chunks=num_ranges - len(manifest.files),
        num_bytes=scan.total_bytes,
    )


def _expected(reference: Reference, file: FileInfo, item: _Range) -> int:
    checksums = reference.files[item.file]
    if item.begin == 0:
        return checksums.header_crc32
    return checksums.chunks_crc32[(item.begin - file.data_begin) // reference.chunk_bytes]


def _mismatch(manifest: Manifest, item: _Range, expected: int) -> Mismatch:
    tensors = (
        tensor.name
        for tensor in manifest.tensors.values()
        if tensor.file == item.file and tensor.begin < item.end and item.begin < tensor.end
    )
    return Mismatch(
        file=manifest.file_uri(item.file),
        begin=item.begin,
        end=item.end,
        tensors=tuple(tensors),
        expected_crc32=expected,
        actual_crc32=item.crc32,
    )


class _Scan:
    """Sums all ranges of a checkpoint on threads, with one chunk of memory per thread."""

    def __init__(
        self,
        manifest: Manifest,
        chunk_bytes: int,
        threads: int | None,
        retry: RetryConfig | None,
        counters: ReadCounters | None,
        on_progress: Progress | None,
    ) -> None:
        self._manifest = manifest
        self._chunk_bytes = chunk_bytes
        self._threads = IoConfig().read_threads if threads is None else threads
        self._retry = retry or RetryConfig()
        self._counters = counters or ReadCounters()
        self._on_progress = on_progress
        self._local = threading.local()
        self.total_bytes = sum(file.size_bytes for file in manifest.files)
        if self._threads < 1:
            raise RequestError(f"threads = {self._threads}: take 1 or more")

    def ranges(self) -> Iterator[_Range]:
        """All ranges, file by file, in order."""
        done_bytes = 0
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="megamind-verify")
        try:
            for number, file in enumerate(self._manifest.files):
                with self._open(number, file) as source:
                    for item in self._file_ranges(pool, source, number, file):
                        done_bytes += item.end - item.begin
                        if self._on_progress is not None:
                            self._on_progress(done_bytes, self.total_bytes)
                        yield item
                    source.check_unchanged()
        finally:
            pool.shutdown(cancel_futures=True)

    def _open(self, number: int, file: FileInfo) -> Source:
        uri = self._manifest.file_uri(number)
        return call_with_retry(lambda _: open_source(uri, file), uri=uri, what="opening it", retry=self._retry)

    def _file_ranges(self, pool: ThreadPoolExecutor, source: Source, number: int, file: FileInfo) -> Iterator[_Range]:
        def jobs() -> Iterator[Future[_Range]]:
            begin, end = 0, file.data_begin
            while begin < file.size_bytes:
                yield pool.submit(self._sum, source, number, begin, end)
                begin, end = end, min(end + self._chunk_bytes, file.size_bytes)

        # The source is closed when the caller leaves, so no read of it may still run by then.
        return _in_order(jobs(), window=2 * self._threads)

    def _sum(self, source: Source, number: int, begin: int, end: int) -> _Range:
        value = 0
        for piece_begin in range(begin, end, self._chunk_bytes):  # a header may be longer than a chunk
            piece = self._buffer()[: min(self._chunk_bytes, end - piece_begin)]
            kind = ReadKind.PAYLOAD if begin else ReadKind.HEADER
            read_with_retry(source, piece_begin, piece, self._retry, self._counters, kind=kind)
            value = crc32(piece, value)
        return _Range(number, begin, end, value)

    def _buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = memoryview(bytearray(self._chunk_bytes))
        return buffer


def _in_order(jobs: Iterable[Future[_Range]], *, window: int) -> Iterator[_Range]:
    """Results in the order of the jobs, of which at most ``window`` are submitted and not yet done."""
    running: deque[Future[_Range]] = deque()
    try:
        for job in jobs:
            running.append(job)
            if len(running) >= window:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for job in running:
            job.cancel()
        for job in running:
            if not job.cancelled():
                job.exception()
