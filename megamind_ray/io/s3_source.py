"""An object of an S3 store, read by ranges: through obstore, or through s3fs."""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

from megamind_ray.config import RetryConfig
from megamind_ray.errors import RequestError
from megamind_ray.io.retry import request_bound_s
from megamind_ray.io.s3_files import obstore_errors
from megamind_ray.io.source import FileVersion, storage_errors
from megamind_ray.io.times import nanoseconds
from megamind_ray.io.versioned import VersionedSource, fill, no_ranges
from megamind_ray.units import MIB

__all__ = ["ObstoreSource", "S3fsSource"]

# Bodies as a stream of such pieces are faster than whole ones: a piece is still in the cache when it is copied.
_PIECE_BYTES: Final = MIB


class ObstoreSource(VersionedSource):
    """An object, read by obstore, which compares the range in each answer with the one asked for.

    Args:
        store: obstore's store of the bucket.
        key: Of the object.
        uri: For messages.

    Raises:
        RequestError: No such object, or no permission.
        OSError: The storage did not answer.
    """

    def __init__(self, store: Any, key: str, uri: str) -> None:
        self._obstore: Any = importlib.import_module("obstore")
        self._store, self._key, self._process = store, key, os.getpid()
        with storage_errors(uri), obstore_errors(uri):
            version = _version(self._obstore.head(store, key))
        super().__init__(uri, version)

    def fetch(self, offset: int, view: memoryview, *, summed: bool) -> int:
        """As ``VersionedSource.fetch``."""
        _require_process(self._process, self.uri)
        with obstore_errors(self.uri):
            options = {"range": (offset, offset + view.nbytes)}
            answer = self._obstore.get(self._store, self._key, options=options)
            self.require_same(_version(answer.meta))
            pieces = (memoryview(data) for data in answer.stream(min_chunk_size=_PIECE_BYTES))
            return fill(view, pieces, offset, summed=summed)

    def current_version(self) -> FileVersion:
        """State of the object now."""
        _require_process(self._process, self.uri)
        with storage_errors(self.uri), obstore_errors(self.uri):
            return _version(self._obstore.head(self._store, self._key))


class S3fsSource(VersionedSource):
    """An object, read with the calls of s3fs, whose answers are checked here.

    Args:
        filesystem: s3fs's.
        bucket: Its name.
        key: Of the object.
        uri: For messages.
        retry: How long a request may take.

    Raises:
        RequestError: No such object, or no permission.
        OSError: The storage did not answer.
    """

    def __init__(self, filesystem: Any, bucket: str, key: str, uri: str, retry: RetryConfig) -> None:
        self._filesystem, self._retry, self._process = filesystem, retry, os.getpid()
        self._object = {"Bucket": bucket, "Key": key}
        self._sync: Any = importlib.import_module("fsspec.asyn").sync
        with storage_errors(uri):
            version = self._ask_version()
        super().__init__(uri, version)

    def fetch(self, offset: int, view: memoryview, *, summed: bool) -> int:
        """As ``VersionedSource.fetch``."""
        _require_process(self._process, self.uri)
        end, bound_s = offset + view.nbytes, request_bound_s(self._retry, view.nbytes)
        answer, data = self._sync(self._filesystem.loop, self._get, offset, end, timeout=bound_s)
        if "ContentRange" not in answer and (offset, end) != (0, self.size_bytes):
            raise no_ranges(self.uri)
        self.require_range(answer.get("ContentRange"), offset, end, _told(answer, self.size_bytes))
        return fill(view, [data], offset, summed=summed)

    def current_version(self) -> FileVersion:
        """State of the object now."""
        _require_process(self._process, self.uri)
        with storage_errors(self.uri):
            return self._ask_version()

    def _ask_version(self) -> FileVersion:
        answer = self._sync(
            self._filesystem.loop,
            self._filesystem._call_s3,
            "head_object",
            **self._object,
            timeout=request_bound_s(self._retry),
        )
        return _told(answer, int(answer["ContentLength"]))

    async def _get(self, begin: int, end: int) -> tuple[dict[str, Any], bytes]:
        answer = await self._filesystem._call_s3("get_object", **self._object, Range=f"bytes={begin}-{end - 1}")
        async with answer["Body"] as body:
            return answer, await body.read()


def _require_process(process: int, uri: str) -> None:
    if process != os.getpid():
        raise RequestError(
            f"{uri}: was opened by process {process}, from which this one was forked, and cannot be read here; open it "
            "after the fork, or start processes with spawn (multiprocessing.set_start_method('spawn'))"
        )


def _version(meta: Any) -> FileVersion:
    return FileVersion(int(meta["size"]), nanoseconds(meta["last_modified"]) or None, meta["e_tag"])


def _told(answer: dict[str, Any], size_bytes: int) -> FileVersion:
    return FileVersion(size_bytes, nanoseconds(answer.get("LastModified")), answer.get("ETag"))
