"""Tensors -> the files that would hold them, byte for byte as transformers and safetensors write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from megamind_ray.core.manifest import FileInfo
from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.planning.shapes.tensors import TensorShape

__all__ = ["FILE_BYTES", "lay_out"]

# The limit that most checkpoints on the hub were written with.
FILE_BYTES: Final = 5_000_000_000
_METADATA: Final = {"format": "pt"}
_LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 8
_ORDER: Final = {dtype: position for position, dtype in enumerate(DType)}


def lay_out(
    tensors: Iterable[TensorShape], file_bytes: int = FILE_BYTES
) -> tuple[tuple[FileInfo, ...], dict[str, TensorInfo]]:
    """Files in name order, and tensors in the order of (file, offset).

    Args:
        tensors: In the order of the module; a file is a run of them.
        file_bytes: Most bytes of tensors in a file; a tensor of more than that has one for itself.
    """
    shards = _shards(tensors, file_bytes)
    infos: dict[str, TensorInfo] = {}
    files: list[FileInfo] = []
    for number, shard in enumerate(shards):
        single = len(shards) == 1
        path = "model.safetensors" if single else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        # Large elements first, so that all are aligned, then by name.
        shard.sort(key=lambda tensor: (-_ORDER[tensor.dtype], tensor.name))
        begin = data_begin = _header_bytes(shard)
        for tensor in shard:
            end = begin + tensor.nbytes
            infos[tensor.name] = TensorInfo(tensor.name, tensor.dtype, tensor.shape, number, begin, end)
            begin = end
        files.append(FileInfo(path=path, size_bytes=begin, data_begin=data_begin, metadata=_METADATA))
    return tuple(files), infos


def _shards(tensors: Iterable[TensorShape], file_bytes: int) -> list[list[TensorShape]]:
    shards: list[list[TensorShape]] = []
    current: list[TensorShape] = []
    current_bytes = 0
    for tensor in tensors:
        size = tensor.nbytes
        if size > file_bytes:
            shards.append([tensor])
            continue
        if current and current_bytes + size > file_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(tensor)
        current_bytes += size
    return [*shards, current] if current else shards


def _header_bytes(tensors: Sequence[TensorShape]) -> int:
    """Where the data begins: behind the length, and the header as compact JSON, padded."""
    header: dict[str, object] = {"__metadata__": _METADATA}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype.label, "shape": tensor.shape, "data_offsets": (begin, end)}
        begin = end
    length = len(json.dumps(header, separators=(",", ":")))
    return _LENGTH_BYTES + length + -length % _ALIGNMENT
