"""Safetensors files built by hand, so that the parser is tested against the format and not against a writer."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def _encode(tensors: Any, metadata: Any = None, *, padding: int = 0) -> Any:
    """Bytes of a file; ``tensors`` maps a name to (dtype, shape, data), laid out in that order."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return _frame(json.dumps(header).encode() + b" " * padding, data)


def _frame(header: bytes, data: bytes = b"", length: int | None = None) -> Any:
    """Bytes of a file with this header text."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


@pytest.fixture(scope="session")
def encode() -> Any:
    return _encode


@pytest.fixture(scope="session")
def frame() -> Any:
    return _frame


@pytest.fixture
def write_file(tmp_path: Path) -> Any:
    """Writes a file of U8 tensors given as name -> size, with bytes that differ everywhere."""

    def write(name: str, sizes: Any, folder: Path = tmp_path, **options: Any) -> Any:
        random = np.random.default_rng(sum(sizes.values()))
        tensors = {key: ("U8", [size], random.bytes(size)) for key, size in sizes.items()}
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_encode(tensors, **options))
        return path

    return write


@pytest.fixture
def indexed_folder(tmp_path: Path, write_file: Any) -> Any:
    """A folder of two files with an index: ``a`` and ``b`` in the first, ``c`` in the second."""
    folder = tmp_path / "model"
    write_file("model-00001-of-00002.safetensors", {"a": 100, "b": 50}, folder)
    write_file("model-00002-of-00002.safetensors", {"c": 70}, folder)
    weight_map = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    index = {"metadata": {"total_size": 220}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
