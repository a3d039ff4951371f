"""Which client reads ``s3://``, and what it is told (docs/design/0011).

obstore, because it is several times as fast as the others and checks what comes; s3fs where obstore is not installed,
or where fsspec's own configuration has settings for it. pyarrow's is left out: it takes bytes of another range for
right.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from megamind_ray.config import AwsEnvironment, IoConfig, RetryConfig, aws_environment
from megamind_ray.core.location import Location
from megamind_ray.errors import RequestError
from megamind_ray.io.retry import request_bound_s
from megamind_ray.io.s3_files import ObstoreFiles
from megamind_ray.io.s3_source import ObstoreSource, S3fsSource
from megamind_ray.io.source import Source

__all__ = ["open_s3", "s3_client_name", "s3_filesystem"]

_CREDENTIALS_TTL: Final = timedelta(minutes=5)
_INSTALL: Final = "run: pip install 'megamind-ray[s3]'"
_first_user: int | None = None
"""The process that started the threads of obstore. One that was forked from it has none, and would wait for ever."""


def s3_client_name(environment: AwsEnvironment | None = None) -> str:
    """``obstore`` or ``s3fs``: the best that is installed and can use the credentials that are set up.

    In a process that was forked from one that had used obstore, obstore does not work.

    Raises:
        RequestError: None is installed that can.
    """
    import fsspec.config

    environment = environment or aws_environment()
    has_s3fs = _installed("s3fs")
    if has_s3fs and fsspec.config.conf.get("s3"):
        return "s3fs"
    is_forked = _first_user not in (None, os.getpid())
    # Without botocore, obstore knows no profiles and no files with credentials.
    if _installed("obstore") and not is_forked and (_installed("botocore") or not environment.needs_files):
        return "obstore"
    if has_s3fs:
        return "s3fs"
    if is_forked:
        raise RequestError(
            f"s3://: was read by process {_first_user}, from which this one was forked: its client does not work here; "
            "start processes with spawn (multiprocessing.set_start_method('spawn')), or install s3fs"
        )
    if _installed("obstore"):
        raise RequestError(f"s3://: credentials are in files of the AWS tools, which need botocore; {_INSTALL}")
    raise RequestError(f"s3:// needs a package that is not installed (obstore or s3fs); {_INSTALL}")


def s3_filesystem(location: Location, retry: RetryConfig) -> tuple[Any, str]:
    """The file system to look around in, and the path in it.

    Raises:
        RequestError: No client can be had, or its settings are wrong.
    """
    path = location.uri.removeprefix("s3://")
    environment = aws_environment()
    if s3_client_name(environment) == "s3fs":
        return _s3fs(environment, retry), path
    request_s = request_bound_s(retry)
    return ObstoreFiles(lambda bucket: _store(environment, bucket, retry, request_s)), path


def open_s3(location: Location, io: IoConfig, retry: RetryConfig) -> Source:
    """Opens an object.

    Raises:
        RequestError: No such object, no permission, no client can be had, or its settings are wrong.
        OSError: The storage did not answer.
    """
    bucket, _, key = location.uri.removeprefix("s3://").partition("/")
    if not key:
        raise RequestError(f"{location.uri}: is a bucket, not a file")
    environment = aws_environment()
    if s3_client_name(environment) == "s3fs":
        return S3fsSource(_s3fs(environment, retry), bucket, key, location.uri, retry)
    return ObstoreSource(_store(environment, bucket, retry, request_bound_s(retry, io.extent_bytes)), key, location.uri)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class _BotocoreCredentials:
    """Credentials as botocore finds them: environment, profiles, roles, instances. Renewed when they expire."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        now = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            # botocore gives none that end sooner than in ten minutes.
            "expires_at": datetime.now(UTC) + _CREDENTIALS_TTL,
        }


def _settings(environment: AwsEnvironment, retry: RetryConfig, request_s: float) -> dict[str, Any]:
    """What obstore is told; what it is not told it reads from the ``AWS_*`` variables itself."""
    config: dict[str, Any] = {}
    endpoint, provider = environment.endpoint, None
    if _installed("botocore"):
        found = _botocore_settings()
        endpoint = endpoint or found["endpoint"]
        if found["region"] is not None:
            config["region"] = found["region"]
        if found["credentials"] is not None:
            provider = _BotocoreCredentials(found["credentials"])
        else:
            config["skip_signature"] = True
    if endpoint is not None:
        config["endpoint"] = endpoint
    silence = timedelta(seconds=retry.request_s)
    return {
        "config": config,
        "credential_provider": provider,
        "client_options": {
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
            "connect_timeout": silence,
            "read_timeout": silence,
            "timeout": timedelta(seconds=request_s),
        },
        # All attempts are those of io.retry, or they would multiply.
        "retry_config": {"max_retries": 0, "retry_timeout": silence},
    }


def _botocore_settings() -> dict[str, Any]:
    session = importlib.import_module("botocore.session").get_session()
    errors = importlib.import_module("botocore.exceptions")
    providers = importlib.import_module("botocore.configprovider")
    try:
        endpoint = providers.ConfiguredEndpointProvider(
            full_config=session.full_config, scoped_config=session.get_scoped_config(), client_name="s3"
        ).provide()
        return {
            "endpoint": endpoint,
            "region": session.get_config_variable("region"),
            "credentials": session.get_credentials(),
        }
    except errors.BotoCoreError as error:
        raise RequestError(f"s3://: the settings of the AWS tools cannot be used: {error}; correct them") from error


def _obstore(module: str) -> Any:
    global _first_user
    _first_user = os.getpid()
    return importlib.import_module(module)


@lru_cache(maxsize=16)
def _store(environment: AwsEnvironment, bucket: str, retry: RetryConfig, request_s: float) -> Any:
    """A client for one bucket. A changed environment gives a new one, which is how the variables are read again."""
    store: Any = _obstore("obstore.store")
    return store.S3Store(bucket, **_settings(environment, retry, request_s))


def _new_s3fs(_environment: AwsEnvironment, retry: RetryConfig) -> Any:
    s3fs: Any = importlib.import_module("s3fs")
    filesystem = s3fs.S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        config_kwargs={
            "connect_timeout": retry.request_s,
            "read_timeout": retry.request_s,
            "retries": {"total_max_attempts": 1},
        },
    )
    filesystem.retries = 1  # its own, around those of botocore
    filesystem.connect()  # reads models of the API for a second: not part of any request
    return filesystem


_s3fs: Callable[[AwsEnvironment, RetryConfig], Any] = lru_cache(maxsize=4)(_new_s3fs)
# Clients of the process that this one was forked from. Let go, they would tell the kernel, with which both processes
# have one list of sockets, to wake nobody any more for theirs.
_left_alone: list[object] = []


def _begin_anew() -> None:
    """In a child: connections are the parent's, and so is the thread that s3fs works on."""
    global _s3fs
    _left_alone.append(_s3fs)
    _s3fs = lru_cache(maxsize=4)(_new_s3fs)


os.register_at_fork(after_in_child=_begin_anew)
