"""Reading extents: chunk by chunk, with retries, checked against the reference before anything is cut from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megamind_ray.config import Config
from megamind_ray.core.program import FileTable
from megamind_ray.core.report import Fault, Verified
from megamind_ray.device.strided import Bytes
from megamind_ray.engine.chunk_reader import ChunkReader, LongRead, tensors_in
from megamind_ray.engine.file_sources import OWN, FileSources, SourceOpener
from megamind_ray.engine.staging import StagingRing, staging_ring
from megamind_ray.errors import ClusterError, MegamindError, masked
from megamind_ray.io.counters import ReadCounters
from megamind_ray.io.request_pool import run_requests
from megamind_ray.io.stop import Stop, StopSignal

__all__ = ["ExtentReader", "SourceOpener", "StagedExtent", "tensors_in"]


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
        config: Mirrors, bounds of retries, when a source is put in quarantine.
        ring: Staging buffers; by default of host memory, for as many threads as read.
        counters: Where reads are counted.
        opener: Opens a file; the default is ``io.open_source``.
        stop: Set from outside, it does what ``stop`` does.
        on_fault: Told of each fault as it is noted, from any thread.
    """

    def __init__(
        self,
        files: FileTable,
        config: Config,
        *,
        ring: StagingRing | None = None,
        counters: ReadCounters | None = None,
        opener: SourceOpener | None = None,
        stop: StopSignal | None = None,
        on_fault: Callable[[Fault], None] = lambda _: None,
    ) -> None:
        self.files = files
        self.counters = counters if counters is not None else ReadCounters()
        self._remote_threads = config.io.remote_threads if config.io.is_remote(files.root) else None
        self._ring = ring if ring is not None else staging_ring(files, config.io)
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._on_fault = on_fault
        self._stop = Stop(stop)
        self._sources = FileSources(files, config, note=self._note, stop=self._stop, opener=opener)
        self._chunks = ChunkReader(files, self._sources, config.retry, counters=self.counters, note=self._note)

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

    def is_in_memory(self, file: int, begin: int, end: int) -> bool:
        """Whether a range of a file is in this machine's memory, as far as its own source can tell."""
        try:
            return self._sources.open(OWN, file).is_in_memory(begin, end - begin)
        except MegamindError:  # as its reads will find, and deal with
            return False

    @contextmanager
    def staged(
        self, file: int, begin: int, end: int, *, on_begin: Callable[[], None] = lambda: None
    ) -> Iterator[StagedExtent]:
        """Reads a range into a staging buffer, and makes sure that the file did not change meanwhile.

        Args:
            file: By its id.
            begin: Offset in it.
            end: One past the last byte.
            on_begin: Called when there is a buffer, before storage is asked; what it raises ends the read.

        Raises:
            IntegrityError: A chunk does not match its reference, whatever source it comes from, or the file changed.
            SourceError: Storage still fails after all retries, and all mirrors do.
            RequestError: The file is gone, and there is no mirror.
        """
        with self._ring.lend(end - begin, begin) as buffer:
            on_begin()
            verified = self.read_into(file, begin, end, buffer)
            self.check_unchanged(file)
            yield StagedExtent(begin, buffer, verified)

    def read_into(self, file: int, begin: int, end: int, buffer: Bytes) -> Verified:
        """Fills a buffer with ``[begin, end)`` of a file; from remote storage with its chunks requested side by side.

        A local file without recorded checksums is read in one piece.

        Whether the file changed is for the caller to check, with ``check_unchanged``, before the bytes are used.

        Raises:
            IntegrityError, SourceError, RequestError: As for ``staged``.
            ClusterError: It was stopped before all had been asked for.
        """
        stop = Stop(self._stop)  # chunks that are read side by side end together

        long_reads: dict[int, LongRead] = {}

        def read(piece: tuple[int, int]) -> bool:
            first, last = piece
            if stop.is_set():
                uri = self._sources.uri(OWN, file)
                raise ClusterError(f"{uri}: stopped before all was done, at bytes [{first}, {last})")
            view = buffer[first - begin : last - begin]
            return self._chunks.read(file, first, last, view, stop, long_reads.get(first))

        if self._remote_threads is not None:
            pieces = self.pieces(file, begin, end)
            checked = run_requests(read, pieces, num_in_flight=self._remote_threads, on_failure=stop.set)
        elif file in self.files.reference_crc32:
            long_reads = self._chunks.read_long(file, list(self.pieces(file, begin, end)), buffer, stop)
            checked = [read(piece) for piece in self.pieces(file, begin, end)]
        else:  # nothing to check chunk by chunk: the fewer reads, the less threads wait for the GIL between them
            checked = [read((begin, end))]
        return "reference" if all(checked) else "transit"

    def stop(self) -> None:
        """Ends reads that are under way: what fails is not tried again, nothing new is asked for. For good."""
        self._stop.set()

    def check_unchanged(self, file: int | None = None) -> None:
        """Compares a file that was read, or all of them, with when they were opened.

        Raises:
            IntegrityError: One of them changed.
        """
        self._sources.check_unchanged(file)

    def close(self) -> None:
        """Closes the files and gives the staging buffers back; nobody reads any more."""
        self._ring.clear()
        self._sources.close()

    def _note(self, fault: Fault) -> None:
        # Reports are kept and passed on; what an address carries as a secret is nobody's business there.
        fault = replace(fault, where=masked(fault.where), action=masked(fault.action))
        with self._lock:
            self._faults.append(fault)
        self._on_fault(fault)
