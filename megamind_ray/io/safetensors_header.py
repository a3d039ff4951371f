"""The header of a safetensors file: where each tensor is, and whether that can be true.

A file is 8 bytes (length of the header, little-endian), the header (JSON), the data. What is accepted is what the
safetensors library accepts, less keys that occur twice, of which it takes the last one in silence, and empty tensors
with an extent so large that nothing can be made of them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from megamind_ray.core.tensor import DType, TensorInfo
from megamind_ray.errors import IntegrityError
from megamind_ray.io.file_kinds import other_kind
from megamind_ray.units import format_bytes

__all__ = ["LENGTH_BYTES", "MAX_HEADER_BYTES", "Header", "header_end", "parse_header", "strict_json_object"]

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
_METADATA: Final = "__metadata__"
_FIELDS: Final = ("dtype", "shape", "data_offsets")
_DTYPES: Final = dict(DType.__members__)
_MAX_U64: Final = (1 << 64) - 1
_MAX_STRIDE: Final = (1 << 63) - 1
# Of safetensors' decoder, less the level of the header itself; what is deeper it refuses, in any field.
_MAX_DEPTH: Final = 126
_SURROGATE_ESCAPE: Final = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of one file says.

    Attributes:
        tensors: In the order of their bytes in the file; ranges are absolute.
        metadata: ``__metadata__``, empty where there is none.
        data_begin: Offset of the first byte after the header.
    """

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    data_begin: int


def header_end(prefix: bytes, size_bytes: int, *, uri: str) -> int:
    """Where the data of a file begins, from the first bytes of the file.

    Args:
        prefix: The first ``LENGTH_BYTES`` bytes, or fewer where the file is shorter.
        size_bytes: Size of the file.
        uri: Name of the file for messages.

    Raises:
        IntegrityError: The file is too short, or the header would be absurdly long or longer than the file.
    """
    if size_bytes < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        raise IntegrityError(
            f"{uri}: has {size_bytes} bytes, too short for a safetensors file; fetch the file again",
            file=uri,
            begin=0,
            end=size_bytes,
        )
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    end = LENGTH_BYTES + length
    kind = other_kind(prefix[:LENGTH_BYTES]) if length > MAX_HEADER_BYTES or end > size_bytes else None
    if kind is not None:
        raise IntegrityError(f"{uri}: no safetensors file: it {kind}", file=uri, begin=0, end=size_bytes)
    if length > MAX_HEADER_BYTES:
        raise IntegrityError(
            f"{uri}: a header of {length} bytes is over the limit of {MAX_HEADER_BYTES}; "
            "this is not a safetensors file, or its first 8 bytes are damaged",
            file=uri,
            begin=0,
            end=LENGTH_BYTES,
        )
    if end > size_bytes:
        raise IntegrityError(
            f"{uri}: the header ends at byte {end}, the file at byte {size_bytes}; "
            "the file is truncated or damaged, fetch it again",
            file=uri,
            begin=0,
            end=size_bytes,
        )
    return end


def parse_header(raw: bytes, size_bytes: int, *, uri: str, file: int = 0) -> Header:
    """Parses the header of one file and checks that its tensors tile the data exactly.

    Args:
        raw: The first bytes of the file, up to and including the header (length prefix first).
        size_bytes: Size of the whole file.
        uri: Name of the file for messages.
        file: Index of the file, for ``TensorInfo.file``.

    Raises:
        IntegrityError: Anything that is not accepted; it names the file, and the tensor and the range where one is
            concerned.
    """
    data_begin = header_end(raw[:LENGTH_BYTES], size_bytes, uri=uri)
    entries = strict_json_object(raw[LENGTH_BYTES:data_begin], uri=uri, what="header")
    metadata = _parse_metadata(entries.pop(_METADATA, None), uri, data_begin)
    tensors = [_parse_tensor(name, entry, uri, file, data_begin) for name, entry in entries.items()]
    tensors.sort(key=_by_range)
    _check_tiling(tensors, data_begin, size_bytes, uri)
    return Header(tuple(tensors), metadata, data_begin)


def strict_json_object(raw: bytes, *, uri: str, what: str, remedy: str = "fetch it again") -> dict[str, Any]:
    """Decodes one JSON object as strictly as RFC 8259 and the safetensors library do together.

    Args:
        raw: UTF-8 text.
        uri: Name of the file for messages.
        what: What the text is, for messages.
        remedy: What to do about it, for messages.

    Raises:
        IntegrityError: It is not UTF-8, not JSON, not an object, has a key twice, ``NaN`` or half a surrogate pair.
    """
    try:
        text = raw.decode("utf-8")
        value = _DECODER.decode(text)
        if _SURROGATE_ESCAPE.search(text):  # Python takes half a pair, which no other reader of the file would
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise IntegrityError(
            f"{uri}: the {what} is not valid JSON ({reason}); the file is damaged or of another format: {remedy}",
            file=uri,
        ) from error
    if not isinstance(value, dict):
        raise IntegrityError(
            f"{uri}: the {what} is JSON, but not an object; the file is of another format: {remedy}", file=uri
        )
    return value


def _parse_metadata(value: object, uri: str, data_begin: int) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise IntegrityError(
            f"{uri}: {_METADATA} in the header must map text to text; write the file again with text values only",
            file=uri,
            begin=0,
            end=data_begin,
        )
    return value


def _parse_tensor(name: str, entry: object, uri: str, file: int, data_begin: int) -> TensorInfo:
    # On the hot path: DeepSeek-V3 has 92,000 of them.
    if isinstance(entry, list) and len(entry) == len(_FIELDS):  # safetensors' decoder takes the fields in order, too
        entry = dict(zip(_FIELDS, entry, strict=True))
    if not isinstance(entry, dict):
        raise _tensor_error(uri, name, f"its entry must be an object with {', '.join(_FIELDS)}")
    try:
        label, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as error:
        raise _tensor_error(uri, name, f"its entry has no {error.args[0]}") from error
    if len(entry) != len(_FIELDS) and _is_deeper(entry, _MAX_DEPTH):
        raise _tensor_error(uri, name, "its entry is nested too deep")
    if isinstance(label, dict) and list(label.values()) == [None]:  # safetensors' decoder takes {"F32": null}, too
        (label,) = label
    dtype = _DTYPES.get(label) if isinstance(label, str) else None
    if dtype is None:
        raise _tensor_error(uri, name, f"dtype {_shorten(label)} is not known")
    if not _are_indexes(shape):
        raise _tensor_error(uri, name, f"shape {_shorten(shape)} must be a list of whole numbers of 0 or more")
    if not _are_indexes(offsets) or len(offsets) != 2:
        raise _tensor_error(uri, name, f"data_offsets {_shorten(offsets)} must be two whole numbers of 0 or more")
    begin, end = offsets
    if begin > end:
        raise _tensor_error(uri, name, f"data_offsets [{begin}, {end}) end before they begin")
    nbytes = _nbytes(dtype, shape)
    if nbytes != end - begin:
        need = "no whole number of bytes" if nbytes is None else f"{nbytes} bytes"
        raise IntegrityError(
            f"{uri}: tensor {name!r:.200}: dtype {label} and shape {_shorten(shape)} need {need}, but its data_offsets "
            f"[{begin}, {end}) have {end - begin}; the header is damaged",
            file=uri,
            tensor=name,
            begin=data_begin + begin,
            end=data_begin + end,
        )
    if nbytes == 0 and math.prod(extent or 1 for extent in shape) > _MAX_STRIDE:
        raise _tensor_error(uri, name, f"no tensor can have the shape {_shorten(shape)}")
    return TensorInfo(name, dtype, tuple(shape), file, data_begin + begin, data_begin + end)


def _tensor_error(uri: str, name: str, problem: str) -> IntegrityError:
    return IntegrityError(f"{uri}: tensor {name!r:.200}: {problem}; the header is damaged", file=uri, tensor=name)


def _is_deeper(value: object, levels: int) -> bool:
    """Whether a value has more levels of lists and objects than that; never goes further down."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(_is_deeper(item, levels - 1) for item in inner))


def _are_indexes(values: object) -> bool:
    # By type and not by isinstance, since a bool is an int.
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _nbytes(dtype: DType, shape: list[int]) -> int | None:
    """Bytes of the tensor; None where they are no whole number or where 64 bits would overflow on the way."""
    num_elements = 1
    for extent in shape:
        num_elements *= extent
        if num_elements > _MAX_U64:
            return None
    return dtype.nbytes(num_elements)


def _check_tiling(tensors: list[TensorInfo], data_begin: int, size_bytes: int, uri: str) -> None:
    """Each byte of the data belongs to exactly one tensor."""
    previous: TensorInfo | None = None
    position = data_begin
    for tensor in tensors:
        if tensor.end > size_bytes:
            problem = f"runs past the end of the file at byte {size_bytes}; the file is truncated or damaged"
        elif tensor.begin > position:
            problem = f"leaves a hole of {tensor.begin - position} bytes before it; the header is damaged"
        elif tensor.begin < position:
            other = previous.name if previous else "the header"
            problem = f"overlaps {other!r:.200}, which ends at byte {position}; the header is damaged"
        else:
            previous, position = tensor, tensor.end
            continue
        raise IntegrityError(
            f"{uri}: tensor {tensor.name!r:.200} at bytes [{tensor.begin}, {tensor.end}) {problem}",
            file=uri,
            tensor=tensor.name,
            begin=tensor.begin,
            end=tensor.end,
        )
    if position != size_bytes:
        raise IntegrityError(
            f"{uri}: {format_bytes(size_bytes - position)} after the last tensor, at bytes [{position}, {size_bytes}), "
            "belong to no tensor; the file is damaged",
            file=uri,
            begin=position,
            end=size_bytes,
        )


def _by_range(tensor: TensorInfo) -> tuple[int, int, str]:
    return tensor.begin, tensor.end, tensor.name


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {twice!r:.200} occurs twice")
    return result


def _parse_int(digits: str) -> int | float:
    # What does not fit 64 bits, and -0, is a floating-point number to safetensors' decoder, hence never a size.
    value = int(digits)
    return _parse_float(digits) if abs(value) > _MAX_U64 or digits == "-0" else value


def _parse_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number {text[:40]} is out of range")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant
)
