"""Every byte of a checkpoint once, in order: checksums of its ranges and of its whole files."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.core.manifest import FileInfo, Manifest
from megamind_ray.errors import RequestError
from megamind_ray.io.counters import ReadCounters, ReadKind
from megamind_ray.io.digests import Hasher, new_hasher
from megamind_ray.io.local_source import DIRECT_ALIGNMENT_BYTES
from megamind_ray.io.opening import open_source
from megamind_ray.io.pools import submit
from megamind_ray.io.retry import call_with_retry, read_with_retry
from megamind_ray.io.source import Source
from megamind_ray.io.stop import Stop

__all__ = ["Progress", "Scan", "SummedRange"]

Progress = Callable[[int, int], None]
"""Called in the caller's thread with the bytes done so far and the bytes in total."""


@dataclass(frozen=True, slots=True)
class SummedRange:
    """A summed range; the header of a file comes first, then its chunks in order."""

    file: int
    begin: int
    end: int
    crc32: int


class Scan:
    """Reads ahead on threads; whole files are summed in the caller's thread, since that goes in order.

    Args:
        manifest: The checkpoint.
        chunk_bytes: The chunk grid.
        algorithms: For the files whose whole bytes are to be summed as well, with what (``FileDigest.algorithm``).
        only: Files to read; all by default.
        threads: Reads in flight; twice as many chunks are in memory. By default as ``io`` says.
        io: How to read; the default settings by default.
        retry: Bounds of the attempts.
        counters: Where reads are counted.
        on_progress: Called as bytes are done.

    Attributes:
        total_bytes: Bytes of the files that are read.
        digests: Checksums of whole files, of those done so far.
    """

    def __init__(
        self,
        manifest: Manifest,
        chunk_bytes: int,
        *,
        algorithms: Mapping[int, str] | None = None,
        only: frozenset[int] | None = None,
        threads: int | None = None,
        io: IoConfig | None = None,
        retry: RetryConfig | None = None,
        counters: ReadCounters | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        self._manifest = manifest
        self._chunk_bytes = chunk_bytes
        self._algorithms = algorithms or {}
        self._files = [number for number in range(len(manifest.files)) if only is None or number in only]
        self._io = io or IoConfig()
        self._threads = self._io.reads_in_flight(manifest.root) if threads is None else threads
        self._retry = retry or RetryConfig()
        self._counters = counters or ReadCounters()
        self._on_progress = on_progress
        self._free: list[memoryview] = []
        self._stop = Stop()
        # In the order of time: what ends because of the first one says less.
        self._failures: list[BaseException] = []
        self.total_bytes = sum(manifest.files[number].size_bytes for number in self._files)
        self.digests: dict[int, str] = {}
        if self._threads < 1:
            raise RequestError(f"threads = {self._threads}: take 1 or more")

    def ranges(self) -> Iterator[SummedRange]:
        """All ranges, file by file, in order.

        Raises:
            RequestError: A file is gone.
            IntegrityError: A file changed since the manifest was read, or while it was read.
            SourceError: The storage does not answer.
        """
        done_bytes = 0
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="megamind-verify")
        try:
            for number in self._files:
                hasher = new_hasher(self._algorithms[number]) if number in self._algorithms else None
                with self._open(number) as source:
                    for item in self._file_ranges(pool, source, number, hasher):
                        done_bytes += item.end - item.begin
                        if self._on_progress is not None:
                            self._on_progress(done_bytes, self.total_bytes)
                        yield item
                    source.check_unchanged()
                if hasher is not None:
                    self.digests[number] = hasher.hexdigest()
        finally:
            pool.shutdown(cancel_futures=True)

    def _open(self, number: int) -> Source:
        uri, file = self._manifest.file_uri(number), self._manifest.files[number]
        return call_with_retry(
            lambda _: open_source(uri, file, io=self._io, retry=self._retry),
            uri=uri,
            what="opening it",
            retry=self._retry,
        )

    def _file_ranges(
        self, pool: ThreadPoolExecutor, source: Source, number: int, hasher: Hasher | None
    ) -> Iterator[SummedRange]:
        running: deque[tuple[Future[SummedRange], memoryview, memoryview]] = deque()

        def take_first() -> SummedRange:
            future, buffer, data = running[0]
            try:
                item = future.result()
            except Exception:
                if self._failures:
                    raise self._failures[0]  # noqa: B904 - may be this very one
                raise
            running.popleft()
            if hasher is not None:
                hasher.update(data)
            if buffer.nbytes == self._chunk_bytes + DIRECT_ALIGNMENT_BYTES:
                self._free.append(buffer)
            return item

        try:
            for begin, end in self._borders(self._manifest.files[number]):
                buffer = self._buffer(end - begin)
                # As far from a page border as in the file: then it can be read past the cache without a further copy.
                phase = begin % DIRECT_ALIGNMENT_BYTES
                data = buffer[phase : phase + end - begin]
                running.append((submit(pool, self._sum, source, number, begin, data), buffer, data))
                if len(running) >= 2 * self._threads:
                    yield take_first()
            while running:
                yield take_first()
        finally:
            # The source is closed when the caller leaves, so no read of it may still run by then. What has been taken
            # is whole; what has not, because of an error or an interrupt, nobody wants any more.
            if running:
                self._stop.set()
            for future, _, _ in running:
                future.cancel()
            for future, _, _ in running:
                if not future.cancelled():
                    future.exception()

    def _borders(self, file: FileInfo) -> Iterator[tuple[int, int]]:
        begin, end = 0, file.data_begin
        while begin < file.size_bytes:
            yield begin, end
            begin, end = end, min(end + self._chunk_bytes, file.size_bytes)

    def _buffer(self, nbytes: int) -> memoryview:
        """Page-aligned memory for that many bytes and for where they begin in a page."""
        usual = self._chunk_bytes
        if nbytes <= usual and self._free:
            return self._free.pop()
        return memoryview(
            mmap.mmap(-1, max(nbytes, usual) + DIRECT_ALIGNMENT_BYTES)
        )  # longer: a header of many tensors

    def _sum(self, source: Source, number: int, begin: int, buffer: memoryview) -> SummedRange:
        kind = ReadKind.PAYLOAD if begin else ReadKind.HEADER
        # Past the cache: a good copy in memory says nothing of what is stored.
        try:
            value = read_with_retry(
                source,
                begin,
                buffer,
                self._retry,
                self._counters,
                kind=kind,
                summed=True,
                past_cache=True,
                sleep=self._stop.wait,
                stopped=self._stop.is_set,
            )
        except BaseException as error:
            self._failures.append(error)
            self._stop.set()
            raise
        return SummedRange(number, begin, begin + buffer.nbytes, value)
