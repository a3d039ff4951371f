"""Recording and checking the checksums of a whole checkpoint: every byte is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.core.location import parse_location
from megamind_ray.core.manifest import FileInfo, Manifest, Reference
from megamind_ray.errors import IntegrityError, RequestError, SourceError, masked
from megamind_ray.io.counters import ReadCounters
from megamind_ray.io.digests import FileDigest, file_digest
from megamind_ray.io.request_pool import run_requests
from megamind_ray.io.scan import Progress, Scan, SummedRange
from megamind_ray.io.sidecar import Sidecar, SidecarFile, check_chunk_bytes, recorded_path
from megamind_ray.io.stop import Stop

__all__ = [
    "DigestCheck",
    "Mismatch",
    "Progress",
    "VerifyResult",
    "known_digests",
    "record_checksums",
    "verify_checksums",
]

# Questions to a storage wait for the network, not for a core.
_NUM_QUESTIONS: Final = IoConfig().remote_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A range whose bytes are not the recorded ones.

    Attributes:
        file: Path or URI of the file, secrets masked.
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
class DigestCheck:
    """A whole file against the checksum that its storage has of it, or that of another copy.

    Attributes:
        file: Path or URI of the file, secrets masked.
        origin: Who says what it should be.
        copy: The copy whose storage says so; empty if it is the file's own storage.
        algorithm: As in ``FileDigest``.
        expected: In hexadecimal.
        actual: Of the bytes as read.
        ok: Whether they are the same.
    """

    file: str
    origin: str
    copy: str = ""
    algorithm: str
    expected: str
    actual: str
    ok: bool

    def __str__(self) -> str:
        origin = f"the storage of {self.copy} ({self.origin})" if self.copy else self.origin
        return f"{self.file}: {self.algorithm} is {self.actual}, {origin} says {self.expected}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What a check of a whole checkpoint found.

    Attributes:
        origin: Where the recorded checksums come from, secrets masked; empty without any.
        mismatches: In file order; empty where all is well.
        digests: Whole files that their storage has a checksum of, in file order.
        unchecked: Files that there is neither a recorded checksum nor one of the storage for, secrets masked; they
            were not read.
        num_files: Files read.
        num_chunks: Chunks compared with recorded checksums, headers not counted.
        num_bytes: Bytes compared, headers included.
    """

    origin: str
    mismatches: tuple[Mismatch, ...]
    digests: tuple[DigestCheck, ...] = ()
    unchecked: tuple[str, ...] = ()
    num_files: int
    num_chunks: int
    num_bytes: int

    @property
    def ok(self) -> bool:
        """Whether every byte that could be compared is as it should be."""
        return not self.mismatches and all(check.ok for check in self.digests)


def record_checksums(
    manifest: Manifest,
    *,
    chunk_bytes: int | None = None,
    threads: int | None = None,
    io: IoConfig | None = None,
    retry: RetryConfig | None = None,
    counters: ReadCounters | None = None,
    on_progress: Progress | None = None,
) -> Sidecar:
    """Reads a checkpoint and records its checksums; nothing is written.

    Where the storage has checksums of whole files, the bytes are held to those first: what is wrong already must not
    be recorded as right.

    Args:
        manifest: The checkpoint; every file must still be as it was when this was read.
        chunk_bytes: Grid; 8 MiB by default.
        threads: Reads in flight; by default as ``io`` says.
        io: How to read; the default settings by default.
        retry: Bounds of the attempts.
        counters: Where reads are counted.
        on_progress: Called as bytes are done.

    Raises:
        RequestError: A chunk size that is not allowed, or a file that is gone.
        IntegrityError: A file is not what its storage says it is, changed since the manifest was read, or while it was
            read.
        SourceError: The storage does not answer.
    """
    grid_bytes = IoConfig().chunk_bytes if chunk_bytes is None else chunk_bytes
    check_chunk_bytes(grid_bytes)
    sums: list[list[int]] = [[] for _ in manifest.files]
    digests = known_digests(manifest, retry=retry)
    scan = Scan(
        manifest,
        grid_bytes,
        algorithms=_algorithms(digests),
        threads=threads,
        io=io,
        retry=retry,
        counters=counters,
        on_progress=on_progress,
    )
    for item in scan.ranges():
        sums[item.file].append(item.crc32)
    for check in _digest_checks(manifest, digests, scan):
        if not check.ok:
            raise IntegrityError(
                f"{check}; the file is damaged, so its checksums are not recorded: fetch it again", file=check.file
            )
    return _sidecar(manifest, grid_bytes, sums)


def verify_checksums(
    manifest: Manifest,
    *,
    digests: Mapping[int, FileDigest] | None = None,
    threads: int | None = None,
    io: IoConfig | None = None,
    retry: RetryConfig | None = None,
    counters: ReadCounters | None = None,
    on_progress: Progress | None = None,
) -> VerifyResult:
    """Reads a checkpoint and compares every byte with its reference; goes on after a mismatch.

    Each file is held to its recorded checksums and to the checksum that its storage has of it, whichever there are;
    both cost one reading.

    Args:
        manifest: The checkpoint.
        digests: Checksums of whole files, by file; by default the ones that the storage tells.
        threads: Reads in flight; by default as ``io`` says.
        io: How to read; the default settings by default.
        retry: Bounds of the attempts.
        counters: Where reads are counted.
        on_progress: Called as bytes are done.

    Raises:
        RequestError: There is neither a reference nor a checksum of the storage, or a file is gone.
        IntegrityError: A file changed since the manifest was read, or while it was read.
        SourceError: The storage does not answer.
    """
    reference = manifest.reference
    if digests is None:
        digests = known_digests(manifest, retry=retry)
    if reference is None and not digests:
        raise RequestError(
            f"{manifest.uri}: no recorded checksums to compare with, and none that its storage has of whole files; "
            "record some first (megamind verify --record)"
        )
    scan = Scan(
        manifest,
        reference.chunk_bytes if reference else IoConfig().chunk_bytes,
        algorithms=_algorithms(digests),
        only=None if reference else frozenset(digests),
        threads=threads,
        io=io,
        retry=retry,
        counters=counters,
        on_progress=on_progress,
    )
    num_chunks, mismatches = _compare(manifest, scan)
    left_out = () if reference else (file for file in range(len(manifest.files)) if file not in digests)
    return VerifyResult(
        origin=masked(reference.origin) if reference else "",
        mismatches=mismatches,
        digests=tuple(_digest_checks(manifest, digests, scan)),
        unchecked=tuple(masked(manifest.file_uri(file)) for file in left_out),
        num_files=len(manifest.files) if reference else len(digests),
        num_chunks=num_chunks,
        num_bytes=scan.total_bytes,
    )


def _compare(manifest: Manifest, scan: Scan) -> tuple[int, tuple[Mismatch, ...]]:
    """Reads everything; how many chunks there were to compare, and what did not match."""
    num_chunks, mismatches = 0, []
    for item in scan.ranges():
        if manifest.reference is None:
            continue
        num_chunks += item.begin > 0
        expected = _expected(manifest.reference, manifest.files[item.file], item)
        if item.crc32 != expected:
            mismatches.append(_mismatch(manifest, item, expected))
    return num_chunks, tuple(mismatches)


def _sidecar(manifest: Manifest, chunk_bytes: int, sums: Sequence[Sequence[int]]) -> Sidecar:
    """Of the checksums of each file, the header's first."""
    is_web = parse_location(manifest.root or "/").is_web
    files = (
        SidecarFile(
            path=recorded_path(file.path, is_web=is_web),
            size_bytes=file.size_bytes,
            data_begin=file.data_begin,
            header_crc32=values[0],
            chunks_crc32=tuple(values[1:]),
        )
        for file, values in zip(manifest.files, sums, strict=True)
    )
    created_at = datetime.now(UTC).isoformat(timespec="seconds")
    return Sidecar(chunk_bytes=chunk_bytes, created_at=created_at, files=tuple(files))


def known_digests(manifest: Manifest, *, retry: RetryConfig | None = None) -> dict[int, FileDigest]:
    """The checksums of whole files that their storage tells, by file."""
    stop = Stop()

    def ask(file: int) -> FileDigest | None:
        location = parse_location(manifest.file_uri(file))
        try:
            return file_digest(location, retry=retry, sleep=stop.wait, stopped=stop.is_set)
        except (RequestError, SourceError):
            return None  # a right that reading does not need; what is wrong with the file itself, reading will tell

    files = range(len(manifest.files))
    if parse_location(manifest.root or "/").is_local:  # a look at a link, no request
        answers = [ask(file) for file in files]
    else:
        answers = run_requests(ask, files, num_in_flight=_NUM_QUESTIONS, on_failure=stop.set)
    return {file: digest for file, digest in zip(files, answers, strict=True) if digest is not None}


def _algorithms(digests: Mapping[int, FileDigest]) -> dict[int, str]:
    return {file: digest.algorithm for file, digest in digests.items()}


def _digest_checks(manifest: Manifest, digests: Mapping[int, FileDigest], scan: Scan) -> list[DigestCheck]:
    return [
        DigestCheck(
            file=masked(manifest.file_uri(file)),
            origin=digest.origin,
            copy=digest.copy,
            algorithm=digest.algorithm,
            expected=digest.value,
            actual=scan.digests[file],
            ok=scan.digests[file] == digest.value,
        )
        for file, digest in sorted(digests.items())
    ]


def _expected(reference: Reference, file: FileInfo, item: SummedRange) -> int:
    checksums = reference.files[item.file]
    if item.begin == 0:
        return checksums.header_crc32
    return checksums.chunks_crc32[(item.begin - file.data_begin) // reference.chunk_bytes]


def _mismatch(manifest: Manifest, item: SummedRange, expected: int) -> Mismatch:
    tensors = (
        tensor.name
        for tensor in manifest.tensors.values()
        if tensor.file == item.file and tensor.begin < item.end and item.begin < tensor.end
    )
    return Mismatch(
        file=masked(manifest.file_uri(item.file)),
        begin=item.begin,
        end=item.end,
        tensors=tuple(tensors),
        expected_crc32=expected,
        actual_crc32=item.crc32,
    )
