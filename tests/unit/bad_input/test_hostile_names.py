"""Names and URIs that somebody made up to reach a path, a terminal or a shell."""

from __future__ import annotations

import posixpath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamind_ray.core.ids import NodeId, model_name
from megamind_ray.core.location import parse_location
from megamind_ray.core.node_names import NodeNames, find_node
from megamind_ray.errors import MegamindError, RequestError
from megamind_ray.io.hub_cache import offline_remedy
from megamind_ray.io.layout import _safe_path

ESCAPES = ("..", "a/../b", "/etc/passwd", "a\0b", "a\nb", "-x", "a" * 10_240, "\u202egnp", "é", "٣", "a b", "$(id)")
STRANGE = st.text(st.sampled_from("a./\\-@:%\0\n\u202e\ud800~ ;$`") | st.characters(), max_size=40)


@pytest.mark.parametrize("name", [*ESCAPES, "", None, 3, b"x"], ids=lambda name: ascii(name)[:16])
def test_a_name_that_could_lead_elsewhere_is_refused_in_a_short_message(name: Any) -> None:
    with pytest.raises(RequestError) as caught:
        model_name(name)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "uri",
    [
        *("hf://../..", "hf://org/..", "hf://org/name@..", "hf://org/name/../../etc", "hf://org/name/%2e%2e/x"),
        *("hf://-x/-y", "hf://org/name@--local-dir", "hf://org/na\nme", "hf://a;id/name", "hf://org/$(id)"),
        *("s3://bucket/a\r\nHost: b", "https://host/a\nb", "file:///a%00b", "/a\ud800", "\0", "/" + "a" * 10_240),
    ],
    ids=lambda uri: ascii(uri)[:24],
)
def test_a_uri_that_nothing_can_have_is_refused_before_anybody_is_asked(uri: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_location(uri)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "uri",
    [
        *("hf://gpt2", "hf://org/name", "hf://org/na-me_1.5@refs%2Fpr%2F1/a/b.safetensors", "hf://models/org/name@v1"),
        *("s3://bucket/a..b/c", "https://host/a?X-Amz-Signature=a%0Ab", "/a b\nc", "/\u202egnp", "/na\udcffme"),
    ],
    ids=ascii,
)
def test_what_is_unusual_and_sound_is_taken(uri: str) -> None:
    parse_location(uri)


@given(uri=st.one_of(STRANGE, STRANGE.map("hf://org/".__add__), STRANGE.map("file://".__add__)))
def test_any_text_is_a_location_or_an_error_of_ours(uri: str) -> None:
    try:
        location = parse_location(uri)
    except MegamindError:
        return
    assert "\0" not in location.uri
    assert location.is_local or "\n" not in location.uri
    assert not location.is_local or location.uri in ("", posixpath.normpath(location.uri))


@given(path=STRANGE)
def test_a_path_in_an_index_stays_in_its_folder(path: str) -> None:
    try:
        safe = _safe_path(path, "tensor", "/folder/index.json")
    except RequestError:
        return
    assert posixpath.normpath(posixpath.join("/folder", safe)).startswith("/folder/")


@given(text=STRANGE)
def test_a_node_is_found_only_by_what_it_is_called(text: str) -> None:
    node = NodeNames(node=NodeId("0" * 56), address="10.0.0.1", host="head")
    with pytest.raises(RequestError):
        find_node(text, [node])


def test_a_command_that_we_print_cannot_do_anything_else() -> None:
    remedy = offline_remedy("hf://org/name@a;id")
    assert remedy is not None
    assert "--revision 'a;id' " in remedy
