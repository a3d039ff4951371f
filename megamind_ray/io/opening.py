"""Opening data files, whatever storage they are in."""

from __future__ import annotations

from collections.abc import Sequence

from megamind_ray.config import IoConfig, RetryConfig
from megamind_ray.core.location import Location, parse_location
from megamind_ray.core.manifest import FileInfo
from megamind_ray.errors import IntegrityError, MegamindError
from megamind_ray.io.filesystems import fsspec_filesystem
from megamind_ray.io.local_source import LocalSource
from megamind_ray.io.remote_source import FsspecSource
from megamind_ray.io.s3 import open_s3
from megamind_ray.io.source import FileVersion, Source, storage_errors

__all__ = ["open_location", "open_source", "why_unreadable"]


def open_location(location: Location, *, io: IoConfig | None = None, retry: RetryConfig | None = None) -> Source:
    """Opens a file as it is now.

    Args:
        location: The file.
        io: How to read it; the default settings by default.
        retry: How long one request may take.

    Raises:
        RequestError: No such file, no permission, not a file, or a package is missing.
        OSError: The storage did not answer.
    """
    if location.is_local:
        with storage_errors(location.uri):
            return LocalSource(location.uri, direct=(io or IoConfig()).direct)
    retry = retry or RetryConfig()
    if location.is_web:
        # Here, because local checkpoints, the common case, do without what it imports.
        from megamind_ray.io.http_source import HttpSource

        return HttpSource(location.uri, retry)
    if location.scheme == "hf":
        from megamind_ray.io.hub import open_hub

        return open_hub(location, retry)
    if location.scheme == "s3":
        return open_s3(location, io or IoConfig(), retry)
    filesystem, path = fsspec_filesystem(location, retry)
    return FsspecSource(filesystem, path, location.uri, retry)


def open_source(
    uri: str, expected: FileInfo, *, io: IoConfig | None = None, retry: RetryConfig | None = None
) -> Source:
    """Opens a data file for a plan that was made from ``expected``.

    Args:
        uri: ``Manifest.file_uri`` of the file.
        expected: The file as it was when the manifest was read.
        io: How to read it; the default settings by default.
        retry: How long one request may take.

    Raises:
        IntegrityError: The file changed since (size, modification time or version tag).
        RequestError: No such file (any more), or no permission.
        OSError: The storage did not answer.
    """
    source = open_location(parse_location(uri), io=io, retry=retry)
    planned = FileVersion(expected.size_bytes, expected.mtime_ns, expected.etag)
    change = planned.difference(source.version)
    if change is not None:
        source.close()
        raise IntegrityError(f"{uri}: changed since it was planned ({change}); plan or load again", file=uri)
    return source


def why_unreadable(root: str, files: Sequence[FileInfo]) -> str:
    """Why this machine cannot read a checkpoint's files as they were planned; empty where it can.

    Args:
        root: ``Manifest.root``, a path.
        files: Of the manifest.
    """
    for info in files:
        try:
            open_source(f"{root}/{info.path}", info).close()
        except MegamindError as error:
            return error.message
        except OSError as error:
            return f"{root}/{info.path}: {error.strerror or error}"
    return ""
