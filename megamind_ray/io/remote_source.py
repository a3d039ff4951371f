"""A file that fsspec reaches, read by ranges: what has no reader of its own here."""

from __future__ import annotations

from typing import Any

from megamind_ray.config import RetryConfig
from megamind_ray.errors import RequestError
from megamind_ray.io.filesystems import call_filesystem
from megamind_ray.io.retry import request_bound_s
from megamind_ray.io.source import FileVersion, OpenSource, ShortReadError, storage_errors
from megamind_ray.io.times import nanoseconds

__all__ = ["FsspecSource"]


class FsspecSource(OpenSource):
    """A file of an fsspec file system, read by ranges.

    Args:
        filesystem: The file system.
        path: Path in it.
        uri: For messages.
        retry: How long one call may take.

    Raises:
        RequestError: No such file, no permission, or its size is not known.
        OSError: The storage did not answer.
    """

    def __init__(self, filesystem: Any, path: str, uri: str, retry: RetryConfig | None = None) -> None:
        self._filesystem = filesystem
        self._path = path
        self._retry = retry or RetryConfig()
        with storage_errors(uri):
            version = _remote_version(self._call("info", 0), uri)
        super().__init__(uri, version)

    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:  # noqa: ARG002
        view = buffer.cast("B")
        self.require_inside(offset, view.nbytes)
        if view.nbytes == 0:
            return
        with storage_errors(self.uri):
            data = self._call("cat_file", view.nbytes, start=offset, end=offset + view.nbytes)
        if len(data) > view.nbytes:
            raise RequestError(
                f"{self.uri}: gave {len(data)} bytes where {view.nbytes} were asked for, so it does not serve byte "
                "ranges; download the checkpoint, or serve it from a server that does"
            )
        if len(data) < view.nbytes:
            raise ShortReadError(f"{len(data)} bytes came of {view.nbytes} at offset {offset}")
        view[:] = data

    def current_version(self) -> FileVersion:
        with storage_errors(self.uri):
            self._filesystem.invalidate_cache(self._path)
            return _remote_version(self._call("info", 0), self.uri)

    def close(self) -> None:
        """Nothing is held between reads."""

    def _call(self, method: str, num_bytes: int, **arguments: Any) -> Any:
        bound_s = request_bound_s(self._retry, num_bytes)
        return call_filesystem(self._filesystem, method, self._path, bound_s=bound_s, **arguments)


def _remote_version(info: dict[str, Any], uri: str) -> FileVersion:
    if info.get("type") == "directory":
        raise RequestError(f"{uri}: is a folder, not a file")
    size = info.get("size")
    if not isinstance(size, int):
        raise RequestError(f"{uri}: the storage does not say its size; download the checkpoint and load the copy")
    etag = next((str(info[key]) for key in ("ETag", "etag", "generation", "blob_id") if info.get(key)), None)
    keys = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")
    changed = next((info[key] for key in keys if info.get(key)), None)
    return FileVersion(size, nanoseconds(changed), etag)
