import json
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from megamind_ray.core.tensor import DType
from megamind_ray.errors import IntegrityError
from megamind_ray.io.safetensors_header import parse_header

GOOD = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@st.composite
def good_files(draw: Any) -> Any:
    """(bytes of a file) with any dtypes, shapes, names, metadata, order of names against order of data, padding."""
    entries, data = [], b""
    for name in draw(st.lists(names, unique=True, max_size=6)):
        dtype, shape = draw(st.sampled_from(list(DType))), draw(shapes)
        size = dtype.nbytes(math.prod(shape))
        assume(size is not None)
        entries.append((name, {"dtype": dtype.label, "shape": shape, "data_offsets": [len(data), len(data) + size]}))
        data += draw(st.binary(min_size=size, max_size=size)) if size < 64 else bytes(range(64)) * (size // 64 + 1)
        data = data[: entries[-1][1]["data_offsets"][1]]
    metadata = draw(st.none() | st.dictionaries(texts, texts, max_size=3))
    if metadata is not None:
        entries.append(("__metadata__", metadata))
    text = json.dumps(dict(draw(st.permutations(entries))), ensure_ascii=draw(st.booleans()))
    padding = draw(st.sampled_from(["", " ", " " * 7, "\n"]))
    return text.encode() + padding.encode(), data


def by_safetensors(raw: Any) -> Any:
    """(name -> dtype, shape, bytes), or None where the library refuses the file."""
    try:
        return {name: (item["dtype"], item["shape"], bytes(item["data"])) for name, item in deserialize(raw)}
    except SafetensorError:
        return None


def by_us(raw: bytes) -> Any:
    """The same from our parser, or the text of its refusal."""
    try:
        header = parse_header(raw, len(raw), uri="f")
    except IntegrityError as error:
        return str(error)
    return {item.name: (item.dtype.label, list(item.shape), raw[item.begin : item.end]) for item in header.tensors}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_good_file_reads_as_with_safetensors(frame: Any, data: Any) -> None:
    raw = frame(*data.draw(good_files()))

    assert by_us(raw) == by_safetensors(raw)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_damaged_header_is_refused_where_safetensors_refuses_it(frame: Any, data: Any) -> None:
    header, payload = data.draw(good_files())
    place = data.draw(st.integers(0, len(header)))
    removed = data.draw(st.integers(0, 3))
    inserted = data.draw(
        st.binary(max_size=2) | st.sampled_from([b"-", b"0", b"1", b'"', b"{", b"}", b",", b" ", b"\\"])
    )
    header = header[:place] + inserted + header[place + removed :]
    payload = payload[: len(payload) - data.draw(st.integers(0, 1))] + data.draw(st.sampled_from([b"", b"x"]))
    raw = frame(header, payload)
    expected, actual = by_safetensors(raw), by_us(raw)

    if expected is None or (isinstance(actual, str) and "occurs twice" in actual):
        assert isinstance(actual, str)
    else:
        assert actual == expected


@settings(max_examples=300, deadline=None)
@given(
    field=st.sampled_from(["dtype", "shape", "data_offsets", "extra"]),
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.sampled_from(["F32", "F4", "f32", "", 0, 4, -1, 1.0, 1e400, float("nan"), 2**63, 2**64 - 1, 2**64, -0.0])
        | st.integers(0, 8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=2),
        max_leaves=6,
    ),
)
def test_an_odd_value_is_refused_where_safetensors_refuses_it(frame: Any, field: str, value: Any) -> None:
    raw = frame(json.dumps({"a": {**GOOD, field: value}}).encode(), b"1234")
    expected, actual = by_safetensors(raw), by_us(raw)

    if expected is None:
        assert isinstance(actual, str)
    else:
        assert actual == expected


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
def test_each_dtype_is_read_with_its_size(encode: Any, dtype: DType) -> None:
    size = dtype.nbytes(8)
    raw = encode({"w": (dtype.label, [2, 4], bytes(size))})

    (tensor,) = parse_header(raw, len(raw), uri="f").tensors

    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (dtype, (2, 4), size)
    assert tensor.end == len(raw)


def test_scalars_and_empty_tensors_are_tensors(encode: Any) -> None:
    raw = encode({"scalar": ("F32", [], b"1234"), "empty": ("F64", [3, 0], b""), "last": ("U8", [1], b"x")})

    tensors = {item.name: (item.shape, item.nbytes) for item in parse_header(raw, len(raw), uri="f").tensors}

    assert tensors == {"scalar": ((), 4), "empty": ((3, 0), 0), "last": ((1,), 1)}


def test_tensors_come_in_the_order_of_their_bytes_whatever_the_order_of_the_header(frame: Any) -> Any:
    def entry(begin: Any) -> Any:
        return {"dtype": "U8", "shape": [1], "data_offsets": [begin, begin + 1]}

    raw = frame(json.dumps({"z": entry(0), "a": entry(2), "m": entry(1)}).encode(), b"123")

    assert [tensor.name for tensor in parse_header(raw, len(raw), uri="f").tensors] == ["z", "m", "a"]


def test_metadata_and_the_begin_of_the_data_are_kept(encode: Any) -> None:
    raw = encode({"w": ("U8", [2], b"xy")}, metadata={"format": "pt"}, padding=5)

    header = parse_header(raw, len(raw), uri="f")

    assert header.metadata == {"format": "pt"}
    assert header.data_begin == len(raw) - 2


def entry(**changes: Any) -> Any:
    return json.dumps({"w": {**GOOD, **changes}}).encode()


def pair(first: Any, second: Any) -> Any:
    fields = {"dtype": "U8", "shape": [first[1] - first[0]], "data_offsets": first}
    others = {"dtype": "U8", "shape": [second[1] - second[0]], "data_offsets": second}
    return json.dumps({"one": fields, "two": others}).encode()


REFUSED = {
    "not JSON": (b"{'w'}", b"", "not valid JSON"),
    "not UTF-8": (b'{"\xff": {}}', b"", "not valid JSON"),
    "half a surrogate pair": (b'{"\\ud800": {}}', b"", "not valid JSON"),
    "a list": (b"[1]", b"", "not an object"),
    "NaN": (b'{"w": NaN}', b"", "NaN"),
    "a name twice": (b'{"w": {}, "w": {}}', b"", "'w' occurs twice"),
    "a field twice": (b'{"w": {"dtype": "F32", "dtype": "U8"}}', b"", "'dtype' occurs twice"),
    "trailing text": (b"{} x", b"", "not valid JSON"),
    "empty header": (b"", b"", "not valid JSON"),
    "nested too deep": (b'{"w":' + b"[" * 200_000, b"", "nested too deep"),
    "digits without end": (b'{"w":' + b"1" * 200_000 + b"}", b"", "not valid JSON"),
    "entry is a number": (b'{"w": 1}', b"", "tensor 'w': its entry must be an object"),
    "no shape": (b'{"w": {"dtype": "F32", "data_offsets": [0, 4]}}', b"1234", "tensor 'w': its entry has no shape"),
    "unknown dtype": (entry(dtype="F31"), b"1234", "tensor 'w': dtype 'F31' is not known"),
    "dtype is a number": (entry(dtype=32), b"1234", "tensor 'w': dtype 32 is not known"),
    "negative extent": (entry(shape=[-1]), b"1234", "tensor 'w': shape [-1]"),
    "fraction as extent": (entry(shape=[1.0]), b"1234", "tensor 'w': shape [1.0]"),
    "bool as extent": (entry(shape=[True]), b"1234", "tensor 'w': shape [True]"),
    "text as shape": (entry(shape="1"), b"1234", "tensor 'w': shape '1'"),
    "absurd shape": (entry(shape=[2**63, 4]), b"1234", "tensor 'w': dtype F32 and shape"),
    "one offset": (entry(data_offsets=[0]), b"1234", "tensor 'w': data_offsets [0]"),
    "negative offset": (entry(data_offsets=[-4, 0]), b"1234", "tensor 'w': data_offsets [-4, 0]"),
    "end before begin": (entry(data_offsets=[4, 0]), b"1234", "tensor 'w': data_offsets [4, 0) end before"),
    "fewer bytes than the shape": (entry(shape=[2]), b"1234", "tensor 'w': dtype F32 and shape [2] need 8 bytes"),
    "half a byte": (entry(dtype="F4", shape=[7]), b"1234", "tensor 'w': dtype F4 and shape [7] need no whole number"),
    "hole": (pair([0, 2], [3, 5]), b"12345", "tensor 'two' at bytes"),
    "hole at the start": (pair([1, 2], [2, 3]), b"123", "tensor 'one' at bytes"),
    "overlap": (pair([0, 3], [2, 4]), b"1234", "overlaps 'one'"),
    "shared bytes": (pair([0, 2], [0, 2]), b"12", "overlaps 'one'"),
    "past the end": (entry(), b"123", "tensor 'w' at bytes"),
    "trailing bytes": (entry(), b"12345", "belong to no tensor"),
    "metadata is a list": (b'{"__metadata__": ["x"]}', b"", "__metadata__"),
    "metadata with a number": (b'{"__metadata__": {"x": 1}}', b"", "__metadata__"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_header_is_refused_and_names_the_culprit(frame: Any, case: str) -> None:
    header, payload, text = REFUSED[case]
    raw = frame(header, payload)

    with pytest.raises(IntegrityError) as caught:
        parse_header(raw, len(raw), uri="/models/m.safetensors")

    assert "/models/m.safetensors" in str(caught.value)
    assert text in str(caught.value)
    assert caught.value.file == "/models/m.safetensors"


@pytest.mark.parametrize("size", range(8))
def test_a_file_too_short_for_the_length_is_refused(size: int) -> None:
    with pytest.raises(IntegrityError, match=f"m.safetensors: has {size} bytes, too short"):
        parse_header(bytes(size), size, uri="m.safetensors")


def test_a_header_longer_than_the_file_is_refused(frame: Any) -> None:
    raw = frame(b"{}", length=3)

    with pytest.raises(IntegrityError, match="header ends at byte 11, the file at byte 10"):
        parse_header(raw, len(raw), uri="m.safetensors")


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_refused_before_anything_is_read(frame: Any, length: int) -> None:
    raw = frame(b"{}", length=length)

    with pytest.raises(IntegrityError, match=f"a header of {length} bytes is over the limit"):
        parse_header(raw, 2**64 + 8, uri="m.safetensors")


def test_a_refused_range_is_named_in_absolute_bytes(frame: Any) -> None:
    raw = frame(pair([0, 3], [2, 4]), b"1234")
    data_begin = len(raw) - 4

    with pytest.raises(IntegrityError) as caught:
        parse_header(raw, len(raw), uri="f")

    assert (caught.value.tensor, caught.value.begin, caught.value.end) == ("two", data_begin + 2, data_begin + 4)
