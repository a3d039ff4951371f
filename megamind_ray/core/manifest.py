"""A checkpoint without its weights: files, tensors, configuration, checksums to hold it to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megamind_ray.core.tensor import TensorInfo

__all__ = ["FileChecksums", "FileInfo", "Manifest", "Reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """One data file.

    Attributes:
        path: Relative to the checkpoint's folder, with ``/``; for a single file its name.
        size_bytes: Size when the manifest was read.
        data_begin: Absolute offset of the first byte after the header.
        mtime_ns: Modification time when the manifest was read, where the storage has one.
        etag: Version tag of the object, where the storage has one.
        metadata: ``__metadata__`` of the header.
    """

    path: str
    size_bytes: int
    data_begin: int
    mtime_ns: int | None = None
    etag: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChecksums:
    """Recorded CRC-32 values of one file; ``chunks_crc32[k]`` covers chunk k of the grid (docs/design/0004)."""

    header_crc32: int
    chunks_crc32: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Trusted checksums of a whole checkpoint.

    Attributes:
        origin: Where they come from, for messages.
        chunk_bytes: Grid that they were computed on.
        files: Per file of the manifest, in its order.
    """

    origin: str
    chunk_bytes: int
    files: tuple[FileChecksums, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The parsed index of a checkpoint.

    Attributes:
        uri: As the user gave it.
        root: Folder of ``files`` as a path or URI without a trailing slash.
        files: Data files in name order.
        tensors: By name on disk, in the order of (file, offset).
        config: The model's ``config.json``, empty where there is none.
        tied: Names that are absent on disk -> the name on disk whose bytes they share.
        reference: Trusted checksums, or None.
        header_bytes: Bytes read to build this.
    """

    uri: str
    root: str
    files: tuple[FileInfo, ...]
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, object] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    reference: Reference | None = None
    header_bytes: int = 0

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all tensors, as stored (packed formats count their containers)."""
        return sum(tensor.num_elements for tensor in self.tensors.values())

    @property
    def model_type(self) -> str | None:
        """``model_type`` of the configuration, where there is one."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else None

    def file_uri(self, file: int) -> str:
        """Path or URI of a file, for opening it and for messages."""
        return f"{self.root}/{self.files[file].path}"
