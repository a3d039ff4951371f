"""Reading extents: chunk by chunk, with retries, checked against the reference before anything is cut from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from megamind_ray.config import Config
from megamind_ray.core.manifest import FileInfo
from megamind_ray.core.program import FileTable
from megamind_ray.core.report import Fault, Verified
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.staging import StagingRing
from megamind_ray.errors import IntegrityError, listed
from megamind_ray.io.counters import ReadCounters, ReadKind
from megamind_ray.io.opening import open_source
from megamind_ray.io.retry import call_with_retry, read_with_retry
from megamind_ray.io.source import Source

__all__ = ["ExtentReader", "SourceOpener", "StagedExtent", "tensors_in"]

SourceOpener = Callable[[str, FileInfo], Source]


@dataclass(frozen=True, slots=True)
class StagedExtent:
    """Bytes of a file in a staging buffer.

    Attributes:
        begin: Offset in the file of the first byte.
        data: Valid inside the ``with`` that it came from.
        verified: ``reference`` where each chunk was checked against a trusted checksum, else ``transit``.
    """

    begin: int
    data: Bytes
    verified: Verified


class ExtentReader:
    """Reads the files of a program. Thread-safe: several threads read different extents at a time.

    Args:
        files: What to read from.
        config: Bounds of retries.
        ring: Staging buffers; by default one per reading thread.
        counters: Where reads are counted.
        opener: Opens a file; the default is ``io.open_source``.
        stop: Set from outside, it cuts the waits between attempts short.
    """

    def __init__(
        self,
        files: FileTable,
        config: Config,
        *,
        ring: StagingRing | None = None,
        counters: ReadCounters | None = None,
        opener: SourceOpener | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.files = files
        self.counters = counters if counters is not None else ReadCounters()
        self._retry = config.retry
        self._ring = ring if ring is not None else StagingRing(config.io.read_threads)
        self._opener = opener if opener is not None else partial(open_source, io=config.io, retry=config.retry)
        self._stop = stop if stop is not None else threading.Event()
        self._lock = threading.Lock()
        self._sources: dict[int, Source] = {}
        self._faults: list[Fault] = []

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What went wrong and was dealt with, so far."""
        with self._lock:
            return tuple(self._faults)

    def pieces(self, file: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """A range of a file, cut at the borders of the chunk grid."""
        data_begin, chunk_bytes = self.files.files[file].data_begin, self.files.chunk_bytes
        while begin < end:
            stop = data_begin + ((begin - data_begin) // chunk_bytes + 1) * chunk_bytes
            yield begin, min(stop, end)
            begin = stop

    @contextmanager
    def staged(self, file: int, begin: int, end: int) -> Iterator[StagedExtent]:
        """Reads a range into a staging buffer, and makes sure that the file did not change meanwhile.

        Raises:
            IntegrityError: A chunk does not match its reference after several reads, or the file changed.
            SourceError: Storage still fails after all retries.
        """
        with self._ring.lend(end - begin) as buffer:
            verified = self.read_into(file, begin, end, buffer)
            self.check_unchanged(file)
            yield StagedExtent(begin, buffer, verified)

    def read_into(self, file: int, begin: int, end: int, buffer: Bytes) -> Verified:
        """Fills a buffer with ``[begin, end)`` of a file.

        Whether the file changed is for the caller to check, with ``check_unchanged``, before the bytes are used.

        Raises:
            IntegrityError: A chunk does not match its reference after several reads.
            SourceError: Storage still fails after all retries.
        """
        verified: Verified = "reference"
        for piece_begin, piece_end in self.pieces(file, begin, end):
            if not self._read_piece(file, piece_begin, piece_end, buffer[piece_begin - begin : piece_end - begin]):
                verified = "transit"
        return verified

    def check_unchanged(self, file: int | None = None) -> None:
        """Compares a file that was read, or all of them, with when they were opened.

        Raises:
            IntegrityError: One of them changed.
        """
        with self._lock:
            sources = [source for key, source in self._sources.items() if file in (None, key)]
        for source in sources:
            self._require_unchanged(source)

    def close(self) -> None:
        """Closes the files and gives the staging buffers back; nobody reads any more."""
        with self._lock:
            sources, self._sources = self._sources, {}
        self._ring.clear()
        for source in sources.values():
            source.close()

    def _read_piece(self, file: int, begin: int, end: int, buffer: Bytes) -> bool:
        """Reads part of a chunk, or a whole one. True where it was checked against a reference."""
        expected = self._reference(file, begin, end)
        found = self._read_once(file, begin, buffer, ReadKind.PAYLOAD, summed=expected is not None)
        if expected is None:
            return False
        for reads in range(1, self._retry.attempts + 1):
            if found == expected:
                if reads > 1:
                    self._note("chunk_mismatch", file, begin, end, f"read {reads} times, then it was right", reads - 1)
                return True
            if reads < self._retry.attempts:
                found = self._read_once(file, begin, buffer, ReadKind.RETRIED, summed=True, past_cache=True)
        self.check_unchanged(file)
        raise self._mismatch(file, begin, end, found, expected)

    def _read_once(
        self, file: int, begin: int, buffer: Bytes, kind: ReadKind, *, summed: bool, past_cache: bool = False
    ) -> int:
        """Reads a range; gives its CRC-32 where ``summed``, else 0."""
        num_retries = 0

        def wait(seconds: float) -> None:
            nonlocal num_retries
            num_retries += 1
            self._wait(seconds)

        found = read_with_retry(
            self._source(file),
            begin,
            buffer.data,
            self._retry,
            self.counters,
            kind=kind,
            summed=summed,
            past_cache=past_cache,
            sleep=wait,
        )
        if num_retries:
            end = begin + buffer.nbytes
            self._note("chunk_retried", file, begin, end, f"read in attempt {num_retries + 1}", num_retries)
        return found

    def _source(self, file: int) -> Source:
        source = self._sources.get(file)
        if source is not None:
            return source
        uri = self.files.uri(file)
        # Outside the lock: remote storage takes its time, and other threads have other files.
        opened = call_with_retry(
            lambda _attempt: self._opener(uri, self.files.files[file]),
            uri=uri,
            what="opening it",
            retry=self._retry,
            sleep=self._wait,
        )
        with self._lock:
            source = self._sources.setdefault(file, opened)
        if source is not opened:
            opened.close()
        return source

    def _require_unchanged(self, source: Source) -> None:
        call_with_retry(
            lambda _attempt: source.check_unchanged(),
            uri=source.uri,
            what="checking that it did not change",
            retry=self._retry,
            sleep=self._wait,
        )

    def _wait(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _reference(self, file: int, begin: int, end: int) -> int | None:
        """The trusted checksum of ``[begin, end)``, where that is a whole chunk and there is one."""
        sums = self.files.reference_crc32.get(file)
        info, chunk_bytes = self.files.files[file], self.files.chunk_bytes
        chunk, rest = divmod(begin - info.data_begin, chunk_bytes)
        if sums is None or rest or end != min(begin + chunk_bytes, info.size_bytes):
            return None
        return int(sums[chunk])

    def _note(self, kind: str, file: int, begin: int, end: int, action: str, times: int) -> None:
        fault = Fault(
            kind=kind,
            where=f"{self.files.uri(file)} [{begin}, {end})",
            action=action,
            bytes_retried=times * (end - begin),
        )
        with self._lock:
            self._faults.append(fault)

    def _mismatch(self, file: int, begin: int, end: int, found: int, expected: int) -> IntegrityError:
        uri, tensors = self.files.uri(file), tensors_in(self.files, file, begin, end)
        holds = f"; it holds {'tensors' if len(tensors) > 1 else 'tensor'} {listed(tensors)}" if tensors else ""
        return IntegrityError(
            f"{uri}: bytes [{begin}, {end}) have CRC-32 {found:08x}, recorded in {self.files.reference_origin} is "
            f"{expected:08x}, also after {self._retry.attempts} reads{holds}; get the file anew from where it came "
            "from, or record the checksums again if it was changed on purpose",
            file=uri,
            tensor=tensors[0] if tensors else None,
            begin=begin,
            end=end,
        )


def tensors_in(files: FileTable, file: int, begin: int, end: int) -> list[str]:
    """Names of the tensors on disk that have bytes in a range of a file."""
    return [name for first, last, name in files.disk_tensors.get(file, ()) if first < end and begin < last]
