"""Looking around in S3 with obstore, and what its errors mean."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megamind_ray.errors import RequestError
from megamind_ray.io.versioned import no_ranges

__all__ = ["ObstoreFiles", "obstore_errors"]


class ObstoreFiles:
    """The few calls of an fsspec file system that looking around takes, answered by obstore.

    Not obstore's own one for fsspec. That works on futures, which its threads let go of after the answer was taken; one
    that does so while the interpreter ends aborts the process. Here a call ends in the thread that made it.

    Args:
        store: Gives obstore's store of a bucket.
    """

    def __init__(self, store: Callable[[str], Any]) -> None:
        self._store = store

    def info(self, path: str) -> dict[str, Any]:
        """What is at ``BUCKET/KEY``: an object, or else a folder where there are objects below it.

        Raises:
            FileNotFoundError: Neither.
            RequestError: There is no such bucket.
        """
        bucket, _, key = path.partition("/")
        try:
            with obstore_errors(f"s3://{path}"):
                head = _obstore().head(self._store(bucket), key)
        except FileNotFoundError:
            if not self.ls(path):
                raise
            return {"name": path, "type": "directory"}
        return {"name": path, "type": "file", "size": head["size"]}

    def ls(self, path: str, *, detail: bool = True) -> list[dict[str, Any]]:  # noqa: ARG002
        """Objects and folders directly in a folder of a bucket, or in the bucket.

        Raises:
            RequestError: There is no such bucket.
        """
        bucket, _, key = path.partition("/")
        with obstore_errors(f"s3://{path}"):
            found = _obstore().list_with_delimiter(self._store(bucket), key or None)
        return [
            *({"name": item["path"], "type": "file", "size": item["size"]} for item in found["objects"]),
            *({"name": prefix, "type": "directory"} for prefix in found["common_prefixes"]),
        ]

    def pipe_file(self, path: str, value: bytes) -> None:
        """Writes an object.

        Raises:
            RequestError: There is no such bucket.
        """
        bucket, _, key = path.partition("/")
        with obstore_errors(f"s3://{path}"):
            _obstore().put(self._store(bucket), key, value)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Nothing is kept."""


@contextmanager
def obstore_errors(uri: str) -> Iterator[None]:
    """What only the text of obstore's errors tells."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if "non-partial response" in text:
            raise no_ranges(uri) from error
        if "redirect without LOCATION" in text:
            raise RequestError(f"{uri}: the bucket is in another region; set AWS_REGION to its region") from error
        if "NoSuchBucket" in text:
            # Not from it: a missing file is looked for elsewhere, and this is more than that.
            raise RequestError(
                f"{uri}: no such bucket; check its name, and AWS_ENDPOINT_URL where that is set"
            ) from None
        raise


def _obstore() -> Any:
    return importlib.import_module("obstore")
