"""A timeline as a person sees it in a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from megamind_ray.core.report import LoadReport
from megamind_ray.core.timeline import Mark, Sample, Span, Timeline
from megamind_ray.report.timeline_text import TimelineText
from megamind_ray.testing.timelines import made_up_load


def lines_of(
    timeline: Timeline,
    *,
    report: LoadReport | None = None,
    width: int = 100,
    encoding: str = "utf-8",
    max_rows: int = 20,
) -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, color_system=None)
    console.print(TimelineText(timeline=timeline, report=report, max_rows=max_rows))
    stream.seek(0)
    return stream.read().splitlines()


def plot_of(line: str) -> str:
    return line.split("│")[1]


def test_a_track_is_dark_where_it_was_busy() -> None:
    spans = [
        Span(track="rank 0", kind="copy", begin_s=0, end_s=5),
        Span(track="rank 1", kind="copy", begin_s=9, end_s=10),
    ]

    lines = lines_of(Timeline.of("measured", spans))

    plot = plot_of(lines[1])
    assert set(plot[: len(plot) // 2 - 1]) == {"█"}
    assert set(plot[len(plot) // 2 + 1 :]) == {" "}
    assert lines[1].endswith(" 50%")


def test_waiting_is_not_being_busy() -> None:
    spans = [
        Span(track="rank 0", kind="wait", begin_s=0, end_s=8),
        Span(track="rank 0", kind="copy", begin_s=8, end_s=10),
    ]

    lines = lines_of(Timeline.of("measured", spans))

    assert set(plot_of(lines[1])[:60]) == {" "}
    assert lines[1].endswith(" 20%")


def test_a_moment_of_work_is_never_invisible() -> None:
    spans = [
        Span(track="rank 0", kind="copy", begin_s=5, end_s=5.001),
        Span(track="rank 1", kind="copy", begin_s=0, end_s=10),
    ]

    assert "░" in plot_of(lines_of(Timeline.of("measured", spans))[1])


@pytest.mark.parametrize("width", [40, 60, 80, 200, 4096])
def test_every_line_fits_the_terminal(width: int) -> None:
    load = made_up_load()

    lines = lines_of(load.timeline, report=load.report, width=width)

    assert all(len(line) <= width for line in lines)
    plots = {len(plot_of(line)) for line in lines if "│" in line}
    assert len(plots) == 1
    assert plots <= set(range(1, 101))


def test_the_busiest_are_shown_and_the_rest_is_summed_up() -> None:
    spans = [Span(track=f"rank {rank}", kind="copy", begin_s=0, end_s=1 + rank) for rank in range(100)]
    spans.append(Span(track="n0/storage", kind="read", begin_s=0, end_s=1))

    lines = lines_of(Timeline.of("measured", spans), max_rows=6)

    names = [line.split("│")[0].strip() for line in lines if line.endswith("%")]
    assert names == ["n0/storage", "rank 96", "rank 97", "rank 98", "rank 99", "96 more ranks"]


def test_a_terminal_without_unicode_gets_ascii() -> None:
    load = made_up_load()

    lines = lines_of(load.timeline, report=load.report, encoding="ascii")

    assert all(line.isascii() for line in lines)
    assert any("#" in line for line in lines)


def test_throughput_stands_beside_its_limit() -> None:
    spans = [Span(track="n0/storage", kind="read", begin_s=0, end_s=4, nbytes=1)]
    samples = [Sample(series="bytes/s n0/storage", at_s=at, value=value) for at, value in ((0, 2e9), (2, 1e9))]
    timeline = Timeline.of("measured", spans, samples, limits={"bytes/s n0/storage": 2e9})

    (line,) = [line for line in lines_of(timeline) if "GB/s" in line]

    plot = plot_of(line)
    assert line.endswith("1.50 GB/s of 2.00 GB/s")
    assert (plot[0], plot[-1]) == ("█", "▄")


def test_the_axis_runs_from_zero_to_the_end() -> None:
    spans = [Span(track="rank 0", kind="copy", begin_s=0, end_s=8)]

    (axis,) = [line for line in lines_of(Timeline.of("measured", spans)) if line.split()[:1] == ["0"]]

    assert axis.split() == ["0", "2.00", "s", "4.00", "s", "6.00", "s", "8.00", "s"]


def test_the_bottleneck_is_named() -> None:
    load = made_up_load()

    lines = lines_of(load.timeline, report=load.report)

    assert any(
        line.startswith("bottleneck: the disks of n0 and n1, 2.40 GB/s each; lower bound 1.05 s") for line in lines
    )


def test_without_a_bottleneck_the_busiest_track_is_named() -> None:
    spans = [
        Span(track="rank 0", kind="copy", begin_s=0, end_s=2),
        Span(track="rank 1", kind="copy", begin_s=0, end_s=1),
    ]

    assert "busiest: rank 0, 100% of 2.00 s" in lines_of(Timeline.of("measured", spans))


def test_events_are_counted_by_kind() -> None:
    marks = [Mark(at_s=at, kind="rank_done", text=f"rank {at}") for at in (1, 2, 3)]
    marks.append(Mark(at_s=0.5, kind="worker_lost", text="rank 1"))
    spans = [Span(track="rank 0", kind="copy", begin_s=0, end_s=4)]

    lines = lines_of(Timeline.of("measured", spans, marks=marks))

    assert lines[-1] == "events: worker_lost at 500.0 ms; rank_done, 3 times, from 1.00 s to 3.00 s"


def test_an_empty_timeline_says_so() -> None:
    assert lines_of(Timeline.of("predicted", [])) == ["predicted timeline: nothing happened"]


def test_names_cannot_drive_the_terminal_or_be_read_as_markup() -> None:
    load = made_up_load()
    spans = [Span(track="[red]n\x1b[2J/storage", kind="read", begin_s=0, end_s=1)]

    lines = lines_of(Timeline.of("measured", spans), report=replace(load.report, bottleneck="\x1b]0;x\x07"))

    assert all(line.isprintable() for line in lines)
    assert any(r"[red]n\x1b[2J/storage" in line for line in lines)


def test_what_the_recorder_had_no_room_for_is_owned_up_to() -> None:
    timeline = Timeline.of("measured", [Span(track="rank 0", kind="copy", begin_s=0, end_s=1)], dropped_spans=7)

    assert "7 spans were not kept: the recorder was full" in lines_of(timeline)


def test_the_axis_reaches_to_the_end_of_what_is_told() -> None:
    report = made_up_load().report
    spans = [Span(track="n0/storage", kind="read", begin_s=0.0, end_s=0.5)]
    short = Timeline.of("predicted", spans, marks=[Mark(at_s=1.5, kind="late", text="")])

    with_mark = lines_of(short)
    whole = lines_of(short, report=replace(report, kind="simulation", seconds={"total": 2.0}))

    assert with_mark[1].endswith(" 33%")
    assert whole[1].endswith(" 25%")
    assert whole[2].endswith("2.00 s")


@pytest.mark.parametrize("width", [24, 28, 30, 34])
def test_figures_are_whole_on_a_narrow_terminal(width: int) -> None:
    made = made_up_load()
    wide = lines_of(made.timeline, width=100)

    narrow = lines_of(made.timeline, width=width)

    assert max(map(len, narrow)) <= width
    shares = [line.rsplit(" ", 1)[-1] for line in wide if line.endswith("%")]
    assert [line.rsplit(" ", 1)[-1] for line in narrow if line.endswith("%") and "│" in line] == shares
    # Rates keep their units, in lines of their own.
    assert any(line.startswith("storage: ") for line in narrow)
    assert "MB/s" in " ".join(narrow) or "GB/s" in " ".join(narrow)
