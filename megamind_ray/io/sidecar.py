"""The sidecar: recorded checksums of a checkpoint, in a file beside it (docs/design/0003)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.core.location import Location, parse_location
from megamind_ray.core.manifest import FileChecksums, FileInfo, Manifest, Reference
from megamind_ray.core.output_file import require_output_place, write_output
from megamind_ray.errors import IntegrityError, RequestError, SourceError
from megamind_ray.io.filesystems import call_filesystem, fsspec_filesystem
from megamind_ray.io.retry import call_with_retry, request_bound_s
from megamind_ray.io.safetensors_header import strict_json_object
from megamind_ray.io.storage import Browser

__all__ = [
    "SCHEMA",
    "Sidecar",
    "SidecarFile",
    "check_chunk_bytes",
    "default_sidecar_path",
    "is_of_folder",
    "num_chunks",
    "parse_sidecar",
    "read_sidecar",
    "recorded_path",
    "require_sidecar_place",
    "sidecar_places",
    "to_reference",
    "write_sidecar",
]

SCHEMA: Final = "megamind.sidecar/1"
ALGORITHM: Final = "crc32"
_FOLDER_NAME: Final = "megamind-checksums.json"
_FILE_SUFFIX: Final = ".megamind.json"
_REMEDY: Final = "record it again, or leave it out with sidecar=False"


class _MalformedError(Exception):
    """What is wrong in a sidecar; leaves this module as an ``IntegrityError``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarFile:
    """Checksums of one data file.

    Attributes:
        path: As ``FileInfo.path``.
        size_bytes: Size of the file.
        data_begin: First byte after the header.
        header_crc32: CRC-32 of bytes ``[0, data_begin)``.
        chunks_crc32: CRC-32 of each chunk of the grid.
    """

    path: str
    size_bytes: int
    data_begin: int
    header_crc32: int
    chunks_crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Checksums of a checkpoint.

    Attributes:
        chunk_bytes: Size of the chunks that the checksums are of.
        created_at: ISO 8601, UTC.
        files: In name order.
        origin: Where it was read from, for messages; empty for one that was not.
    """

    chunk_bytes: int
    created_at: str
    files: tuple[SidecarFile, ...]
    origin: str = ""

    def entry(self, path: str) -> SidecarFile:
        """Checksums of one file.

        Raises:
            IntegrityError: The sidecar does not have it.
        """
        for file in self.files:
            if file.path == path:
                return file
        raise IntegrityError(f"{self.origin}: the sidecar has no file {path!r}; {_REMEDY}", file=path)

    def has(self, path: str) -> bool:
        """Whether it has checksums of a file."""
        return any(file.path == path for file in self.files)

    def only(self, path: str) -> Sidecar:
        """The part of it that is about one file.

        Raises:
            IntegrityError: There is none.
        """
        return replace(self, files=(self.entry(path),))


def sidecar_places(root: Location, paths: Sequence[str], *, is_single: bool) -> tuple[Location, ...]:
    """Where the sidecar of these files is looked for by default, first where it is recorded.

    One file can have been recorded alone, or with the folder that it is in, and be loaded either way.

    Args:
        root: Their folder.
        paths: Of all of them, relative to it.
        is_single: One file was named, not its folder.
    """
    places = [root.join(_FOLDER_NAME)]
    if len(paths) == 1:
        places.append(root.join(paths[0].partition("?")[0] + _FILE_SUFFIX))
    return tuple(reversed(places) if is_single else places)


def is_of_folder(place: Location) -> bool:
    """Whether a default place is the one of a folder, whose other files may be recorded there, too."""
    return place.name == _FOLDER_NAME


def default_sidecar_path(manifest: Manifest) -> str:
    """Where the sidecar of a checkpoint is by default: in its folder, or beside the single file that was given."""
    root = Location(manifest.root, parse_location(manifest.uri).scheme)
    is_single = len(manifest.files) == 1 and parse_location(manifest.uri).uri == manifest.file_uri(0)
    return sidecar_places(root, [file.path for file in manifest.files], is_single=is_single)[0].uri


def recorded_path(path: str, *, is_web: bool) -> str:
    """The name of a data file in a sidecar: without the query of an address, a signature that is another one later."""
    return path.partition("?")[0] if is_web else path


def num_chunks(size_bytes: int, data_begin: int, chunk_bytes: int) -> int:
    """Chunks of the grid of one file; the last one may be short."""
    return -(-(size_bytes - data_begin) // chunk_bytes)


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Refuses a chunk size that ``IoConfig`` would not take.

    Raises:
        RequestError: Not within its bounds.
    """
    IoConfig(chunk_bytes=chunk_bytes, extent_bytes=chunk_bytes)


def read_sidecar(path: str | os.PathLike[str], *, retry: RetryConfig | None = None) -> Sidecar:
    """Reads a sidecar from a path or URI.

    Raises:
        RequestError: No such file, no permission, or a schema that this release does not know.
        IntegrityError: It is malformed.
        SourceError: The storage does not answer.
    """
    location = parse_location(path)
    return parse_sidecar(Browser(retry or RetryConfig()).read_whole(location), location.uri)


def parse_sidecar(raw: bytes, origin: str) -> Sidecar:
    """Parses the JSON of a sidecar; unknown fields are ignored.

    Raises:
        RequestError: A schema or an algorithm that this release does not know.
        IntegrityError: It is malformed.
    """
    document = strict_json_object(raw, uri=origin, what="sidecar", remedy=_REMEDY)
    for field, known in (("schema", SCHEMA), ("algorithm", ALGORITHM)):
        if document.get(field) != known:
            raise RequestError(
                f"{origin}: the sidecar has {field} {document.get(field)!r}, this release reads {known!r}; {_REMEDY}"
            )
    try:
        chunk_bytes = _integer(document, "chunk_bytes")
        check_chunk_bytes(chunk_bytes)
        entries = document["files"]
        if not isinstance(entries, list):
            raise _MalformedError("files must be a list")
        files = tuple(_parse_file(entry, chunk_bytes) for entry in entries)
        if len({file.path for file in files}) != len(files):
            raise _MalformedError("a file is listed twice")
    except (KeyError, _MalformedError, RequestError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise IntegrityError(f"{origin}: the sidecar is malformed ({reason}); {_REMEDY}", file=origin) from error
    created_at = str(document.get("created_at", ""))
    return Sidecar(chunk_bytes=chunk_bytes, created_at=created_at, files=files, origin=origin)


def require_sidecar_place(path: str | os.PathLike[str]) -> None:
    """Makes sure that a sidecar can be written to a path or URI, as far as can be told, before hours of reading.

    Raises:
        RequestError: It cannot.
    """
    location = parse_location(path)
    if location.is_web:
        raise _not_written(location, "a web server takes no files")
    if not location.is_local:
        return
    folder = require_output_place(location.uri, "sidecar").parent
    # By os.path, which does not fail in a folder that may not be looked into.
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):  # noqa: PTH112
        raise _not_written(location, "the folder is missing, or not writable for this user")


def write_sidecar(sidecar: Sidecar, path: str | os.PathLike[str], *, retry: RetryConfig | None = None) -> None:
    """Writes a sidecar to a path or URI; a reader sees the old one or the new one, nothing between.

    Args:
        sidecar: What was recorded.
        path: Where to.
        retry: Bounds of the attempts, where that is behind a network.

    Raises:
        RequestError: It cannot be written there.
    """
    location = parse_location(path)
    document = {
        "schema": SCHEMA,
        "algorithm": ALGORITHM,
        "chunk_bytes": sidecar.chunk_bytes,
        "created_at": sidecar.created_at,
        "files": [asdict(file) for file in sidecar.files],
    }
    raw = json.dumps(document).encode() + b"\n"
    if location.is_local:
        require_output_place(location.uri, "sidecar")
    try:
        if location.is_local:
            write_output(location.uri, raw)
        else:
            _put(location, raw, retry or RetryConfig())
    except (OSError, RequestError, SourceError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _not_written(location, reason) from error


def _put(location: Location, raw: bytes, retry: RetryConfig) -> None:
    filesystem, path = fsspec_filesystem(location, retry)
    bound_s = request_bound_s(retry, len(raw))
    call_with_retry(
        lambda _attempt: call_filesystem(filesystem, "pipe_file", path, raw, bound_s=bound_s),
        uri=location.uri,
        what="writing it",
        retry=retry,
    )


def _not_written(location: Location, reason: str) -> RequestError:
    return RequestError(
        f"{location.uri}: the sidecar cannot be written ({reason}); give a path for it where you may write, "
        "and the same path when you load"
    )


def to_reference(sidecar: Sidecar, files: Sequence[FileInfo], *, is_web: bool = False) -> Reference:
    """The checksums in the order of the manifest's files.

    Args:
        sidecar: As it was recorded.
        files: Of the manifest.
        is_web: Whether they are on a web server.

    Raises:
        IntegrityError: The sidecar is of other files, or of another state of them.
    """
    recorded = {file.path: file for file in sidecar.files}
    names = [recorded_path(file.path, is_web=is_web) for file in files]
    gone = sorted(recorded.keys() - set(names))
    if gone:
        raise IntegrityError(
            f"{sidecar.origin}: the sidecar has the file {gone[0]!r}, the checkpoint has not; {_REMEDY}", file=gone[0]
        )
    checksums = []
    for name_in_it, file in zip(names, files, strict=True):
        entry = recorded.get(name_in_it) or sidecar.entry(name_in_it)
        for name, expected, actual in (
            ("size_bytes", entry.size_bytes, file.size_bytes),
            ("data_begin", entry.data_begin, file.data_begin),
        ):
            if expected != actual:
                raise IntegrityError(
                    f"{file.path}: {name} is {actual}, the sidecar {sidecar.origin} says {expected}; the file is not "
                    f"the one that was recorded: fetch it again, or if it was meant to change, {_REMEDY}",
                    file=file.path,
                )
        checksums.append(FileChecksums(header_crc32=entry.header_crc32, chunks_crc32=entry.chunks_crc32))
    return Reference(origin=sidecar.origin, chunk_bytes=sidecar.chunk_bytes, files=tuple(checksums))


def _parse_file(entry: object, chunk_bytes: int) -> SidecarFile:
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise _MalformedError("an entry of files has no path")
    path = entry["path"]
    size_bytes, data_begin = _integer(entry, "size_bytes"), _integer(entry, "data_begin")
    if not 8 <= data_begin <= size_bytes:
        raise _MalformedError(f"{path}: data_begin {data_begin} is not inside a file of {size_bytes} bytes")
    chunks = entry["chunks_crc32"]
    count = num_chunks(size_bytes, data_begin, chunk_bytes)
    if not isinstance(chunks, list) or len(chunks) != count or not all(map(_is_crc32, chunks)):
        raise _MalformedError(f"{path}: chunks_crc32 must be a list of {count} checksums")
    if not _is_crc32(entry["header_crc32"]):
        raise _MalformedError(f"{path}: header_crc32 must be a checksum of 32 bits")
    return SidecarFile(
        path=path,
        size_bytes=size_bytes,
        data_begin=data_begin,
        header_crc32=entry["header_crc32"],
        chunks_crc32=tuple(chunks),
    )


def _integer(document: Mapping[str, Any], field: str) -> int:
    value = document[field]
    if type(value) is not int or value < 0:
        raise _MalformedError(f"{field} must be a whole number of 0 or more, not {value!r}")
    return value


def _is_crc32(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32
