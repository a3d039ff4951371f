"""The checkpoint that loaders are compared on, and what its tensors have to be, read from the files by their format.

Nothing here uses a loader under test: the reference is the files' own bytes at the offsets of their headers.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megamind_ray.testing.architectures import llama_specs
from megamind_ray.testing.checkpoints import write_checkpoint

__all__ = ["Checkpoint", "Place", "open_checkpoint", "write_llama", "wrong_tensors"]

# Widths are multiples of this: heads of 64, three query heads for each key head.
_WIDTH_STEP = 192
_MAX_LAYERS = 32
Bytes = np.ndarray[Any, Any]
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor in a file.

    Attributes:
        name: On disk.
        file: Index of its file.
        begin: First byte in the file.
        end: One past the last byte.
        dtype: Of its elements.
        shape: Its dims.
    """

    name: str
    file: int
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder of safetensors files.

    Attributes:
        folder: Where it is.
        files: Its data files.
        places: Every tensor, in file order.
    """

    folder: Path
    files: tuple[Path, ...]
    places: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(place.end - place.begin for place in self.places)


def write_llama(folder: Path, *, total_bytes: int, num_files: int = 5) -> Checkpoint:
    """Writes a Llama in bf16 of about this size: up to 32 layers (about 290 tensors), as wide as the size asks for.

    Args:
        folder: Where; it is created.
        total_bytes: Of all tensors together.
        num_files: Data files.
    """
    config = _llama_config(total_bytes)
    write_checkpoint(folder, llama_specs(config), config, num_files=num_files)
    return open_checkpoint(folder)


def _llama_config(total_bytes: int) -> dict[str, object]:
    # A layer of width w has 2 w^2 (queries, output), 2/3 w^2 (keys, values) and 9 w^2 (the gated part) elements.
    per_layer = (2 + 2 / 3 + 9) * 2
    steps = math.sqrt(total_bytes / (_MAX_LAYERS * per_layer)) / _WIDTH_STEP
    width = max(1, round(steps)) * _WIDTH_STEP
    vocabulary = 32_000 if width >= 1024 else 4_000
    layers = round((total_bytes - vocabulary * width * 2) / (per_layer * width**2))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "vocab_size": vocabulary,
        "head_dim": 64,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 192,
        "num_hidden_layers": max(2, layers),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads the headers: eight bytes of length, then JSON with offsets from the end of the header."""
    files = tuple(sorted(folder.glob("*.safetensors")))
    places: list[Place] = []
    for index, path in enumerate(files):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            places.append(Place(name=name, file=index, begin=begin, end=end, dtype=dtype, shape=shape))
    return Checkpoint(folder=folder, files=files, places=tuple(places))


def wrong_tensors(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What is wrong with loaded tensors, one line each: missing, other bytes, or memory that is a mapping of the files.

    Names that the files do not have are not looked at: tied weights appear under a second name.
    """
    wrong: list[str] = []
    mapped = _mapped_ranges(checkpoint)
    for index, path in enumerate(checkpoint.files):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            data = np.frombuffer(mapping, np.uint8)
            for place in checkpoint.places:
                if place.file == index:
                    reason = _fault(place, tensors.get(place.name), data[place.begin : place.end], mapped)
                    wrong += [f"{place.name}: {reason}"] if reason else []
            del data
    return wrong


def _fault(place: Place, tensor: torch.Tensor | None, expected: Bytes, mapped: list[tuple[int, int]]) -> str | None:
    if tensor is None:
        return "is missing"
    if tensor.dtype != place.dtype or tuple(tensor.shape) != place.shape:
        return f"is {tensor.dtype} {tuple(tensor.shape)}, not {place.dtype} {place.shape}"
    # As bytes: elements that are NaN equal nothing, themselves included.
    actual = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    if not _equal(actual, expected):
        return "has other bytes than the file"
    if any(begin <= tensor.data_ptr() < end for begin, end in mapped):
        return "is a mapping of the file, not memory of its own"
    return None


def _equal(actual: Bytes, expected: Bytes) -> bool:
    if len(actual) % 8 == 0 and actual.ctypes.data % 8 == expected.ctypes.data % 8 == 0:
        actual, expected = actual.view(np.int64), expected.view(np.int64)  # as words: eight times as fast
    return np.array_equal(actual, expected)


def _mapped_ranges(checkpoint: Checkpoint) -> list[tuple[int, int]]:
    """Address ranges of this process that are mappings of the checkpoint's files."""
    paths = {str(path.resolve()) for path in checkpoint.files}
    ranges = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (?:\S+ ){4} *(\S.*)", line)
        if found and found[3] in paths:
            ranges.append((int(found[1], 16), int(found[2], 16)))
    return ranges
