"""A file that fsspec reaches, read by ranges."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from megamind_ray.errors import RequestError
from megamind_ray.io.source import FileVersion, OpenSource, ShortReadError, storage_errors

__all__ = ["FsspecSource"]


class FsspecSource(OpenSource):
    """A file of an fsspec file system, read by ranges.

    Args:
        filesystem: The file system.
        path: Path in it.
        uri: For messages.

    Raises:
        RequestError: No such file, no permission, or its size is not known.
        OSError: The storage did not answer.
    """

    def __init__(self, filesystem: Any, path: str, uri: str) -> None:
        self._filesystem = filesystem
        self._path = path
        with storage_errors(uri):
            version = _remote_version(filesystem.info(path), uri)
        super().__init__(uri, version)

    def read_into(self, offset: int, buffer: memoryview, *, past_cache: bool = False) -> None:
        view = buffer.cast("B")
        self.require_inside(offset, view.nbytes)
        if view.nbytes == 0:
            return
        with storage_errors(self.uri):
            data = self._filesystem.cat_file(self._path, start=offset, end=offset + view.nbytes)
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
            return _remote_version(self._filesystem.info(self._path), self.uri)

    def close(self) -> None:
        """Nothing is held between reads."""


def _remote_version(info: dict[str, Any], uri: str) -> FileVersion:
    if info.get("type") == "directory":
        raise RequestError(f"{uri}: is a folder, not a file")
    size = info.get("size")
    if not isinstance(size, int):
        raise RequestError(f"{uri}: the storage does not say its size; download the checkpoint and load the copy")
    etag = next((str(info[key]) for key in ("ETag", "etag", "generation", "blob_id") if info.get(key)), None)
    keys = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created")
    changed = next((info[key] for key in keys if info.get(key)), None)
    return FileVersion(size, _nanoseconds(changed), etag)


def _nanoseconds(moment: object) -> int | None:
    """A moment as file systems give it: seconds, a datetime, or text as in HTTP or ISO 8601."""
    if isinstance(moment, str):
        for parse in (datetime.fromisoformat, parsedate_to_datetime):
            with suppress(ValueError):
                return round(parse(moment).timestamp() * 1e9)
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    if isinstance(moment, int | float):
        return round(moment * 1e9)
    return None
