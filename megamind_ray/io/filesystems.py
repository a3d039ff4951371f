"""The fsspec file system of a location: for looking around, and for reading where nothing here does it better."""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import Future
from typing import Any, Final

from megamind_ray.config import RetryConfig
from megamind_ray.core.location import Location
from megamind_ray.errors import RequestError
from megamind_ray.io.s3 import s3_filesystem

__all__ = ["call_filesystem", "fsspec_filesystem"]

# Scheme -> the extra of this package that brings its file system; None where fsspec itself has it.
_EXTRAS: Final = {"gs": "gcs", "az": "azure", "hf": "hf", "memory": None}
# Listings that fsspec caches would hide that a file changed.
_OPTIONS: Final = {"use_listings_cache": False}
_LAST_WAIT_S: Final = 1.0


def fsspec_filesystem(location: Location, retry: RetryConfig | None = None) -> tuple[Any, str]:
    """The file system of a remote location, and the path in it.

    Raises:
        RequestError: The package with the file system is not installed; the message says which extra brings it. Or it
            is a web server, which has none.
    """
    if location.is_web:
        raise RequestError(
            f"{location.uri}: a web server is no file system, its files can be read and no more; give a path, s3://, "
            "gs:// or az:// for this"
        )
    import fsspec.core  # here, because local checkpoints, the common case, do without it

    if location.scheme == "s3":
        return s3_filesystem(location, retry or RetryConfig())
    assert location.scheme is not None
    extra = _EXTRAS[location.scheme]
    try:
        filesystem, path = fsspec.core.url_to_fs(location.uri, **(_OPTIONS if extra else {}))
    except ImportError as error:
        raise RequestError(
            f"{location.uri}: {location.scheme}:// needs a package that is not installed ({error}); "
            f"run: pip install 'megamind-ray[{extra}]'"
        ) from error
    return filesystem, path


def call_filesystem(filesystem: Any, method: str, path: str, *others: Any, bound_s: float, **arguments: Any) -> Any:
    """Calls a method of a file system on a path, and waits no longer than the bound.

    A call of an asynchronous file system is then cancelled; one of any other is left to end by itself, its result is
    dropped.

    Args:
        filesystem: Of fsspec's kind.
        method: ``info``, ``ls``, ``cat_file``, ``pipe_file``.
        path: In it.
        others: What comes behind the path; the file systems do not agree on names for it.
        bound_s: Longest wait.
        arguments: By keyword.

    Raises:
        TimeoutError: No result within the bound.
    """
    if getattr(filesystem, "async_impl", False):
        sync: Any = importlib.import_module("fsspec.asyn").sync
        return sync(filesystem.loop, getattr(filesystem, f"_{method}"), path, *others, timeout=bound_s, **arguments)
    result: Future[Any] = Future()

    def call() -> None:
        try:
            result.set_result(getattr(filesystem, method)(path, *others, **arguments))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            result.set_exception(error)

    # A thread of its own that nobody has to join: a pool's would keep the interpreter from ending.
    thread = threading.Thread(target=call, name=f"megamind-{method}", daemon=True)
    thread.start()
    try:
        return result.result(bound_s)
    except KeyboardInterrupt:
        # Native code that comes back while the interpreter ends can abort it: what is about to answer may do so first.
        thread.join(_LAST_WAIT_S)
        raise
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer within {bound_s:g} s") from None
