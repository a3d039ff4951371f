"""Checksums of whole files that their storage knows: who has no sidecar can be held to them (docs/design/0012)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

from megamind_ray.config import AwsEnvironment, RetryConfig, aws_environment
from megamind_ray.core.location import Location
from megamind_ray.errors import RequestError
from megamind_ray.io.checksum import crc32
from megamind_ray.io.failures import status_error
from megamind_ray.io.filesystems import call_filesystem, fsspec_filesystem
from megamind_ray.io.retry import call_with_retry, request_bound_s

__all__ = ["FileDigest", "Hasher", "digest_in_info", "digest_of_link", "file_digest", "new_hasher", "planned_digest"]

_HEX: Final = {"sha256": 64, "md5": 32, "crc64nvme": 16, "crc32": 8, "crc32c": 8}
_S3_CHECKSUMS: Final = (
    ("sha256", "ChecksumSHA256"),
    ("crc64nvme", "ChecksumCRC64NVME"),
    ("crc32", "ChecksumCRC32"),
    ("crc32c", "ChecksumCRC32C"),
)
# Packages that clients of these storages may have brought; nothing here needs them otherwise.
_OPTIONAL: Final = {
    "crc32c": (("google_crc32c", "extend"), ("awscrt.checksums", "crc32c")),
    "crc64nvme": (("awscrt.checksums", "crc64nvme"),),
}
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MD5: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A checksum of a whole file.

    Attributes:
        algorithm: ``sha256``, ``md5``, ``crc64nvme``, ``crc32c`` or ``crc32``.
        value: In hexadecimal, lower case.
        origin: Who says so, for messages.
        copy: Path or URI of the copy whose storage says so, secrets masked; empty if it is the file's own storage.
    """

    algorithm: str
    value: str
    origin: str
    copy: str = ""

    def same_bytes(self, other: FileDigest) -> bool:
        """Whether both prove that two files hold the same bytes; only a cryptographic length of digest can."""
        return self.algorithm in ("sha256", "md5") and (self.algorithm, self.value) == (other.algorithm, other.value)


class Hasher(Protocol):
    """Takes a file piece by piece, in order."""

    def update(self, data: memoryview, /) -> object:
        """The next piece; the GIL is released while a large one is summed."""

    def hexdigest(self) -> str:
        """The checksum of all pieces so far."""


def file_digest(
    location: Location,
    *,
    retry: RetryConfig | None = None,
    sleep: Callable[[float], object] = time.sleep,
    stopped: Callable[[], bool] = lambda: False,
) -> FileDigest | None:
    """The checksum of a whole file that its storage knows, as the file is now; None where it knows none.

    - a local file that is a link into the blobs of a Hugging Face cache: SHA-256, the name of its blob;
    - ``s3://``: SHA-256 over the full object where it was stored with that; else the MD5 that is the ETag of an object
      that came in one part and is not encrypted with a key of the user's; else a CRC over the full object;
    - ``gs://``: MD5, or CRC-32C; ``az://``: MD5; ``hf://``: SHA-256 of files in LFS or Xet;
    - ``http(s)://``: none, the ETag of a web server may be anything.

    Nothing of the file itself is read. An algorithm that this installation cannot compute counts as none.

    Args:
        location: The file.
        retry: Bounds of the attempts.
        sleep: As in ``call_with_retry``.
        stopped: As there.

    Raises:
        RequestError: No such file, no permission, or a package is missing.
        SourceError: The storage does not answer.
    """
    if location.is_local:
        return digest_of_link(location.uri)
    if location.is_web:
        return None
    bounds = retry or RetryConfig()

    def look(_attempt: int) -> FileDigest | None:
        if location.scheme == "s3":
            return _s3_digest(_s3_head(location, bounds))
        filesystem, path = fsspec_filesystem(location, bounds)
        options = {"expand_info": True} if location.scheme == "hf" else {}
        return digest_in_info(call_filesystem(filesystem, "info", path, bound_s=request_bound_s(bounds), **options))

    return call_with_retry(
        look, uri=location.uri, what="asking for its checksum", retry=bounds, sleep=sleep, stopped=stopped
    )


def planned_digest(location: Location, etag: str | None) -> FileDigest | None:
    """The checksum of a file when its manifest was read, from what the manifest kept; no request is made.

    Only to be compared with what another storage knows. An ETag does not tell by itself whether it is an MD5: what is
    none is equal to none of them, while a file that is read would seem damaged.

    Args:
        location: The file.
        etag: ``FileInfo.etag``.
    """
    if location.is_local:
        return digest_of_link(location.uri)
    return _etag_digest(etag) if location.scheme == "s3" else None


def digest_of_link(path: str) -> FileDigest | None:
    """The SHA-256 that is the name of the blob in a Hugging Face cache which a file is a link to."""
    try:
        target = Path(path).readlink()
    except OSError:  # no link; whether there is a file at all is found out by who reads it
        return None
    if target.parent.name != "blobs" or not _SHA256.fullmatch(target.name):
        return None
    return FileDigest("sha256", target.name, "the name of its blob in the Hugging Face cache")


def digest_in_info(info: Mapping[str, Any]) -> FileDigest | None:
    """The checksum in what an fsspec file system says of a file."""
    lfs = info.get("lfs")
    if isinstance(lfs, Mapping) and _SHA256.fullmatch(str(lfs.get("sha256"))):
        return FileDigest("sha256", str(lfs["sha256"]), "the hub's SHA-256 of it")
    settings = info.get("content_settings")  # Azure's client has a class for them
    content_md5 = (
        settings.get("content_md5") if isinstance(settings, Mapping) else getattr(settings, "content_md5", None)
    )
    for algorithm, value, origin in (
        ("md5", info.get("md5Hash"), "the bucket's MD5 of it"),
        ("md5", content_md5 or info.get("content_md5"), "the Content-MD5 of the blob"),
        ("crc32c", info.get("crc32c"), "the bucket's CRC-32C of it"),
    ):
        digest = _from_base64(algorithm, value, origin)
        if digest is not None:
            return digest
    return None


def new_hasher(algorithm: str) -> Hasher:
    """Something that computes an algorithm of ``FileDigest``.

    Raises:
        RequestError: The package that computes it is not installed.
    """
    if algorithm == "crc32":
        return _Crc(crc32, 8)
    if algorithm in _OPTIONAL:
        function = _optional_crc(algorithm)
        if function is None:
            packages = " or ".join(module.partition(".")[0] for module, _ in _OPTIONAL[algorithm])
            raise RequestError(f"{algorithm} cannot be computed here; install {packages}")
        return _Crc(function, _HEX[algorithm])
    return hashlib.new(algorithm, usedforsecurity=False)


def _s3_head(location: Location, retry: RetryConfig) -> Mapping[str, Any]:
    """What S3 says of an object when it is asked for checksums, which neither obstore nor ``info`` of s3fs do.

    Nothing without botocore: an ETag alone does not tell whether it is an MD5.
    """
    try:
        errors = importlib.import_module("botocore.exceptions")
    except ImportError:
        return {}
    bucket, _, key = location.uri.removeprefix("s3://").partition("/")
    client = _s3_client(aws_environment(), retry)
    try:
        head: Mapping[str, Any] = client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
    except errors.ClientError as error:
        answer = error.response.get("ResponseMetadata", {})
        status = int(answer.get("HTTPStatusCode", 500))
        raise status_error(status, f"HeadObject of {location.uri}", answer.get("HTTPHeaders", {})) from error
    return head


@lru_cache(maxsize=4)
def _s3_client(environment: AwsEnvironment, retry: RetryConfig) -> Any:
    """One for many objects; a changed environment gives a new one."""
    session = importlib.import_module("botocore.session").get_session()
    settings = importlib.import_module("botocore.config").Config(
        connect_timeout=retry.request_s, read_timeout=retry.request_s, retries={"total_max_attempts": 1}
    )
    return session.create_client("s3", endpoint_url=environment.endpoint, config=settings)


os.register_at_fork(after_in_child=_s3_client.cache_clear)


def _s3_digest(head: Mapping[str, Any]) -> FileDigest | None:
    digests = []
    if str(head.get("ChecksumType", "FULL_OBJECT")) == "FULL_OBJECT":
        # A checksum of checksums, of an object in parts, has the number of parts behind it and is no base64.
        digests = [
            _from_base64(algorithm, head.get(key), f"the object's {key.removeprefix('Checksum')}")
            for algorithm, key in _S3_CHECKSUMS
        ]
    # Encrypted with a key of the user's, an object has an ETag that is not of the bytes that are read.
    if not head.get("SSECustomerAlgorithm") and str(head.get("ServerSideEncryption") or "AES256") == "AES256":
        digests.insert(1, _etag_digest(head.get("ETag")))
    return next((digest for digest in digests if digest is not None), None)


def _etag_digest(etag: object) -> FileDigest | None:
    text = str(etag).strip('"').lower()
    return FileDigest("md5", text, "the ETag of the object") if _MD5.fullmatch(text) else None


def _from_base64(algorithm: str, value: object, origin: str) -> FileDigest | None:
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except binascii.Error:
            return None
    if not isinstance(value, bytes | bytearray) or len(value) * 2 != _HEX[algorithm]:
        return None
    if algorithm in _OPTIONAL and _optional_crc(algorithm) is None:
        return None
    return FileDigest(algorithm, bytes(value).hex(), origin)


class _Crc:
    def __init__(self, function: Callable[[Any, int], int], num_digits: int) -> None:
        self._function = function
        self._num_digits = num_digits
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = self._function(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:0{self._num_digits}x}"


def _optional_crc(algorithm: str) -> Callable[[Any, int], int] | None:
    """From the first package that is there; takes bytes and the checksum of what came before."""
    for module, name in _OPTIONAL[algorithm]:
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        if module == "google_crc32c":  # the other way round
            return lambda data, value: int(function(value, bytes(data)))
        return lambda data, value: int(function(bytes(data), value))
    return None
