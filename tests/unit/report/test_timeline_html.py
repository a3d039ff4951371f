"""The page of a load: nothing lost, nothing that a name could break. How it looks is in tests/browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from megamind_ray.core.timeline import Mark, Sample, Span, Timeline
from megamind_ray.report.timeline_html import render
from megamind_ray.testing.timelines import MadeUpLoad, made_up_load
from megamind_ray.units import MIB

NASTY = [
    "</script><script>alert(1)</script>",
    "</script ",
    "<!--<script ",
    "]]>",
    "' onload=x \"",
    "&lt;b&gt;",
    "\x00\x1b[31m",
    "\u202e",
]


class Elements(HTMLParser):
    """Start tags with their attributes, and the text within each kind of element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.tags[-1][0] if self.tags else "", data.strip()))


@pytest.fixture(scope="module")
def load() -> MadeUpLoad:
    return made_up_load()


def block_of(page: str) -> str:
    """The text of the element with the data, up to where a browser would end it."""
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL)
    return str(block)


def data_of(page: str) -> dict[str, Any]:
    return dict(json.loads(block_of(page)))


def spans_of(page: str) -> list[dict[str, Any]]:
    return [track for timeline in data_of(page)["timelines"] for track in timeline["tracks"]]


def many_spans(number: int) -> Timeline:
    rows = (
        Span(track=f"rank {i % 8}", kind="copy", begin_s=i * 1e-4, end_s=i * 1e-4 + 7e-4, nbytes=i)
        for i in range(number)
    )
    return Timeline.of("measured", rows)


def test_the_page_says_what_the_report_says(load: MadeUpLoad) -> None:
    report = replace(load.report, seconds={"plan": 0.5, "total": 3.0}, lower_bound_s=2.0)

    text = " | ".join(text for _, text in Elements(render(report, [load.timeline])).texts)

    for fact in (
        "made-up-8b: load",
        "3.00 s",
        "2.00 s",
        "1.50 times",
        "the disks of n0 and n1",
        "reference",
        "chunk_retried",
    ):
        assert fact in text, fact
    assert "Phases | phase | time | share | plan | 500.0 ms | 16.7%" in text


def test_the_page_has_all_spans_and_all_bytes(load: MadeUpLoad) -> None:
    tracks = spans_of(render(load.report, [load.timeline]))

    assert sum(len(track["begin"]) for track in tracks) == len(load.timeline.spans)
    assert sum(sum(track["bytes"]) for track in tracks) == sum(load.timeline.spans["nbytes"].to_pylist())
    assert all("count" not in track for track in tracks)


def test_the_page_needs_nothing_from_elsewhere(load: MadeUpLoad) -> None:
    elements = Elements(render(load.report, [load.timeline]))

    assert not [attrs for _, attrs in elements.tags for name in attrs if name in ("src", "href", "action", "style")]
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in elements.tags}


@pytest.mark.parametrize("name", NASTY)
def test_names_are_text_wherever_they_stand(load: MadeUpLoad, name: str) -> None:
    report = replace(
        load.report,
        model=name,
        uri=name,
        bottleneck=name,
        notes=(name,),
        utilisation={name: 0.5},
        faults=(replace(load.report.faults[0], kind=name, where=name, action=name),),
    )
    timeline = Timeline.of("measured", [Span(track=name, kind="read", begin_s=0, end_s=1, label=name)])
    plain = Elements(render(replace(report, model="x", uri="x"), [load.timeline]))

    page = render(report, [timeline])

    elements = Elements(page)
    assert sum(tag == "script" for tag, _ in elements.tags) == sum(tag == "script" for tag, _ in plain.tags) == 2
    assert {key for _, attrs in elements.tags for key in attrs} <= {key for _, attrs in plain.tags for key in attrs}
    assert all(letter.isprintable() or letter == "\n" for letter in page)
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)
    assert any(shown in text for _, text in elements.texts)
    assert shown in data_of(page)["tracks"]
    assert not set("<>&") & set(block_of(page)), "nothing in the data may end or open an element"


def test_too_many_spans_are_merged_their_bytes_kept_and_the_page_says_so(load: MadeUpLoad) -> None:
    timeline = many_spans(5000)

    page = render(load.report, [timeline], max_spans=800)

    tracks = spans_of(page)
    drawn = sum(len(track["begin"]) for track in tracks)
    assert 200 < drawn <= 800
    assert sum(sum(track["count"]) for track in tracks) == 5000
    assert sum(sum(track["bytes"]) for track in tracks) == sum(range(5000))
    assert f"has 5,000 spans. Neighbours of one track and kind are merged into {drawn}" in page


def test_merged_spans_reach_from_the_first_to_the_last(load: MadeUpLoad) -> None:
    tracks = spans_of(render(load.report, [many_spans(5000)], max_spans=8))

    assert [track["begin"] for track in tracks] == [[100 * index] for index in range(8)]
    assert [track["begin"][0] + track["length"][0] for track in tracks] == [
        100 * (5000 - 8 + index) + 700 for index in range(8)
    ]


def test_only_neighbours_of_a_kind_are_merged(load: MadeUpLoad) -> None:
    spans = [
        Span(track="n0/storage", kind=("read", "verify")[i % 2], begin_s=i * 1e-3, end_s=i * 1e-3 + 1e-3, nbytes=MIB)  # type: ignore[arg-type]
        for i in range(100)
    ]

    (track,) = spans_of(render(load.report, [Timeline.of("measured", spans)], max_spans=2))

    assert track["count"] == [50, 50]
    assert len(set(track["kind"])) == 2
    assert track["busy"] == pytest.approx([0.505, 0.505], abs=0.01)


def test_spans_that_were_not_kept_are_owned_up_to(load: MadeUpLoad) -> None:
    page = render(load.report, [replace(load.timeline, dropped_spans=12)])

    assert "12 spans of the measured timeline were not kept" in page


def test_two_timelines_share_tracks_and_axis(load: MadeUpLoad) -> None:
    predicted = made_up_load(origin="predicted").timeline

    data = data_of(render(load.report, [load.timeline, predicted]))

    assert [timeline["title"] for timeline in data["timelines"]] == ["measured", "predicted"]
    assert data["end"] == max(timeline["end"] for timeline in data["timelines"])
    assert len(data["tracks"]) == len({track["track"] for track in data["timelines"][0]["tracks"]})


def test_places_of_a_curve_are_also_added_up(load: MadeUpLoad) -> None:
    data = data_of(render(load.report, [load.timeline]))

    (section,) = [section for section in data["sections"] if section["title"] == "Throughput of storage"]
    curves = {curve["curve"]: curve for curve in data["timelines"][0]["curves"]}
    total, parts = curves[section["sum"]], [curves[row] for row in section["rows"]]
    assert total["limit"] == sum(part["limit"] for part in parts)
    assert max(total["value"]) <= sum(max(part["value"]) for part in parts)


def test_hundreds_of_ranks_start_folded() -> None:
    load = made_up_load(num_nodes=16, ranks_of_node=8, num_extents=16)

    sections = {section["title"]: section for section in data_of(render(load.report, [load.timeline]))["sections"]}

    assert len(sections["Ranks"]["rows"]) == 128
    assert not sections["Ranks"]["open"]


def test_faults_of_the_report_that_the_timeline_lacks_are_marks(load: MadeUpLoad) -> None:
    page = render(load.report, [replace(load.timeline, marks=())])

    (mark,) = data_of(page)["timelines"][0]["marks"]
    assert (mark["kind"], mark["fine"]) == ("chunk_retried", False)


def test_a_fault_that_both_have_is_one_mark(load: MadeUpLoad) -> None:
    marks = data_of(render(load.report, [load.timeline]))["timelines"][0]["marks"]

    assert [mark["kind"] for mark in marks] == ["chunk_retried", *["rank_done"] * 4]


def test_the_axis_reaches_to_what_happened_last(load: MadeUpLoad) -> None:
    timeline = Timeline.of("measured", [], marks=[Mark(at_s=2.5, kind="load_failed", text="storage is gone")])

    assert data_of(render(load.report, [timeline]))["end"] == 2_500_000


def test_cards_and_what_goes_between_nodes_are_not_added_up(load: MadeUpLoad) -> None:
    samples = [Sample(series=f"bytes/s n{node}/network in", at_s=0, value=5e9) for node in range(2)]
    timeline = Timeline.of("predicted", [], samples)

    data = data_of(render(load.report, [load.timeline, timeline]))

    titles = {
        section["title"]: [data["curves"][row]["name"] for row in section["rows"]] for section in data["sections"]
    }
    assert titles["Throughput of network cards"] == ["n0/network in", "n1/network in"]


def test_without_a_timeline_the_page_has_facts_and_tables(load: MadeUpLoad) -> None:
    page = render(load.report, [])

    assert data_of(page)["timelines"] == []
    assert "No timeline was recorded" in page
    assert "Phases" in page


def test_long_names_are_cut_so_that_the_page_stays_small(load: MadeUpLoad) -> None:
    spans = [
        Span(track="n0/storage", kind="read", begin_s=i, end_s=i + 1, label="x" * 100_000 + str(i)) for i in range(50)
    ]

    page = render(load.report, [Timeline.of("measured", spans)])

    assert len(page) < 200_000
