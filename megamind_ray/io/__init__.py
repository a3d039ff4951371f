"""Reading checkpoints: manifests, data files by ranges, checksums, retries. Torch-free."""

from megamind_ray.io.checkpoint import open_manifest
from megamind_ray.io.checksum import crc32
from megamind_ray.io.counters import ReadCounters, ReadKind, ReadTotals
from megamind_ray.io.digests import FileDigest, file_digest
from megamind_ray.io.local_source import LocalSource
from megamind_ray.io.opening import open_source
from megamind_ray.io.remote_source import FsspecSource
from megamind_ray.io.retry import call_with_retry, read_with_retry
from megamind_ray.io.sidecar import (
    Sidecar,
    SidecarFile,
    default_sidecar_path,
    read_sidecar,
    require_sidecar_place,
    to_reference,
    write_sidecar,
)
from megamind_ray.io.source import FileVersion, ShortReadError, Source
from megamind_ray.io.verify import DigestCheck, Mismatch, VerifyResult, record_checksums, verify_checksums

__all__ = [
    "DigestCheck",
    "FileDigest",
    "FileVersion",
    "FsspecSource",
    "LocalSource",
    "Mismatch",
    "ReadCounters",
    "ReadKind",
    "ReadTotals",
    "ShortReadError",
    "Sidecar",
    "SidecarFile",
    "Source",
    "VerifyResult",
    "call_with_retry",
    "crc32",
    "default_sidecar_path",
    "file_digest",
    "open_manifest",
    "open_source",
    "read_sidecar",
    "read_with_retry",
    "record_checksums",
    "require_sidecar_place",
    "to_reference",
    "verify_checksums",
    "write_sidecar",
]
