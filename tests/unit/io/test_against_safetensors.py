"""Whole files against the safetensors library, rule by rule of the format: it refuses what we refuse, and what it takes
loads to the same tensors.

Two things that it takes are refused here on purpose: a name that occurs twice, of which it keeps the last in silence,
and an empty tensor with an extent that no tensor can have, which fails when it is made into one.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import load_file

import megamind_ray as mm
from megamind_ray.core.tensor import DType
from megamind_ray.errors import IntegrityError
from megamind_ray.io.safetensors_header import parse_header

U64_MAX = 2**64 - 1
SIZED = {"U8": 1, "BF16": 2, "F32": 4, "C64": 8, "F8_E8M0": 1}


def theirs(raw: bytes) -> dict[str, Any] | None:
    """Name -> (dtype, shape, bytes) by the library, None where it refuses the file."""
    try:
        return {name: (item["dtype"], item["shape"], bytes(item["data"])) for name, item in deserialize(raw)}
    except SafetensorError:
        return None


def ours(raw: bytes) -> dict[str, Any] | str:
    """The same by our parser, or the text of its refusal; any other error is one."""
    try:
        header = parse_header(raw, len(raw), uri="f")
    except IntegrityError as error:
        return str(error)
    return {item.name: (item.dtype.label, list(item.shape), raw[item.begin : item.end]) for item in header.tensors}


def assert_same_verdict(raw: bytes) -> None:
    expected, actual = theirs(raw), ours(raw)
    if isinstance(actual, str) and ("occurs twice" in actual or "no tensor can have the shape" in actual):
        return
    if expected is None:
        assert isinstance(actual, str), f"accepted here, refused by safetensors: {raw!r}"
    else:
        assert actual == expected, f"accepted by safetensors: {raw!r}"


def framed(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", (len(header) if length is None else length) % 2**64) + header + data


# --- generators, one for each rule -----------------------------------------------------------------------------------

Entries = list[tuple[str, dict[str, Any]]]
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda name: name != "__metadata__")
extents = st.integers(0, 4) | st.sampled_from([2**31, 2**32, 2**62, 2**63, U64_MAX, 2**64, -1, -(2**63)])
leaves = (
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False, width=32) | st.text("abU8", max_size=4)
)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2)
)


@st.composite
def tensors(draw: st.DrawFn, *, min_size: int = 0) -> tuple[Entries, bytes]:
    """Entries that tile their data, and the data."""
    entries: Entries = []
    end = 0
    for name in draw(st.lists(names, unique=True, min_size=min_size, max_size=4)):
        dtype = draw(st.sampled_from(sorted(SIZED)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        begin, end = end, end + SIZED[dtype] * math.prod(shape)
        entries.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}))
    return entries, draw(st.binary(min_size=end, max_size=end))


def encoded(entries: Entries, *, metadata: Any = None) -> bytes:
    pairs: list[tuple[str, Any]] = list(entries)
    if metadata is not None:
        pairs.append(("__metadata__", metadata))
    return ("{" + ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs) + "}").encode()


@st.composite
def odd_lengths(draw: st.DrawFn) -> bytes:
    """The length of the header is something else, or the file ends in it."""
    entries, data = draw(tensors())
    header = encoded(entries) + b" " * draw(st.integers(0, 2))
    near = st.integers(-3, 3).map(lambda moved: len(header) + moved)
    length = draw(near | st.sampled_from([0, 1, 10**8, 10**8 + 1, 2**32, 2**63, U64_MAX]))
    raw = framed(header, data, length)
    return raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw


@st.composite
def odd_texts(draw: st.DrawFn) -> bytes:
    """The header is not the JSON object that it should be, or has something around it."""
    entries, data = draw(tensors())
    header = encoded(entries)
    spaces = st.text(" \t\r\n", max_size=4).map(str.encode)
    before = draw(spaces | st.sampled_from([b"\xef\xbb\xbf", b"\0", b"{", b"[", b"\xc2\xa0", b"\x0b"]))
    after = draw(spaces | st.sampled_from([b"\0", b"}", b"x", b"{}", b"\xff", b"\x0c"]))
    other = draw(st.none() | anything.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=6))
    return framed(before + (header if other is None else other) + after, data)


@st.composite
def odd_utf8(draw: st.DrawFn) -> bytes:
    """Bytes in a name or in the metadata that are no UTF-8, escapes that are no characters."""
    text = draw(
        st.binary(max_size=4)
        | st.sampled_from(
            [
                b"\\ud83d\\ude00",
                b"\\ud83d",
                b"\\ude00\\ud83d",
                b"\\u00e9",
                b"\xed\xa0\x80",
                b"\xc0\x80",
                b"\xf4\x90\x80\x80",
            ]
        )
        | st.sampled_from([b"\\x41", b"\\u12", b"\\", b"\\/", b"\n", b"\x7f", b"\x1f", b"\\u0000"])
    )
    entry = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    if draw(st.booleans()):
        return framed(b'{"' + text + b'":' + entry + b"}", b"x")
    return framed(b'{"__metadata__":{"' + text + b'":"' + text + b'"},"a":' + entry + b"}", b"x")


@st.composite
def odd_numbers(draw: st.DrawFn) -> bytes:
    """A number as only some decoders read it, where a size is wanted or where nobody looks."""
    number = draw(
        st.from_regex(r"\A-?[0-9]{1,4}(\.[0-9]{1,3})?([eE][+-]?[0-9]{1,4})?\Z")
        | st.sampled_from(
            ["-0", "0.0", "1e0", "00", "+1", ".5", "1.", "0x1", "1e999", "-1e999", "0e999", "NaN", "Infinity"]
        )
        | st.sampled_from(
            ["1" * 20, "9" * 309, "-" + "9" * 309, "1" * 400, "18446744073709551615", "18446744073709551616"]
        )
    )
    place = draw(st.sampled_from(["shape", "begin", "end", "extra", "metadata"]))
    values = {"shape": "1", "begin": "0", "end": "1", "extra": "0", "metadata": '"x"', place: number}
    header = (
        f'{{"__metadata__":{{"m":{values["metadata"]}}},"a":{{"dtype":"U8","shape":[{values["shape"]}],'
        f'"data_offsets":[{values["begin"]},{values["end"]}],"extra":{values["extra"]}}}}}'
    )
    return framed(header.encode(), b"x")


@st.composite
def odd_entries(draw: st.DrawFn) -> bytes:
    """A field of an entry is missing, of another type, or one too many; or the entry is no object."""
    entries, data = draw(tensors(min_size=1))
    name, entry = entries[draw(st.integers(0, len(entries) - 1))]
    index = [other for other, _ in entries].index(name)
    match draw(st.sampled_from(["drop", "replace", "add", "list", "other"])):
        case "drop":
            del entry[draw(st.sampled_from(sorted(entry)))]
        case "replace":
            known = st.sampled_from([dtype.label for dtype in DType] + ["f32", "F128", "", "I4", "F8_E4M3FN"])
            value = known | known.map(lambda label: {label: None}) | known.map(lambda label: [label]) | anything
            entry[draw(st.sampled_from(sorted(entry)))] = draw(value)
        case "add":
            entry[draw(st.sampled_from(["extra", "Dtype", "offsets", ""]))] = draw(anything)
        case "list":
            as_list = [entry["dtype"], entry["shape"], entry["data_offsets"]]
            entries[index] = (name, as_list[: draw(st.integers(0, 3))] + draw(st.lists(leaves, max_size=1)))  # type: ignore[assignment]
        case "other":
            entries[index] = (name, draw(anything))
    return framed(encoded(entries), data)


@st.composite
def odd_shapes(draw: st.DrawFn) -> bytes:
    """Extents that are huge, negative, or overflow on the way; sizes that are no whole bytes."""
    dtype = draw(st.sampled_from(list(DType)))
    shape = draw(st.lists(extents, max_size=4))
    size = draw(st.integers(0, 16) | st.just(abs(math.prod(shape)) * dtype.bits // 8 % 32))
    entry = {"dtype": dtype.label, "shape": shape, "data_offsets": [0, size]}
    return framed(encoded([("a", entry)]), bytes(size))


@st.composite
def odd_offsets(draw: st.DrawFn) -> bytes:
    """Ranges that are reversed, overlap, leave holes, run out of the file, do not fit the shape; data left over."""
    entries, data = draw(tensors(min_size=1))
    for _ in range(draw(st.integers(1, 2))):
        _, entry = entries[draw(st.integers(0, len(entries) - 1))]
        offsets = entry["data_offsets"]
        moved = draw(st.integers(-3, 3))
        match draw(st.sampled_from(["begin", "end", "both", "swap", "huge", "other"])):
            case "begin":
                entry["data_offsets"] = [offsets[0] + moved, offsets[1]]
            case "end":
                entry["data_offsets"] = [offsets[0], offsets[1] + moved]
            case "both":
                entry["data_offsets"] = [offsets[0] + moved, offsets[1] + moved]
            case "swap":
                entry["data_offsets"] = [offsets[1], offsets[0]]
            case "huge":
                entry["data_offsets"] = [offsets[0], draw(st.sampled_from([2**63, U64_MAX, U64_MAX - 7, 2**64]))]
            case "other":
                entry["data_offsets"] = entries[draw(st.integers(0, len(entries) - 1))][1]["data_offsets"]
    extra = draw(st.integers(-2, 2))
    data = data[: len(data) + extra] if extra < 0 else data + bytes(extra)
    return framed(encoded(draw(st.permutations(entries))), data)


@st.composite
def odd_metadata(draw: st.DrawFn) -> bytes:
    """``__metadata__`` that is no map, or has values that are no text."""
    entries, data = draw(tensors())
    texts = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
    value = draw(texts | st.dictionaries(st.text("ab", max_size=2), anything, max_size=2) | anything)
    text = encoded(draw(st.permutations([*entries, ("__metadata__", value)])))
    return framed(text, data)


@st.composite
def odd_keys(draw: st.DrawFn) -> bytes:
    """A name, a field or a key of the metadata that occurs twice."""
    entries, data = draw(tensors(min_size=1))
    again = draw(st.sampled_from(entries))
    header = encoded([*entries, again], metadata=draw(st.none() | st.just({"a": "b"})))
    old = draw(st.sampled_from([b'"dtype"', b'"shape"', b'"a"', b'"__metadata__"']))
    return framed(header.replace(old, draw(st.sampled_from([old, old + b':"U8",' + old, old + b":{}," + old]))), data)


@st.composite
def odd_depths(draw: st.DrawFn) -> bytes:
    """A field that nobody looks at, nested up to and over the limit of decoders."""
    depth = draw(st.integers(0, 6) | st.integers(118, 134) | st.sampled_from([500, 990]))
    opening, closing = draw(st.sampled_from([("[", "]"), ('{"k":', "}")]))
    inner = "1" if opening != "[" else ""
    field = f'"extra":{opening * depth}{inner or ("" if depth else "1")}{closing * depth}'
    return framed(f'{{"a":{{"dtype":"U8","shape":[1],"data_offsets":[0,1],{field}}}}}'.encode(), b"x")


RULES: dict[str, Callable[[], st.SearchStrategy[bytes]]] = {
    "header length": odd_lengths,
    "text of the header": odd_texts,
    "UTF-8": odd_utf8,
    "numbers": odd_numbers,
    "entries": odd_entries,
    "shapes": odd_shapes,
    "offsets": odd_offsets,
    "metadata": odd_metadata,
    "keys that occur twice": odd_keys,
    "depth": odd_depths,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_verdict_on_a_file_is_that_of_safetensors(rule: str) -> None:
    @settings(max_examples=100)
    @given(RULES[rule]())
    def check(raw: bytes) -> None:
        assert_same_verdict(raw)

    check()


@pytest.mark.parametrize("rule", RULES)
def test_a_rules_generator_gives_both_good_and_bad_files(rule: str) -> None:
    """Or the test above would show little."""
    verdicts = set()

    @settings(max_examples=100, derandomize=True, database=None)
    @given(RULES[rule]())
    def look(raw: bytes) -> None:
        verdicts.add(theirs(raw) is not None)

    look()

    assert verdicts == {True, False}


@settings(max_examples=150)
@given(st.binary(max_size=60), st.booleans())
def test_arbitrary_bytes_are_refused_and_nothing_else_happens(noise: bytes, is_framed: bool) -> None:
    assert_same_verdict(framed(noise) if is_framed else noise)


# --- what is accepted loads the same ---------------------------------------------------------------------------------


@st.composite
def loadable_files(draw: st.DrawFn) -> bytes:
    """Any dtypes that torch has, any shapes (scalars and empty ones too), the order of names against that of data."""
    entries: Entries = []
    data = b""
    for name in draw(st.lists(names, unique=True, max_size=6)):
        dtype = draw(st.sampled_from([dtype for dtype in DType if not dtype.label.startswith("F6_")]))
        shape = draw(st.lists(st.integers(0, 5), max_size=4))
        if dtype is DType.F4:
            shape = [*shape, 2 * draw(st.integers(0, 3))]
        size = dtype.nbytes(math.prod(shape))
        assert size is not None
        content = draw(st.binary(min_size=size, max_size=size))
        if dtype is DType.BOOL:
            content = bytes(byte & 1 for byte in content)
        begin, data = len(data), data + content
        entries.append((name, {"dtype": dtype.label, "shape": shape, "data_offsets": [begin, len(data)]}))
    metadata = draw(st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3))
    text = encoded(draw(st.permutations(entries)), metadata=metadata)
    return framed(text + b" " * draw(st.integers(0, 9)), data)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()


@settings(max_examples=60)
@given(loadable_files())
def test_a_good_file_loads_to_the_same_tensors(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = _write(tmp_path_factory.getbasetemp() / f"against-{os.getpid()}.safetensors", raw)

    expected = load_file(path)
    loaded = mm.load_file(path)

    assert {name: bits(tensor) for name, tensor in loaded.items()} == {
        name: bits(tensor) for name, tensor in expected.items()
    }


@settings(max_examples=60)
@given(loadable_files())
def test_a_file_that_the_library_writes_again_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    """Through a file of the library's own making: its order, its alignment, its spelling."""
    from safetensors.torch import save_file

    base = tmp_path_factory.getbasetemp()
    tensors = load_file(_write(base / f"first-{os.getpid()}.safetensors", raw))
    again = base / f"again-{os.getpid()}.safetensors"
    save_file(tensors, again, metadata={"format": "pt"})

    assert {name: bits(tensor) for name, tensor in mm.load_file(again).items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }
    assert mm.inspect(again).files[0].metadata == {"format": "pt"}


def _write(path: Path, raw: bytes) -> Path:
    # A file of its own each time: the old one may still be open, and its time would not show the change.
    path.unlink(missing_ok=True)
    path.write_bytes(raw)
    return path
